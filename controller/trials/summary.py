"""summary.json: what a study knows of every config, rewritten after each measurement.

It is derived from the trials' own files and can be lost without harm; reports, exports and
comparisons read it instead of the database.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from mindtune.controller.contract import (
    ContractModel,
    Count,
    Document,
    Number,
    Outcome,
    PositiveCount,
    RejectedRule,
    canonical_knobs,
    read_document,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.study_folder import StudyFolder
from mindtune.search.knobs import KnobValue

__all__ = ["AblationStep", "KeptStep", "Measurement", "StudySummary", "TrialNoise",
           "TrialSummary", "confirming", "read_summary"]  # fmt: skip


class Measurement(ContractModel):
    """One launch of a config."""

    repeat: Count
    """0 is the search's own; the confirmation counts from 1."""
    seed: Count
    outcome: Outcome
    message: str = ""
    value: Number | None = None
    """mfu^a x stability^b; of the first steps if it was pruned; null where it measured nothing."""
    mfu: Number | None = None
    stability: Number | None = None
    tokens_per_s: Number | None = None
    step_time_s: float | None = None
    """Median of the measured steps."""
    peak_memory_bytes: Count | None = None
    """Worst rank."""
    memory_source: str | None = None
    final_loss: Number | None = None
    """Mean of the last measured losses."""
    eval_loss: Number | None = None
    wall_s: float = Field(ge=0)

    def speed_and_stability(self) -> tuple[float, float] | None:
        """Return MFU (steps per second where there is none) and stability; None: no value.

        All configs of a study have MFU, or none has, and all train as many samples per step.
        """
        if not self.value or not self.step_time_s or self.stability is None:
            return None
        return self.mfu or 1.0 / self.step_time_s, self.stability


class TrialSummary(ContractModel):
    """One config."""

    number: Count
    knobs: dict[str, KnobValue]
    """With micro_batch_num, where it follows from them."""
    outcome: Outcome
    """Of the search's own measurement."""
    message: str = ""
    value: Number | None = None
    """Median over the confirming repeats; the search's own value where there are none."""
    interval: tuple[Number, Number] | None = None
    """Lowest and highest value of the confirming repeats."""
    confirmed: bool = False
    converges: bool | None = None
    """Whether its losses stay inside the base's band; null: not judged."""
    convergence: str = ""
    """How that was judged, or why not."""
    measurements: list[Measurement] = Field(default_factory=list)

    @field_validator("knobs", mode="before")
    @classmethod
    def _canonical(cls, value: object) -> object:
        return canonical_knobs(value)

    def search_value(self) -> float | None:
        """Return the value of the search's own launch; None: it did not end ok."""
        for entry in self.measurements:
            if entry.repeat == 0 and entry.outcome == "ok" and entry.value:
                return float(entry.value)
        return None

    def settled_value(self) -> float | None:
        """Return the median of the confirming launches' values, or else the search's own."""
        values = [entry.value for entry in confirming(self.measurements) if entry.value]
        return statistics.median(values) if values else self.search_value()

    def speed_and_stability(self) -> tuple[float, float] | None:
        """Return the medians of what the confirming launches measured; None: nothing."""
        launches = [found for entry in self.confirming() if (found := entry.speed_and_stability())]
        if not launches:
            return None
        speeds, stabilities = zip(*launches, strict=True)
        return statistics.median(speeds), statistics.median(stabilities)

    def confirming(self) -> list[Measurement]:
        """Return the ok measurements that values are taken from."""
        repeats = [entry for entry in self.measurements if entry.repeat > 0]
        return [entry for entry in repeats or self.measurements if entry.outcome == "ok"]


class KeptStep(ContractModel):
    """A config that was better than all before it, as the search went."""

    trial: Count
    value: Number
    """Of the search's own launch, as the gain is."""
    gain: Number | None = None
    """Over the step before; null for the first."""
    different: bool | None = None
    """Whether that is more than noise (95 %); null: the noise of a launch is not known. The best
    of many single launches is the luckiest, so that a step within the noise may be none."""
    changed: dict[str, tuple[KnobValue, KnobValue]] = Field(default_factory=dict)
    """Knob -> its values in the step before and in this one."""
    version: str
    """Hash of program, inputs, versions and knobs that it was measured with."""
    way_back: str
    """Command that makes a config file of it, for the study's folder."""


