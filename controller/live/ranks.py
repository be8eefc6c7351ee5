"""This process among the processes of its job."""

from __future__ import annotations

from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import GlobalComm, get_group_size, get_rank

__all__ = [
    "JobRank",
    "data_parallel_degree",
    "equal_on_all_ranks",
    "has_loss",
    "job_rank",
    "numbers_of_all_ranks",
]


class JobRank(NamedTuple):
    """A rank and the number of ranks."""

    rank: int
    size: int


def job_rank() -> JobRank:
    """Return this process's rank; that of a job of one where communication is not set up."""
    if not GlobalComm.INITED:
        return JobRank(0, 1)
    return JobRank(get_rank(), get_group_size())


def data_parallel_degree(place: JobRank) -> int | None:
    """Return how many ranks see different samples; None where a compiler or a user splits them."""
    if place.size == 1:
        return 1
    replicated = ms.get_auto_parallel_context("parallel_mode") == ms.ParallelMode.DATA_PARALLEL
    return place.size if replicated else None


def has_loss(place: JobRank) -> bool:
    """Tell whether this rank's step returns the loss: of a pipeline the last stage's do."""
    stages = int(ms.get_auto_parallel_context("pipeline_stages"))
    return stages == 1 or place.rank // (place.size // stages) == stages - 1


def equal_on_all_ranks(value: int, place: JobRank) -> bool:
    """Tell whether all ranks call this with the same number; see `numbers_of_all_ranks`."""
    return len(set(numbers_of_all_ranks(value, place))) == 1


def numbers_of_all_ranks(value: int, place: JobRank) -> tuple[int, ...]:
    """Return the number that each rank calls this with; every rank must call it.

    Args:
        value: Below 2^24 in size: it travels as float32.
        place: This process's rank.
    """
    if place.size == 1:
        return (value,)
    row = np.zeros(place.size, np.float32)
    row[place.rank] = value
    values = ops.AllReduce(ops.ReduceOp.SUM, GlobalComm.WORLD_COMM_GROUP)(Tensor(row))
    return tuple(round(number) for number in values.asnumpy().tolist())
