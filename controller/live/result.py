"""Leaves the result of a run or a trial, whatever ended it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindtune.controller.alerts.run_alerts import RunAlerts
from mindtune.controller.live.observing import Machine
from mindtune.controller.live.run_report import RunReport
from mindtune.controller.live.settings import LiveSettings
from mindtune.controller.live.trial_report import TrialReport
from mindtune.controller.records.recorder import Recorder

__all__ = ["ResultWriter"]


@dataclass(frozen=True)
class ResultWriter:
    """Writes result.json, of a run or of a trial, and tells people how the run ended."""

    report: RunReport
    settings: LiveSettings
    machine: Machine
    recorder: Recorder | None = None
    trial: TrialReport | None = None
    alerts: RunAlerts | None = None

    def leave(self, error: BaseException | None, effective: Mapping[str, Any], steps: int) -> None:
        """Write the result.

        Args:
            error: What ended the training before its time.
            effective: Knobs read back.
            steps: Optimizer steps attempted.
        """
        peak = self.machine.peak_memory()
        own_peak, source = peak if peak is not None else (None, None)
        if self.trial is not None and error is not None:
            self.trial.fail(error)
        elif self.trial is not None:
            self.trial.finish(
                effective=effective,
                eval_loss=self.report.eval_loss,
                peak_memory_bytes=self.report.peak_memory_bytes(own_peak),
                memory_source=source,
            )
        else:
            result = self.report.result(
                error,
                steps=steps,
                effective=effective,
                own_peak=own_peak,
                reserved=self.machine.peak_reserved(),
                planted_faults=self.settings.faults,
            )
            if self.recorder is not None:
                self.recorder.result(result)
            if self.alerts is not None:
                self.alerts.end(result)
