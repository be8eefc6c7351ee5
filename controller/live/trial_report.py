"""Collects the measured steps of a trial and leaves its result.json."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from mindtune.controller.contract import TrialResult
from mindtune.controller.live.observing import SensedStep
from mindtune.controller.trials.failure_text import shorten
from mindtune.controller.trials.worker import TrialContext, outcome_of, write_result
from mindtune.policies.signals import Observation

__all__ = ["TrialReport"]


class TrialReport:
    """The result of the trial that this process is a part of.

    Args:
        context: The trial.
        rank: Of this process; ranks above 0 report failures only.
    """

    def __init__(self, context: TrialContext, *, rank: int) -> None:
        self._context = context
        self._rank = rank
        self._times: list[tuple[str | None, float]] = []
        self._measured: list[Observation] = []
        self._written = False

    @property
    def last_step(self) -> int:
        """Step after which the trial is over."""
        return self._context.warmup_steps + self._context.measure_steps

    def take(self, sensed: SensedStep) -> bool:
        """Take in all that is known at the end of a step; tell whether it was the last."""
        if sensed.agreed is not None:
            self.add_time(*sensed.agreed)
        is_last = self.add_step(sensed.observation)
        if is_last and sensed.agreed is not sensed.own:
            # No further step will bring the slowest rank's time of this last one.
            self.add_time(*sensed.own)
        return is_last

    def add_step(self, observation: Observation) -> bool:
        """Take in one step; tell whether it was the last."""
        if observation.step > self._context.warmup_steps:
            self._measured.append(observation)
        return observation.step >= self.last_step

    def add_time(self, step: int, step_time_s: float, phase: str | None) -> None:
        """Take in the time of a step, by the slowest rank; it may come one step later."""
        if self._context.warmup_steps < step <= self.last_step:
            self._times.append((phase, step_time_s))

    def finish(
        self,
        *,
        effective: Mapping[str, Any],
        eval_loss: float | None,
        peak_memory_bytes: int | None,
        memory_source: str | None,
        message: str = "",
    ) -> None:
        """Leave the result of a trial that came to its end."""
        if self._rank > 0 or self._written:
            return
        self._written = True
        times = self._step_times()
        measured = self._measured
        notes = [message] if message else []
        if len(measured) < self._context.measure_steps:
            notes.append(
                f"training ended after {len(measured)} of {self._context.measure_steps} measured "
                "steps"
            )
        losses = _column(measured, "loss")
        if not times:
            result = TrialResult(
                outcome="crash",
                effective=dict(effective),
                message="; ".join([*notes, "no step was measured"]),
            )
            write_result(self._context, result)
            return
        non_finite = losses is not None and not math.isfinite(losses[-1])
        result = TrialResult(
            outcome="non_finite" if non_finite else "ok",
            step_time_s=times,
            tokens_per_step=_median(measured, "tokens"),
            samples_per_step=_median(measured, "global_batch_size"),
            peak_memory_bytes=peak_memory_bytes,
            memory_source=memory_source,
            loss=losses,
            grad_norm=_column(measured, "grad_norm"),
            overflow=_column(measured, "overflow"),
            update_skipped=_column(measured, "update_skipped"),
            eval_loss=eval_loss,
            effective=dict(effective),
            message="; ".join(notes),
        )
        write_result(self._context, result)

    def fail(self, error: BaseException) -> None:
        """Leave the result of a trial that an exception ended, unless there is one already."""
        if self._written:
            return
        self._written = True
        result = TrialResult(
            outcome=outcome_of(error), message=shorten(f"{type(error).__name__}: {error}")
        )
        write_result(self._context, result, rank=self._rank)

    def _step_times(self) -> list[float]:
        """Times of plain training steps; of all where none is plain."""
        plain = [time_s for phase, time_s in self._times if phase == "train"]
        return plain or [time_s for _, time_s in self._times]


def _column(observations: list[Observation], name: str) -> list[float] | None:
    """One value per step; None unless every step has one."""
    values = [getattr(observation, name) for observation in observations]
    if not values or any(value is None for value in values):
        return None
    return [float(value) for value in values]


def _median(observations: list[Observation], name: str) -> float | None:
    values = [getattr(observation, name) for observation in observations]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
