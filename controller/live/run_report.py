"""Collects what a run's result.json says."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from mindtune.controller.contract import AnyFault, RunResult
from mindtune.controller.live.controller import LiveController
from mindtune.controller.trials.failure_text import shorten
from mindtune.controller.trials.worker import outcome_of
from mindtune.policies.signals import Observation

__all__ = ["RunReport"]

_RunOutcome = Literal["ok", "stopped", "oom", "bad_config", "non_finite", "crash", "interrupted"]

_MFU_STEPS = 1000


class RunReport:
    """The result of a run.

    Args:
        controller: Knows actions, findings and why the run was stopped.
    """

    def __init__(self, controller: LiveController) -> None:
        self._controller = controller
        self._mfu: deque[float] = deque(maxlen=_MFU_STEPS)
        self._last: Observation | None = None
        self._peak_allocated_bytes = 0
        self.eval_loss: float | None = None
        """Newest validation loss."""

    def add(self, observation: Observation) -> None:
        """Take in one step."""
        self._last = observation
        if observation.mfu is not None and observation.phase == "train":
            self._mfu.append(observation.mfu)
        if observation.memory_allocated_bytes is not None:
            self._peak_allocated_bytes = max(
                self._peak_allocated_bytes, observation.memory_allocated_bytes
            )

    def peak_memory_bytes(self, own_peak: int | None) -> int | None:
        """Return the worst of this rank's peak and what any rank's allocator held after a step."""
        known = [value for value in (own_peak, self._peak_allocated_bytes) if value]
        return max(known, default=None)

    def result(
        self,
        error: BaseException | None,
        *,
        steps: int,
        effective: Mapping[str, Any],
        own_peak: int | None,
        reserved: int | None = None,
        planted_faults: tuple[AnyFault, ...] = (),
    ) -> RunResult:
        """Return the result.

        Args:
            error: What ended the training before its time; None if it ended in good order.
            steps: Optimizer steps attempted.
            effective: Knobs read back.
            own_peak: Peak memory of this process in bytes; None if unknown.
            reserved: What its allocator had taken from the device at most; None if unknown.
            planted_faults: Faults that were planted on purpose.
        """
        last = self._last
        outcome, message = self._outcome(error)
        return RunResult(
            outcome=outcome,
            steps=steps,
            wall_s=0.0 if last is None or last.wall_time_s is None else last.wall_time_s,
            final_loss=None if last is None else last.loss,
            eval_loss=self.eval_loss,
            peak_memory_bytes=self.peak_memory_bytes(own_peak),
            peak_reserved_bytes=reserved,
            mfu=statistics.median(self._mfu) if self._mfu else None,
            actions=self._controller.num_actions,
            findings=dict(self._controller.finding_counts),
            effective=dict(effective),
            message=message,
            planted_faults=planted_faults,
        )

    def _outcome(self, error: BaseException | None) -> tuple[_RunOutcome, str]:
        if error is not None:
            message = shorten(f"{type(error).__name__}: {error}")
            if isinstance(error, Exception):
                return outcome_of(error), message
            return "interrupted", message
        if self._controller.stop_diagnosis is not None:
            return "stopped", self._controller.stop_diagnosis
        last = self._last
        if last is not None and last.loss is not None and not math.isfinite(last.loss):
            return "non_finite", f"the loss of the last step, {last.step}, is {last.loss}"
        return "ok", ""
