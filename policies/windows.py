"""Robust statistics over a sliding window, updated in microseconds."""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from mindtune.policies.state_class import state_class

__all__ = ["MAD_TO_SIGMA", "Window", "median", "push"]

MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


def median(values: tuple[float, ...]) -> float:
    """Return the median of at least one finite number."""
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return 0.5 * ordered[half - 1] + 0.5 * ordered[half]


def push(values: tuple[float, ...], value: float, size: int) -> tuple[float, ...]:
    """Return `values` with `value` at the end, cut to its newest `size` entries."""
    if len(values) < size:
        return (*values, value)
    return (*values[len(values) - size + 1 :], value)


@state_class(frozen=True, slots=True)
class Window:
    """The newest finite samples of one signal, in time order and in size order.

    Median and median absolute deviation are exact: the size order is kept by insertion, and the
    deviation is found in it by bisection.
    """

    values: tuple[float, ...] = ()
    """Oldest first."""
    ordered: tuple[float, ...] = ()
    """The same numbers, smallest first."""

    @classmethod
    def of(cls, values: tuple[float, ...]) -> Window:
        """Return the window of these samples, oldest first."""
        return cls(values, tuple(sorted(values)))

    def contradiction(self) -> str | None:
        """Return why no run can have stored this window; None if one can."""
        if not all(math.isfinite(value) for value in self.values):
            return "values must be finite"
        if self.ordered != tuple(sorted(self.values)):
            return "ordered must hold the same numbers as values, smallest first"
        return None

    def __len__(self) -> int:
        return len(self.values)

    def push(self, value: float, size: int) -> Window:
        """Return the window with a finite `value` added, cut to its newest `size` samples."""
        values = self.values
        ordered = list(self.ordered)
        if len(values) >= size:
            del ordered[bisect_left(ordered, values[0])]
            values = values[1:]
        insort(ordered, value)
        return Window((*values, value), tuple(ordered))

    def median(self) -> float:
        """Return the median; the window must not be empty."""
        ordered = self.ordered
        half = len(ordered) // 2
        if len(ordered) % 2:
            return ordered[half]
        return 0.5 * ordered[half - 1] + 0.5 * ordered[half]

    def mad(self, center: float) -> float:
        """Return the median absolute deviation from `center`, which must be the median."""
        ordered = self.ordered
        count = len(ordered)
        if count % 2:
            return self._nearest(center, count // 2 + 1)[1]
        half = count // 2
        first, low = self._nearest(center, half)
        # The next one is a neighbour of the half that is nearest.
        above = ordered[first + half] - center if first + half < count else math.inf
        below = center - ordered[first - 1] if first else math.inf
        high = min(above, below)
        return 0.5 * low + 0.5 * high

    def _nearest(self, center: float, k: int) -> tuple[int, float]:
        """Return where the k samples nearest to `center` begin, and the largest distance."""
        ordered = self.ordered
        first, last = 0, len(ordered) - k
        while first < last:
            middle = (first + last) // 2
            if center - ordered[middle] > ordered[middle + k] - center:
                first = middle + 1
            else:
                last = middle
        return first, max(center - ordered[first], ordered[first + k - 1] - center)
