"""goals.yaml: what a run is to reach, for `compare --goals`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from mindtune.controller.contract.base import Document, Number
from mindtune.controller.contract.run_metrics import METRICS

__all__ = ["GoalsFile"]


class GoalsFile(Document):
    """goals.yaml."""

    FILE: ClassVar[str] = "goals.yaml"

    goals: dict[str, Number] = Field(min_length=1)
    """Metric -> what is to be reached: at least it, or at most it where less is better."""

    @field_validator("goals")
    @classmethod
    def _judged(cls, value: dict[str, float]) -> dict[str, float]:
        able = [name for name, metric in METRICS.items() if metric.better is not None]
        for name in value:
            if name not in able:
                raise ValueError(
                    "names must be metrics of which more or less is better, but got "
                    f"{name!r}; known are {', '.join(able)}"
                )
        return value
