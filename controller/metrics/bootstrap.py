"""Intervals for figures made of a run's steps, which are not independent of each other.

A slow step is followed by slow ones, a high loss by high ones: taken as independent, n steps look
like far more evidence than they are. Blocks of neighbouring steps are drawn instead (moving-block
bootstrap, Kuensch, Annals of Statistics 17, 1989), as long as the series remembers: the automatic
length of Politis and White (Econometric Reviews 23, 2004, with the correction of Patton, Politis
and White, 28, 2009). A series of m blocks has little more to say than m values, so the interval is
widened as Student's is for m values.

Of 100 pairs of series that are alike (first-order memory rho, step times that scatter by 5 %), so
many are told apart at 5 % by `compare`, which builds on these intervals:

| rho | median of 50, 400, 2000 steps | 95th percentile of 400, 2000 | mean of 50, 400, 2000 |
| --- | --- | --- | --- |
| 0 | 2, 1, 3 | 7, 4 | 4, 5, 5 |
| 0.5 | 15, 6, 5 | 7, 8 | 12, 8, 5 |
| 0.8 | 13, 2, 5 | 9, 6 | 20, 7, 5 |
| 0.9 | 17, 4, 4 | 15, 5 | 24, 6, 5 |

Of 50 steps the median of 10 (rho 0.8) and 29 (0.9) pairs has no interval, nor has any 95th
percentile, and of 400 that of 2 and 20: they are not judged, and not in the table.
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
    "mean_interval",
    "quantile_interval",
    "rate_interval",
    "slope_interval",
]

Array = npt.NDArray[np.float64]
Values = Sequence[float] | Array
Interval = tuple[float, float]
Statistic = Callable[[Array], Array]
"""Maps rows of values to one number each."""

_NUM_RESAMPLES = 1000
_LEAST = 8
"""Fewer values tell nothing about their own scatter."""
_MOST = 4096
"""Longer series are drawn from as fewer values: means of neighbours, where means are asked for,
which keeps what they remember; else every k-th, which makes the interval no narrower."""
_ROUNDED = 0.25
"""Share of distinct values up to which a series is one of rounded values."""
_TAILS = (2.5, 97.5)
_Z = 1.96


def mean_interval(values: Values) -> Interval | None:
    """Return the 95 % interval of the mean of a series.

    Args:
        values: In the order of their steps, all finite.

    Returns:
        None for fewer than 8 values.
    """
    return _drawn_interval(_shortened(np.asarray(values, dtype=np.float64)), _means)


def block_interval(values: Values, statistic: Statistic) -> Interval | None:
    """Return the 95 % interval of any statistic of a series.

    Args:
        values: As of `mean_interval`.
        statistic: Takes rows of values.

    Returns:
        None for fewer than 8 values.
    """
    series = np.asarray(values, dtype=np.float64)
    thinned = series[:: max(1, math.ceil(len(series) / _MOST))]
    found = _drawn_interval(thinned, statistic)
    if found is None:
        return None
    moved = float(statistic(series[None, :])[0] - statistic(thinned[None, :])[0])
    return found[0] + moved, found[1] + moved


def quantile_interval(values: Values, share: float) -> Interval | None:
    """Return the 95 % interval of a quantile of a series, such as its median.

    It runs from quantile to quantile: as far from `share` as the share of values up to the
    quantile, which is a mean, is uncertain (Woodruff, Journal of the American Statistical
    Association 47, 1952). It is half a unit wider on both sides where few values come again and
    again, as in a log that rounds: there a quantile jumps from one to the next.

    Args:
        values: As of `mean_interval`.
        share: Of the values that lie below, 0 to 1.

    Returns:
        None where there are too few values for the quantile: its interval would reach beyond the
        smallest or the largest.
    """
    series = np.asarray(values, dtype=np.float64)
    if not len(series):
        return None
    below = series <= np.percentile(series, 100 * share)
    found = mean_interval(below.astype(np.float64))
    if found is None:
        return None
    reached = float(below.mean())
    low, high = share - (reached - found[0]), share + (found[1] - reached)
    if low < 0 or high > 1:
        return None
    margin = _unit(series) / 2
    ends = np.percentile(series, [100 * low, 100 * high])
    return float(ends[0]) - margin, float(ends[1]) + margin


def rate_interval(values: Values) -> Interval | None:
    """Return the 95 % interval of the share of steps at which something happens.

    As of `mean_interval`, and never narrower than Wilson's (Journal of the American Statistical
    Association 22, 1927) for as many independent steps as the series has blocks: where nothing
    has happened, no drawing from the series makes it happen.

    Args:
        values: 0 or 1 for each step, or a rate between them.

    Returns:
        None for fewer than 8 values.
    """
    series = np.asarray(values, dtype=np.float64)
    found = mean_interval(series)
    if found is None:
        return None
    share = float(series.mean())
    n = len(series) / block_length(_shortened(series))
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + (_Z / (2 * n)) ** 2)
    return max(0.0, min(found[0], middle - half)), min(1.0, max(found[1], middle + half))


def count_interval(count: int) -> Interval:
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
) -> tuple[float, Interval | None]:
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


def _drawn_interval(series: Array, statistic: Statistic) -> Interval | None:
    if len(series) < _LEAST:
        return None
    block = block_length(series)
    drawn = statistic(series[_drawn(len(series), block)])
    return _interval(drawn, float(statistic(series[None, :])[0]), len(series) / block)


def _interval(drawn: Array, value: float, num_blocks: float) -> Interval:
    low, high = np.percentile(drawn, _TAILS)
    # Student's quantile over the normal one (Fisher's expansion); the lost degree of freedom.
    freedom = max(num_blocks - 1, 2.0)
    wider = 1 + (_Z**2 + 1) / (4 * freedom)
    wider += (5 * _Z**4 + 16 * _Z**2 + 3) / (96 * freedom**2)
    wider *= math.sqrt((freedom + 1) / freedom)
    below, above = max(0.0, value - float(low)), max(0.0, float(high) - value)
    return value - wider * below, value + wider * above


def _means(rows: Array) -> Array:
    return np.asarray(rows.mean(axis=1))


def _unit(series: Array) -> float:
    """Return the distance of neighbouring values where they are rounded; 0: they are not."""
    distinct = np.unique(series)
    if not 1 < len(distinct) <= _ROUNDED * len(series):
        return 0.0
    return float(np.diff(distinct).min())


def _shortened(series: Array) -> Array:
    group = math.ceil(len(series) / _MOST)
    if group <= 1:
        return series
    whole = len(series) // group * group
    return _means(series[:whole].reshape(-1, group))


def _drawn(n: int, block: int) -> npt.NDArray[np.intp]:
    """Return the indices of resampled series: blocks one after the other, cut to n."""
    # The same figure twice for the same run: a report must not change from call to call.
    generator = np.random.default_rng(0)
    starts = generator.integers(0, n - block + 1, size=(_NUM_RESAMPLES, math.ceil(n / block)))
    indices = starts[:, :, None] + np.arange(block)
    return indices.reshape(_NUM_RESAMPLES, -1)[:, :n]
