"""Joins the ranks of a job and arranges them into data- and tensor-parallel groups.

Rank = data index x model_parallel + shard index: the shards of a replica exchange most, so they
are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindtune.controller.live.layout import ParallelLayout
from mindtune.experiments.gpt.launch import check_world_size
from mindtune.experiments.gpt.tensor_parallel import Shards

if TYPE_CHECKING:
    from mindtune.experiments.gpt.config import ParallelConfig

__all__ = ["Ranks", "join_ranks"]


@dataclass(frozen=True)
class Ranks:
    """This process among the job's ranks."""

    layout: ParallelLayout
    data_index: int
    """Which samples of a step this rank reads."""
    shards: Shards


def join_ranks(parallel: ParallelConfig) -> Ranks:
    """Initialise communication if there are several ranks, and create this rank's groups.

    Raises:
        ConfigError: The number of ranks is not the product of the degrees.
    """
    world_size = check_world_size(parallel)
    if world_size == 1:
        return Ranks(ParallelLayout(), 0, Shards())
    from mindspore import communication  # noqa: PLC0415 - one rank needs no communication library

    if not communication.GlobalComm.INITED:
        communication.init()
    rank = communication.get_rank()
    data_index, shard_index = divmod(rank, parallel.model_parallel)
    data_ranks = list(range(shard_index, world_size, parallel.model_parallel))
    shard_ranks = [
        data_index * parallel.model_parallel + i for i in range(parallel.model_parallel)
    ]
    data_group = _group("data", shard_index, data_ranks, world_size)
    shard_group = _group("shards", data_index, shard_ranks, world_size)
    layout = ParallelLayout(
        data_parallel=parallel.data_parallel,
        model_parallel=parallel.model_parallel,
        data_parallel_group=data_group,
        model_parallel_group=shard_group,
        rank=rank,
        world_size=world_size,
    )
    return Ranks(layout, data_index, Shards(parallel.model_parallel, shard_index, shard_group))


def _group(kind: str, index: int, ranks: list[int], world_size: int) -> str | None:
    """Return the name of a group; the world's own where it is the same, None for a single rank."""
    from mindspore import communication  # noqa: PLC0415

    if len(ranks) == 1:
        return None
    if len(ranks) == world_size:
        # On CPU the gather of compressed gradients exists in the world group only.
        return str(communication.GlobalComm.WORLD_COMM_GROUP)
    name = f"gpt_{kind}_{index}"
    communication.create_group(name, ranks)
    return name
