"""What holds for a whole run: given once to `Engine.init`, before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["GradNormPriorLike", "RunFacts"]


class GradNormPriorLike(Protocol):
    """Gradient-norm statistics of earlier healthy runs of this config (`learned.grad_norm`)."""

    @property
    def median(self) -> float:
        """Median gradient norm."""

    @property
    def mad(self) -> float:
        """Median absolute deviation."""

    @property
    def expires_after_steps(self) -> int:
        """Steps after which the run's own statistics alone count."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts of the run that no step reports."""

    reachable: frozenset[str]
    """Names of the knobs (keys of `decisions.KNOBS`) that an actuator can turn in this run."""
    data_parallel: int = 1
    """Data-parallel degree."""
    num_ranks: int = 1
    """Ranks of the run."""
    micro_batch_size: int | None = None
    """Samples per rank and micro-batch; None: unknown, then the batch cannot be resized."""
    optimizer_family: str = "unknown"
    """adam, sgd or unknown: decides how the learning rate follows the batch."""
    loss_scale_dynamic: bool | None = None
    """True: the run scales its loss dynamically; False: it keeps a fixed scale or none, which no
    policy touches; None: unknown."""
    max_num_microbatches: int | None = None
    """Most micro-batches per rank and step that the actuator accepts; None: it has no limit."""
    can_rewind: bool = False
    """Whether the run keeps healthy states that it can return to."""
    device: str = "cpu"
    """Kind of device: cpu, gpu or npu."""
