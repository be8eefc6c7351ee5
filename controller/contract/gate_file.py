"""The gate's rules: what a run must hold to be released."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mindtune.controller.contract.base import ContractModel, Document, Number
from mindtune.controller.contract.run_metrics import METRICS
from mindtune.policies.signals import SIGNAL_NAMES

__all__ = ["GateFile", "GateRule", "Statistic"]

_NUMBERS = tuple(name for name in SIGNAL_NAMES if name != "phase")

Statistic = Literal["max", "min", "mean", "median", "last", "non_finite_share"]


class GateRule(ContractModel):
    """A limit for a metric of the whole run, or for a statistic of a signal."""

    name: str = Field(min_length=1)
    metric: str | None = None
    """A metric of the run, as `compare` names it; null: the rule is over a signal."""
    signal: str | None = None
    """Column of signals.csv."""
    statistic: Statistic | None = None
    """non_finite_share: share of the steps at which the signal is NaN or infinite; the others make
    a rule fail where the value itself is non-finite."""
    last_steps: int | None = Field(default=None, ge=1)
    """Look at this many last steps; null: all. Of signals of time, steps that only trained."""
    min: Number | None = None
    max: Number | None = None
    required: bool = False
    """Fail where nothing was measured, instead of saying so."""

    @field_validator("signal")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in _NUMBERS:
            raise ValueError(f"must be one of {', '.join(_NUMBERS)}, but got {value!r}")
        return value

    @field_validator("metric")
    @classmethod
    def _known_metric(cls, value: str | None) -> str | None:
        if value is not None and value not in METRICS:
            raise ValueError(
                f"must be a metric, but got {value!r}; known are {', '.join(METRICS)}"
            )
        return value

    @model_validator(mode="after")
    def _over_one_thing(self) -> GateRule:
        window = (self.signal, self.statistic, self.last_steps)
        if self.metric is not None and any(part is not None for part in window):
            raise ValueError(
                f"rule {self.name!r} must have a metric, or a signal with a statistic, but got "
                "both; a metric is of the whole run"
            )
        if self.metric is None and None in (self.signal, self.statistic):
            raise ValueError(
                f"rule {self.name!r} must have a metric, or a signal with a statistic, but got "
                "neither"
            )
        return self

    @model_validator(mode="after")
    def _limited(self) -> GateRule:
        if self.min is None and self.max is None:
            raise ValueError(f"rule {self.name!r} must have a min or a max, but got neither")
        return self


class GateFile(Document):
    """gate.yaml."""

    FILE: ClassVar[str] = "gate.yaml"

    rules: list[GateRule] = Field(min_length=1)
