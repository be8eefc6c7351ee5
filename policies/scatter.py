"""How far the samples of a positive signal stray upwards from what is usual around them."""

from __future__ import annotations

import math
from itertools import pairwise

from mindtune.policies.windows import median

__all__ = ["upward_scatter"]

_BLOCK = 8
# Quantiles of a sample, and where they lie on a normal distribution in standard deviations.
_UPPER = ((0.84, 0.994), (0.95, 1.645))


def upward_scatter(samples: tuple[float, ...]) -> float:
    """Return the robust upward deviation of the logarithm of samples, without their fall.

    The norm of a gradient falls tenfold within a warm-up; over a window that still holds its begin
    the fall would pass for scatter. So each sample is compared with the median of its own block of
    8, or with that of the block before, if that is lower: a rise from block to block counts. From
    the ratios come two upper quantiles, and the wider of the two deviations that they tell, since
    the tails of norms are heavy.

    Args:
        samples: At least one finite number, oldest first.

    Returns:
        The deviation; infinity where half of a block is not above 0.
    """
    ratios: list[float] = []
    before = math.inf
    count = len(samples)
    # What is left over from whole blocks belongs to the oldest one.
    starts = list(range(count % _BLOCK, count, _BLOCK)) or [0]
    for start, end in pairwise((0, *starts[1:], count)):
        block = samples[start:end]
        center = median(block)
        lower = min(center, before)
        if not 0.0 < lower < math.inf:
            return math.inf
        ratios += [value / lower for value in block]
        before = center
    ratios.sort()
    return max(math.log(ratios[int(share * count)]) / deviations for share, deviations in _UPPER)
