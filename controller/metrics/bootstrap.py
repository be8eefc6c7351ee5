"""Intervals for figures made of a run's steps, which are not independent of each other.

A slow step is followed by slow ones, a high loss by high ones: taken as independent, n steps look
like far more evidence than they are. Blocks of neighbouring steps are drawn instead (moving-block
bootstrap, Kuensch, Annals of Statistics 17, 1989), as long as the series remembers: the automatic
length of Politis and White (Econometric Reviews 23, 2004, with the correction of Patton, Politis
and White, 28, 2009). A series of m blocks has little more to say than m values, so the interval is
widened as Student's is for m values.

Of 100 pairs of series that are alike (medians, first-order memory rho), so many are told apart at
5 % by `compare`, which builds on these intervals:

| rho | 50 steps | 400 steps | 2000 steps |
| --- | --- | --- | --- |
| 0 | 4 | 4 | 9 |
| 0.5 | 11 | 3 | 10 |
| 0.8 | 13 | 8 | 9 |
| 0.9 | 24 | 8 | 10 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "Array",
    "block_interval",
    "block_length",
    "count_interval",
    "means",
    "medians",
    "slope_interval",
]

Array = npt.NDArray[np.float64]
Statistic = Callable[[Array], Array]
"""Maps rows of values to one number each."""

_NUM_RESAMPLES = 1000
_LEAST = 8
"""Fewer values tell nothing about their own scatter."""
_MOST = 4096
"""Longer series are drawn from as means of neighbours, which keeps what they remember."""
_TAILS = (2.5, 97.5)
_Z = 1.96


def means(rows: Array) -> Array:
    """Return the mean of each row."""
    return np.asarray(rows.mean(axis=1))


def medians(rows: Array) -> Array:
    """Return the median of each row."""
    return np.asarray(np.median(rows, axis=1))


def block_interval(
    values: Sequence[float] | Array, statistic: Statistic
) -> tuple[float, float] | None:
    """Return the 95 % interval of a statistic of a series.

    Args:
        values: In the order of their steps, all finite.
        statistic: Takes rows of values, such as `np.mean` over axis 1.

    Returns:
        None for fewer than 8 values.
    """
    series = _shortened(np.asarray(values, dtype=np.float64))
    if len(series) < _LEAST:
        return None
    block = block_length(series)
    drawn = statistic(series[_drawn(len(series), block)])
    return _interval(drawn, float(statistic(series[None, :])[0]), len(series) / block)


def count_interval(count: int) -> tuple[float, float]:
    """Return the 95 % interval of how many events were to be expected, of which `count` came.

    Byar's approximation of the exact Poisson limits (Breslow and Day, Statistical Methods in
    Cancer Research II, 1987, p. 69).
    """
    above = count + 1
    high = above * (1 - 1 / (9 * above) + _Z / (3 * math.sqrt(above))) ** 3
    if count == 0:
        return 0.0, high
    return count * (1 - 1 / (9 * count) - _Z / (3 * math.sqrt(count))) ** 3, high


def slope_interval(
    steps: Sequence[float], values: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """Return the slope of the least-squares line and its 95 % interval.

    What is drawn in blocks are the distances to the line.

    Args:
        steps: Increasing, at least two.
        values: As many, all finite.
    """
    x = np.asarray(steps, dtype=np.float64)
    y = np.asarray(values, dtype=np.float64)
    if len(x) > _MOST:
        x, y = _shortened(x), _shortened(y)
    weights = (x - x.mean()) / np.square(x - x.mean()).sum()
    slope = float(weights @ y)
    if len(x) < _LEAST:
        return slope, None
    rest = y - y.mean() - slope * (x - x.mean())
    block = block_length(rest)
    slopes = slope + rest[_drawn(len(x), block)] @ weights
    return slope, _interval(slopes, slope, len(x) / block)


def block_length(series: Array) -> int:
    """Return how many neighbours are drawn together: 1 where the series remembers nothing."""
    n = len(series)
    centred = series - series.mean()
    variance = float(centred @ centred) / n
    if n < 2 * _LEAST or variance <= 0:
        return 1
    # A correlation counts as none where it, and some after it, are within their own noise.
    quiet = max(5, math.ceil(math.sqrt(math.log10(n))))
    most = min(n - 1, math.ceil(math.sqrt(n)) + quiet)
    covariance = np.array([centred[k:] @ centred[: n - k] for k in range(most + 1)]) / n
    loud = np.abs(covariance[1:] / variance) >= 2 * math.sqrt(math.log10(n) / n)
    lag = next((k for k in range(most) if not loud[k : k + quiet].any()), most)
    if lag == 0:
        return 1
    window = min(2 * lag, most)
    k = np.arange(1, window + 1)
    # Flat-topped weights of Politis and Romano.
    weights = np.minimum(1.0, 2 * (1 - k / window))
    spectrum = covariance[0] + 2 * float(weights @ covariance[1 : window + 1])
    bias = 2 * float((weights * k) @ covariance[1 : window + 1])
    if spectrum <= 0:
        return min(window, n // 3)
    length = (1.5 * (bias / spectrum) ** 2 * n) ** (1 / 3)
    return int(max(1, min(math.ceil(length), 3 * math.sqrt(n), n // 3)))


def _interval(drawn: Array, value: float, num_blocks: float) -> tuple[float, float]:
    low, high = np.percentile(drawn, _TAILS)
    # Student's quantile over the normal one (Fisher's expansion); the lost degree of freedom.
    freedom = max(num_blocks - 1, 2.0)
    wider = 1 + (_Z**2 + 1) / (4 * freedom)
    wider += (5 * _Z**4 + 16 * _Z**2 + 3) / (96 * freedom**2)
    wider *= math.sqrt((freedom + 1) / freedom)
    below, above = max(0.0, value - float(low)), max(0.0, float(high) - value)
    return value - wider * below, value + wider * above


def _shortened(series: Array) -> Array:
    group = math.ceil(len(series) / _MOST)
    if group <= 1:
        return series
    whole = len(series) // group * group
    return means(series[:whole].reshape(-1, group))


def _drawn(n: int, block: int) -> npt.NDArray[np.intp]:
    """Return the indices of resampled series: blocks one after the other, cut to n."""
    # The same figure twice for the same run: a report must not change from call to call.
    generator = np.random.default_rng(0)
    starts = generator.integers(0, n - block + 1, size=(_NUM_RESAMPLES, math.ceil(n / block)))
    indices = starts[:, :, None] + np.arange(block)
    return indices.reshape(_NUM_RESAMPLES, -1)[:, :n]
