"""What the trials of a config taught about a healthy run of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from mindtune.controller.contract import (
    GradNormPrior,
    KnobsFile,
    Learned,
    TrialResult,
    read_document,
    read_rows,
)
from mindtune.controller.errors import ConfigError
from mindtune.policies.signals import Observation

__all__ = ["learn"]

_PRIOR_EXPIRES_AFTER_STEPS = 128
"""By then a run has its own statistics; those of a trial are of the first steps of training."""


def learn(folders: Sequence[Path], *, peak_memory_bytes: int | None) -> Learned:
    """Return what the measured steps of some launches of one config show.

    Args:
        folders: folders of launches that ended ok.
        peak_memory_bytes: worst peak of them, as the study knows it.
    """
    results = [read_document(TrialResult, folder / TrialResult.FILE) for folder in folders]
    steps = [step for folder in folders for step in _measured_steps(folder)]
    times = [statistics.median(result.step_times()) for result in results]
    norms = _finite(step.grad_norm for step in steps) or _finite(
        norm for result in results for norm in _listed(result.grad_norm)
    )
    waits = [
        (step.data_time_s, step.step_time_s)
        for step in steps
        if step.data_time_s is not None and step.step_time_s is not None
    ]
    total_s = sum(step_time for _, step_time in waits)
    scales = _finite(step.loss_scale for step in steps if not step.overflow)
    return Learned(
        step_time_s=statistics.median(times) if times else None,
        data_share=sum(wait for wait, _ in waits) / total_s if total_s > 0 else None,
        peak_memory_bytes=peak_memory_bytes,
        loss_scale_min=min(scales, default=None),
        loss_scale_max=max(scales, default=None),
        grad_norm=_prior(norms),
    )


def _prior(norms: list[float]) -> GradNormPrior | None:
    if not norms:
        return None
    median = statistics.median(norms)
    return GradNormPrior(
        median=median,
        mad=statistics.median(abs(norm - median) for norm in norms),
        samples=len(norms),
        expires_after_steps=_PRIOR_EXPIRES_AFTER_STEPS,
    )


def _measured_steps(folder: Path) -> list[Observation]:
    """Return the training steps after the warm-up; none where the trial kept no readable table."""
    path = folder / "signals.csv"
    if not path.is_file():
        return []
    try:
        plan = read_document(KnobsFile, folder / KnobsFile.FILE).trial
        warmup = 0 if plan is None else plan.warmup_steps
        with path.open(encoding="utf-8", newline="") as lines:
            rows = [row.observation for row in read_rows(lines, source=str(path))]
    except (ConfigError, UnicodeDecodeError):
        return []
    return [row for row in rows if row.step > warmup and row.phase in (None, "train")]


def _listed(values: float | list[float] | None) -> list[float]:
    if values is None:
        return []
    return values if isinstance(values, list) else [values]


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
