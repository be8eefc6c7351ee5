"""The gate's rules: what a run must hold to be released."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mindtune.controller.contract.base import ContractModel, Document, Number
from mindtune.policies.signals import SIGNAL_NAMES

__all__ = ["GateFile", "GateRule", "Statistic"]

_NUMBERS = tuple(name for name in SIGNAL_NAMES if name != "phase")

Statistic = Literal["max", "min", "mean", "median", "last", "non_finite_share"]


class GateRule(ContractModel):
    """One statistic of one signal against a limit."""

    name: str = Field(min_length=1)
    signal: str
    """Column of signals.csv."""
    statistic: Statistic
    """non_finite_share: share of the steps at which the signal is NaN or infinite; the others make
    a rule fail where the value itself is non-finite."""
    last_steps: int | None = Field(default=None, ge=1)
    """Look at this many last steps; null: all. Of signals of time, steps that only trained."""
    min: Number | None = None
    max: Number | None = None
    required: bool = False
    """Fail where the signal was not measured, instead of saying so."""

    @field_validator("signal")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in _NUMBERS:
            raise ValueError(f"must be one of {', '.join(_NUMBERS)}, but got {value!r}")
        return value

    @model_validator(mode="after")
    def _limited(self) -> GateRule:
        if self.min is None and self.max is None:
            raise ValueError(f"rule {self.name!r} must have a min or a max, but got neither")
        return self


class GateFile(Document):
    """gate.yaml."""

    FILE: ClassVar[str] = "gate.yaml"

    rules: list[GateRule] = Field(min_length=1)
