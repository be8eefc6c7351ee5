"""The files of a trial's folder: knobs.yaml, result.json and trial.json."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mindtune.controller.contract.base import ContractModel, Count, Document, Number, PositiveCount
from mindtune.search.errors import SearchError
from mindtune.search.knobs import KnobValue, canonical_or_derived

__all__ = [
    "ENV_CHECKPOINT",
    "ENV_CONFIG",
    "ENV_FAULTS",
    "ENV_MARK",
    "ENV_MODE",
    "ENV_RUN_DIR",
    "ENV_TRIAL_DIR",
    "KnobsFile",
    "Outcome",
    "TrialPlan",
    "TrialRecord",
    "TrialResult",
    "WorkerOutcome",
    "canonical_knobs",
]

ENV_TRIAL_DIR = "MINDTUNE_TRIAL_DIR"
"""Set in every trial: the folder with knobs.yaml, in which result.json is left."""
ENV_CHECKPOINT = "MINDTUNE_LOAD_CHECKPOINT"
"""Set in every trial of a study with `trial.load_checkpoint`: path of the checkpoint."""
ENV_RUN_DIR = "MINDTUNE_RUN_DIR"
"""Set by `mindtune run`: the folder in which the run keeps its records."""
ENV_CONFIG = "MINDTUNE_CONFIG"
"""Set by `mindtune run`: the best_config.yaml that `TuneCallback()` reads when given nothing."""
ENV_MODE = "MINDTUNE_MODE"
"""Set by `mindtune run`: observe or act; wins over the file."""
ENV_FAULTS = "MINDTUNE_FAULTS"
"""Set by `mindtune run --faults`: the faults.yaml to plant; wins over `faults:` of the config."""
ENV_MARK = "MINDTUNE_MARK"
"""Set on every process of a trial or run, so that all of them can be found and ended."""

WorkerOutcome = Literal["ok", "oom", "bad_config", "non_finite", "crash"]
Outcome = Literal[
    "ok",
    "oom",
    "bad_config",
    "non_finite",
    "crash",
    "timeout",
    "interrupted",
    "pruned",
    "infeasible",
]


class TrialPlan(ContractModel):
    """What the launcher asks of one trial."""

    number: Count
    """Number of the config in the study; 0 is the base config."""
    repeat: Count = 0
    """Repeat of the same config, from 0."""
    seed: Count = 0
    warmup_steps: Count
    measure_steps: PositiveCount
    deadline_s: float = Field(gt=0)


class KnobsFile(Document):
    """knobs.yaml: what a trial or run finds in its folder."""

    FILE: ClassVar[str] = "knobs.yaml"

    knobs: dict[str, KnobValue]
    trial: TrialPlan | None = None
    """Null in a production run."""

    @field_validator("knobs", mode="before")
    @classmethod
    def _canonical(cls, value: object) -> object:
        return canonical_knobs(value)


def canonical_knobs(value: object) -> object:
    """Return knobs as a file spells them in canonical spelling, for a validator."""
    if not isinstance(value, dict):
        return value
    try:
        return {str(name): canonical_or_derived(str(name), entry) for name, entry in value.items()}
    except SearchError as error:
        raise ValueError(str(error)) from None


_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
_LARGEST = 10**18
"""Numbers of samples, tokens and bytes up to here leave room for products of them."""

PerStep = Number | list[Number]
"""One value per measured step, or one value for all."""


class TrialResult(Document):
    """result.json: what a trial leaves; only `outcome` is required, `step_time_s` if it is ok."""

    FILE: ClassVar[str] = "result.json"

    outcome: WorkerOutcome
    step_time_s: float | list[float] | None = None
    """Seconds per optimizer step end to end with data wait, slowest rank, warm-up excluded."""
    tokens_per_step: float | None = Field(default=None, gt=0, le=_LARGEST)
    """Over all ranks."""
    samples_per_step: float | None = Field(default=None, gt=0, le=_LARGEST)
    """Over all ranks."""
    peak_memory_bytes: Count | None = None
    """Of the worst rank."""
    memory_source: str | None = None
    """How the peak was taken: pool, allocator, rss."""
    mfu: Number | None = None
    """If the trial knows it itself; otherwise computed from the step time."""
    loss: PerStep | None = None
    grad_norm: PerStep | None = None
    overflow: PerStep | None = None
    update_skipped: PerStep | None = None
    eval_loss: Number | None = None
    effective: dict[str, Any] = Field(default_factory=dict)
    """Knobs read back inside the worker; one that differs makes the trial `bad_config`."""
    message: str = ""

    @model_validator(mode="after")
    def _timed_if_ok(self) -> TrialResult:
        if self.outcome == "ok":
            times = self.step_times()
            if not times:
                raise ValueError("an ok result must carry step_time_s, but got none")
            if not all(_SHORTEST_S <= time <= _LONGEST_S for time in times):
                raise ValueError(
                    f"step_time_s must be positive finite seconds, {_SHORTEST_S:g} to "
                    f"{_LONGEST_S:g}, but got {min(times):g} to {max(times):g}"
                )
        return self

    def step_times(self) -> tuple[float, ...]:
        """Return the step times as a tuple; a single number is one entry."""
        if self.step_time_s is None:
            return ()
        if isinstance(self.step_time_s, (int, float)):
            return (float(self.step_time_s),)
        return tuple(self.step_time_s)


class TrialRecord(Document):
    """trial.json: what the launcher says about a trial; its outcome wins."""

    FILE: ClassVar[str] = "trial.json"

    outcome: Outcome
    exit_codes: dict[str, int | None] = Field(default_factory=dict)
    """Process (`command`, `rank0`, ...) -> exit code; null: unknown."""
    wall_s: float = Field(ge=0)
    message: str = ""
    peak_memory_bytes: Count | None = None
    """Worst rank, as the launcher saw it."""
    memory_source: str | None = None
    config_hash: str | None = None
    """Key under which a finished trial is known when a study resumes."""
    hardware: str | None = None
    """Of the nodes that Slurm gave; null: it ran on what the study ran on."""
    measured_in: str | None = None
    """HOST:FOLDER of the worker that measured it; null: it was measured in this folder."""
