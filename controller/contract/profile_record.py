"""profiles.jsonl: what short profiler windows of a run showed."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from mindtune.controller.contract.base import ContractModel, Count, Number, PositiveCount

__all__ = ["KernelTime", "ProfileRecord"]


class KernelTime(ContractModel):
    """What the kernels of one type took."""

    kind: str
    share: Number
    """Of the profiled steps' time; kernels that run side by side count each."""


class ProfileRecord(ContractModel):
    """One window; shares are of the profiled steps' time, null: not known on this device."""

    FILE: ClassVar[str] = "profiles.jsonl"

    first_step: Count
    last_step: Count
    steps: PositiveCount
    """Profiled steps; those that held a compile, an evaluation or a save are left out."""
    reason: str
    """What opened it: a kind of finding, or `request`."""
    step_time_s: Number
    """Mean of the profiled steps."""
    compute_share: Number | None = None
    """In which kernels other than those of communication ran."""
    communication_share: Number | None = None
    """In which ranks exchanged, waiting for each other included."""
    communication_overlap: Number | None = None
    """Share of that in which other kernels ran as well."""
    communication_bytes_per_s: Number | None = None
    """Achieved by this rank while it sent."""
    data_share: Number | None = None
    """Spent waiting for data."""
    host_share: Number | None = None
    """In which no kernel ran and no data was waited for: Python, launches, callbacks."""
    kernels: list[KernelTime] = Field(default_factory=list)
    """Types that took most, in order."""
    cost_s: Number = 0.0
    """Time that opening and closing took out of the training, in no step's time."""
    files: str = ""
    """Folder of what the profiler wrote, relative to the run's."""
    message: str = ""
    """Why something is not known."""
