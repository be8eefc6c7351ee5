"""summary.json: what a study knows of every config, rewritten after each measurement.

It is derived from the trials' own files and can be lost without harm; reports, exports and
comparisons read it instead of the database.
"""

from __future__ import annotations

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

__all__ = ["Measurement", "StudySummary", "TrialSummary", "read_summary"]


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

    def confirming(self) -> list[Measurement]:
        """Return the ok measurements that values are taken from."""
        repeats = [entry for entry in self.measurements if entry.repeat > 0]
        return [entry for entry in repeats or self.measurements if entry.outcome == "ok"]


class StudySummary(Document):
    """The whole study."""

    FILE: ClassVar[str] = "summary.json"

    study: str
    complete: bool = False
    """The confirmation is over and the winner is final."""
    objective: Literal["mfu", "relative"]
    """relative: peak unknown, values are speeds over the base config's."""
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
