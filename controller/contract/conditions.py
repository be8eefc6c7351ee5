"""conditions.json: what a run was made under, and so what its figures may be compared with."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from mindtune.controller.contract.base import Document, PositiveCount
from mindtune.controller.contract.study_file import ModelSection

__all__ = ["RunConditions"]


class RunConditions(Document):
    """What a run was made under; null: not known.

    Rank 0 writes it into the run's folder when training begins, so that a killed run has one too.
    """

    FILE: ClassVar[str] = "conditions.json"

    hardware: str | None = None
    """Kind of devices; equal lines, comparable times."""
    num_devices: PositiveCount | None = None
    """Devices of the job, idle ones included."""
    seed: int | None = None
    """MindSpore's global seed."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Package -> version."""
    precision: str | None = None
    """What names the peak."""
    model: ModelSection | None = None
    peak_flops: float | None = Field(default=None, gt=0)
    """Dense peak of one device in FLOP/s that MFU is taken of."""
    peak_source: str | None = None
    """Where that figure comes from; without a figure, why there is none."""
    recompute: str | None = None
    """Canonical value of the knob; null: not known, which leaves HFU open."""
