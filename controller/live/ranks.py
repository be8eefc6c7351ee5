"""This process among the processes of its job."""

from __future__ import annotations

from typing import NamedTuple

from mindspore.communication import GlobalComm, get_group_size, get_rank

__all__ = ["JobRank", "job_rank"]


class JobRank(NamedTuple):
    """A rank and the number of ranks."""

    rank: int
    size: int


def job_rank() -> JobRank:
    """Return this process's rank; that of a job of one where communication is not set up."""
    if not GlobalComm.INITED:
        return JobRank(0, 1)
    return JobRank(get_rank(), get_group_size())
