"""What a program does inside a trial: read its settings, leave its outcome.

context = TrialContext.from_env()
with reporting(context, rank=rank):
    ...  # train `context.warmup_steps + context.measure_steps` steps
    write_result(context, TrialResult(outcome="ok", step_time_s=times), rank=rank)
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.contract import (
    ENV_TRIAL_DIR,
    KnobsFile,
    TrialPlan,
    TrialResult,
    WorkerOutcome,
    read_document,
    write_json,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.failure_text import is_out_of_memory, shorten
from mindtune.policies.errors import PolicyError
from mindtune.search.errors import SearchError
from mindtune.search.knobs import KnobValue

__all__ = ["TrialContext", "outcome_of", "reporting", "write_result"]


@dataclass(frozen=True, kw_only=True)
class TrialContext:
    """The trial that this process is a part of."""

    trial_dir: Path
    knobs: dict[str, KnobValue]
    plan: TrialPlan
    """Number, repeat, seed, steps and deadline."""

    @classmethod
    def from_env(cls) -> TrialContext | None:
        """Return the trial that the environment names; None outside of a trial.

        Raises:
            ConfigError: knobs.yaml is missing, not valid, or names no trial.
        """
        folder = os.environ.get(ENV_TRIAL_DIR)
        if not folder:
            return None
        path = Path(folder) / KnobsFile.FILE
        document = read_document(KnobsFile, path)
        if document.trial is None:
            raise ConfigError(
                f"{path} must hold `trial` (number, warmup_steps, measure_steps, deadline_s), "
                f"but has none; unset {ENV_TRIAL_DIR} to run outside of a trial."
            )
        return cls(trial_dir=Path(folder), knobs=document.knobs, plan=document.trial)

    @property
    def number(self) -> int:
        """Number of the config in the study; 0 is the base config."""
        return self.plan.number

    @property
    def repeat(self) -> int:
        """Repeat of the same config, from 0."""
        return self.plan.repeat

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return self.plan.seed

    @property
    def warmup_steps(self) -> int:
        """First steps, which are not measured."""
        return self.plan.warmup_steps

    @property
    def measure_steps(self) -> int:
        """Steps after the warm-up, which are measured."""
        return self.plan.measure_steps

    @property
    def deadline_s(self) -> float:
        """Longest time from the first step to the end of the trial."""
        return self.plan.deadline_s


def _result_path(context: TrialContext, rank: int) -> Path:
    name = TrialResult.FILE if rank == 0 else f"result.rank{rank}.json"
    return context.trial_dir / name


def write_result(context: TrialContext, result: TrialResult, *, rank: int = 0) -> None:
    """Leave a rank's result, atomically: result.json on rank 0, result.rankR.json elsewhere.

    Ranks above 0 need to call this only when they fail.
    """
    write_json(_result_path(context, rank), result)


def outcome_of(error: BaseException) -> WorkerOutcome:
    """Return the outcome that an exception stands for.

    `MemoryError` and messages of memory that ran out are `oom`, `FloatingPointError` is
    `non_finite`, `ConfigError`, `SearchError` and `PolicyError` are `bad_config`, all else is
    `crash`.
    """
    if is_out_of_memory(_text(error)):
        return "oom"
    if isinstance(error, FloatingPointError):
        return "non_finite"
    if isinstance(error, (ConfigError, SearchError, PolicyError)):
        return "bad_config"
    return "crash"


def _text(error: BaseException) -> str:
    return shorten("".join(traceback.format_exception_only(error)))


@contextlib.contextmanager
def reporting(context: TrialContext, *, rank: int = 0) -> Iterator[None]:
    """Leave a typed result for an exception in the block, then let it go on.

    A result that this rank has already left stays: the non-zero exit tells the rest.
    """
    try:
        yield
    except Exception as error:
        if not _result_path(context, rank).exists():
            result = TrialResult(outcome=outcome_of(error), message=_text(error))
            write_result(context, result, rank=rank)
        raise
