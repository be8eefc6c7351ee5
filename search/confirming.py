"""Ranking of confirmed configs, honest about noise.

Each leader is measured several times, alternating with the others. Two leaders that differ by no
more than 2 % are a tie, and a tie goes to the one with more memory to spare. Noise does not widen
it: of two leaders that a few repeats cannot tell apart, the one that was measured better is still
the better guess. With a band of two standard errors, 30 searches of three simulated clusters lost
another 2 % on average, and 7 % in the median where noise was largest, by choosing the smaller
config (experiments/search_quality).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mindtune.search.errors import SearchError
from mindtune.search.student import student_quantile

__all__ = ["Comparison", "Confirmed", "Spread", "compare", "rank", "spread"]

TIE = 0.02
"""Relative difference below which two values are always a tie: step times of one config differ by
2 - 5 % between repeats in the published tables."""
_LEVEL = 0.95


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeats."""

    median: float
    low: float
    """First quartile; the minimum of fewer than four repeats."""
    high: float
    """Third quartile; the maximum of fewer than four repeats."""
    count: int


@dataclass(frozen=True)
class Confirmed:
    """One config's confirmed values."""

    number: int
    """Of the trial in the study."""
    values: tuple[float, ...]
    """One per repeat."""
    headroom_bytes: float | None = None
    """Device memory less the measured peak; where the device is unknown, minus the peak."""

    @property
    def median(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.values)


@dataclass(frozen=True)
class Comparison:
    """Value of one set of repeats over another's."""

    ratio: float
    """Of the geometric means."""
    low: float
    high: float
    """Interval (95 %) of the ratio; equal to `ratio` where no noise is known."""
    different: bool | None
    """None: cannot be told from single repeats."""


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles.

    Raises:
        SearchError: if there is no value.
    """
    if not values:
        raise SearchError("a spread needs at least one value, but got none.")
    if len(values) < 4:
        return Spread(statistics.median(values), min(values), max(values), len(values))
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), low, high, len(values))


def compare(values: Sequence[float], reference: Sequence[float]) -> Comparison:
    """Return how `values` compare with `reference` (all positive), noise considered.

    The interval is that of the two-sample t test on logarithms, with one variance for both sides:
    what disturbs a launch (the machine, the clock, the order) does so by a share of its time and
    whatever its config. Resampling two or three launches would give an interval far too narrow,
    since a resample never holds a value outside of them.
    """
    if not values or not reference:
        raise SearchError(
            f"a comparison needs values on both sides, but got {len(values)} and {len(reference)}."
        )
    logs, reference_logs = list(map(math.log, values)), list(map(math.log, reference))
    distance = statistics.fmean(logs) - statistics.fmean(reference_logs)
    ratio = math.exp(distance)
    freedom = len(logs) + len(reference_logs) - 2
    if not freedom:
        return Comparison(ratio, ratio, ratio, None)
    squares = _squares(logs) + _squares(reference_logs)
    error = math.sqrt(squares / freedom * (1 / len(logs) + 1 / len(reference_logs)))
    margin = student_quantile((1 + _LEVEL) / 2, freedom) * error
    low, high = math.exp(distance - margin), math.exp(distance + margin)
    apart = (low > 1.0 or high < 1.0) and abs(ratio - 1.0) > TIE
    return Comparison(ratio, low, high, apart)


def _squares(values: Sequence[float]) -> float:
    """Return the sum of squared distances from the mean."""
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)


def rank(leaders: Sequence[Confirmed]) -> tuple[Confirmed, ...]:
    """Return the leaders best first; ties go to more memory head-room.

    A tie is a difference of medians of at most 2 % of the better one. The best median and
    everything tied with it form the first group, the best of the rest the next, and so on.
    """
    rest = sorted(leaders, key=lambda leader: (-leader.median, leader.number))
    ranked: list[Confirmed] = []
    while rest:
        best = rest[0]
        group = [one for one in rest if best.median - one.median <= TIE * abs(best.median)]
        rest = [leader for leader in rest if leader not in group]
        ranked += sorted(group, key=_by_headroom)
    return tuple(ranked)


def _by_headroom(leader: Confirmed) -> tuple[float, float, int]:
    unknown = leader.headroom_bytes is None
    return (
        math.inf if unknown else -(leader.headroom_bytes or 0.0),
        -leader.median,
        leader.number,
    )
