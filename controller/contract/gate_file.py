"""The gate's rules: what a run must hold to be released."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mindtune.controller.contract.base import ContractModel, Document, Number
from mindtune.controller.contract.run_metrics import METRICS
from mindtune.controller.contract.trial_files import Outcome
from mindtune.policies.signals import SIGNAL_NAMES

__all__ = ["GateFile", "GateRule", "Statistic"]

_NUMBERS = tuple(name for name in SIGNAL_NAMES if name != "phase")

Statistic = Literal["max", "min", "mean", "median", "last", "non_finite_share"]


class GateRule(ContractModel):
    """A limit for a metric of the whole run or for a statistic of a signal, or how it may end."""

    name: str = Field(min_length=1)
    metric: str | None = None
    """A metric of the run, as `compare` names it."""
    signal: str | None = None
    """Column of signals.csv."""
    statistic: Statistic | None = None
    """non_finite_share: share of the steps at which the signal is NaN or infinite; the others make
    a rule fail where the value itself is non-finite."""
    last_steps: int | None = Field(default=None, ge=1)
    """Look at this many last steps; null: all. Of signals of time, steps that only trained. What a
    restart has made once more does not count, only what replaced it."""
    outcome: list[Outcome | Literal["stopped"]] | None = Field(default=None, min_length=1)
    """Ends that are fine; stopped: by a policy."""
    min: Number | None = None
    max: Number | None = None
    required: bool = True
    """Fail where there is nothing to judge by; false: pass, and say so."""

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

    @field_validator("min", "max")
    @classmethod
    def _a_number(cls, value: float | None) -> float | None:
        if value is not None and math.isnan(value):
            raise ValueError("must be a number, but got nan, which no value can hold")
        return value

    @model_validator(mode="after")
    def _over_one_thing(self) -> GateRule:
        of_signal = (self.signal, self.statistic, self.last_steps)
        kinds = [
            self.metric is not None,
            any(part is not None for part in of_signal),
            self.outcome is not None,
        ]
        if sum(kinds) != 1 or (kinds[1] and None in (self.signal, self.statistic)):
            got = "several of them" if sum(kinds) > 1 else "no whole one"
            raise ValueError(
                f"rule {self.name!r} must have a metric, or a signal with a statistic, or an "
                f"outcome, but got {got}; last_steps belongs to a signal, a metric is of the "
                "whole run"
            )
        return self

    @model_validator(mode="after")
    def _limited(self) -> GateRule:
        limits = [limit for limit in (self.min, self.max) if limit is not None]
        if self.outcome is not None:
            if limits:
                raise ValueError(f"rule {self.name!r} is over an outcome, which has no min or max")
        elif not limits:
            raise ValueError(f"rule {self.name!r} must have a min or a max, but got neither")
        elif limits != sorted(limits):
            raise ValueError(
                f"rule {self.name!r} must have a min of at most its max, but got {self.min:g} and "
                f"{self.max:g}"
            )
        return self


class GateFile(Document):
    """gate.yaml."""

    FILE: ClassVar[str] = "gate.yaml"

    rules: list[GateRule] = Field(min_length=1)

    @field_validator("rules")
    @classmethod
    def _told_apart(cls, value: list[GateRule]) -> list[GateRule]:
        names = [rule.name for rule in value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            # CI systems show one check of a name.
            raise ValueError(f"names must differ from rule to rule, but got {twice} twice")
        return value
