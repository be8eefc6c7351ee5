"""How the ranks of one job are arranged around the training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindtune.controller.errors import ConfigError

__all__ = ["ParallelLayout", "is_tp_sharded"]


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """The ranks of a job and the groups over which the training step communicates.

    The step reduces gradients over the data-parallel group, and sums the squares of sharded
    gradients over the model-parallel (tensor-parallel) group. A group of None means that the step
    performs no such collective, because there is one rank only or because the compiler does it.
    """

    data_parallel: int = 1
    """Number of ranks with equal weights and different samples."""
    model_parallel: int = 1
    """Number of ranks among which the sharded weights are split."""
    data_parallel_group: str | None = None
    """Communication group of the ranks that hold the same shard."""
    model_parallel_group: str | None = None
    """Communication group of the ranks that hold the shards of one replica."""
    rank: int = 0
    """This process among all ranks."""
    world_size: int = 1
    """Number of all ranks; above 1 every step gathers one small row from each of them."""
    gradients_mean: bool = True
    """Whether the reduction divides by `data_parallel` (MindSpore's `gradients_mean`)."""

    def __post_init__(self) -> None:
        for name in ("data_parallel", "model_parallel", "world_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be at least 1, but got {getattr(self, name)}; "
                    "leave it out for a single rank."
                )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank must be in 0..{self.world_size - 1}, but got {self.rank}; "
                "pass mindspore.communication.get_rank()."
            )
        degrees = self.data_parallel * self.model_parallel
        if self.world_size % degrees:
            raise ConfigError(
                f"data_parallel * model_parallel must divide world_size = {self.world_size}, "
                f"but got {self.data_parallel} * {self.model_parallel}; change one of the degrees."
            )

    @property
    def reduces_gradients(self) -> bool:
        """Whether the step itself reduces the gradients."""
        return self.data_parallel > 1 and self.data_parallel_group is not None

    @property
    def gradient_divisor(self) -> float:
        """What the sum over the data-parallel ranks is divided by."""
        return float(self.data_parallel) if self.gradients_mean else 1.0


def is_tp_sharded(parameter: Any) -> bool:
    """Whether a Parameter holds one rank's shard of a tensor-parallel weight.

    The mark is the attribute `tp_sharded`: a Parameter's own name is overwritten inside a
    `CellList`, an attribute survives.
    """
    return bool(getattr(parameter, "tp_sharded", False))