class AblationStep(ContractModel):
    """What one knob gave, or several that can only change together; both ends were measured."""

    trial: Count | None
    """Null: measured for the ablation alone, by `mindtune search --ablate`."""
    since: Count | None
    """Trial of the step before; the first one's is the base config."""
    changed: dict[str, tuple[KnobValue, KnobValue]]
    """Knob -> its values in the step before and in this one."""
    value: Number
    """Of base and winner the median of their confirming launches, where there are any: the
    winner's own in the search is the luckiest of many. Of the others that of one launch of the
    search's length."""
    ratio: Number
    """Over the step before."""
    different: bool | None = None
    """Whether that is more than noise (95 %); null: the noise of a launch is not known."""


class TrialNoise(ContractModel):
    """Relative standard deviations of what was measured though nothing was changed."""

    step: Number | None = None
    """Of a step time within a launch, robust; median over the launches."""
    part: Number | None = None
    """Of the median of a third of a launch."""
    launch: Number | None = None
    """Of the value from launch to launch of one config, pooled over the configs."""
    launch_freedom: Count = 0
    """Degrees of freedom that it rests on."""
    common: Number | None = None
    """Part of it that all configs of a round of launches share; null: not to be told apart."""
    own: Number | None = None
    """Part of it that every launch has of its own."""


class StudySummary(Document):
    """The whole study."""

    FILE: ClassVar[str] = "summary.json"

    study: str
    complete: bool = False
    """The confirmation is over and the winner is final."""
    objective: Literal["mfu", "relative"]
    """relative: peak unknown, values are speeds over the base config's."""
    hardware: str | None = None
    """What the search ran on, as `describe_hardware` gives it; null: not known."""
    planned: PositiveCount
    """Configs to measure."""
    total: int = Field(ge=0)
    """Configs before any rule."""
    feasible: int = Field(ge=0)
    rejected: list[RejectedRule] = Field(default_factory=list)
    trials: list[TrialSummary] = Field(default_factory=list)
    leaders: list[Count] = Field(default_factory=list)
    winner: Count | None = None
    """The best so far until the study is complete; null while nothing is ok."""
    reason: str = ""
    """Why it is the winner."""
    search_ended: str = ""
    """Why no further config was tried; empty: the search goes on."""
    front: list[Count] = Field(default_factory=list)
    """Configs that no other beats in speed and stability by more than noise."""
    kept: list[KeptStep] = Field(default_factory=list)
    """The improvements of the search, in order."""
    noise: TrialNoise = TrialNoise()
    ablation: list[AblationStep] = Field(default_factory=list)
    """From the base config to the winner, as far as configs between them were measured."""

    def trial(self, number: int) -> TrialSummary:
        """Return a config by its number.

        Raises:
            ConfigError: if the study has none of that number.
        """
        for trial in self.trials:
            if trial.number == number:
                return trial
        known = ", ".join(str(trial.number) for trial in self.trials) or "none yet"
        raise ConfigError(f"trial must be one of {known}, but got {number}.")


def confirming(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the confirming ones with a value, those above the memory limit included."""
    return [
        entry
        for entry in measurements
        if entry.repeat > 0 and entry.outcome in ("ok", "infeasible") and entry.value
    ]


def read_summary(folder: StudyFolder) -> StudySummary:
    """Return the summary of a study.

    Raises:
        ConfigError: if the folder holds none.
    """
    if not folder.summary.exists():
        raise ConfigError(
            f"{folder.root} must be the folder of a study with finished trials, but it has no "
            f"{folder.summary.name}; give the folder that `mindtune search` wrote."
        )
    return read_document(StudySummary, folder.summary)
