"""How the learning rate follows the batch."""

from __future__ import annotations

import math

__all__ = ["learning_rate_factor"]


def learning_rate_factor(optimizer_family: str, batch_ratio: float) -> float:
    """Return the factor on the learning rate when the batch grows by `batch_ratio`.

    The square root for the Adam family (Malladi et al., arXiv:2205.10287), the ratio itself for
    SGD (Goyal et al., arXiv:1706.02677), and no change for an optimizer of an unknown family: a
    rate that is too low costs time, one that is too high costs the run.
    """
    if optimizer_family == "adam":
        return math.sqrt(batch_ratio)
    if optimizer_family == "sgd":
        return batch_ratio
    return 1.0
