"""The result of a trial whose program leaves none: what its log says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from mindtune.controller.contract import TrialPlan, TrialResult
from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers import LogRecords, read_log
from mindtune.policies.signals import Observation
from mindtune.search.knobs import KnobValue

__all__ = ["LARGEST_LOG", "LogWatch", "complete_result", "result_from_logs", "telling_logs"]

LARGEST_LOG = 256 * 2**20
"""Bytes of a log that is still read. Readers take 3 to 13 MB/s (experiments/replay), and a program
that prints without end must not cost the study more than a trial does."""
_READ_EVERY_S = 2.0
_REST = 20.0
"""Times as long as a log took to read it is left alone: watching takes at most a twentieth of one
core, which the trial may share."""


def telling_logs(
    logs: Mapping[str, tuple[Path, ...]], knobs: Mapping[str, KnobValue]
) -> list[Path]:
    """Return the logs of a launch that may tell its steps, the most telling first.

    Args:
        logs: name of a process -> its logs.
        knobs: the config.
    """
    found = [log for name, paths in logs.items() if name != "scheduler" for log in paths]
    if knobs.get("pipeline_stage", 1) != 1:
        found.reverse()  # of a pipeline the last stage alone has the loss
    return found


def complete_result(logs: Sequence[Path], plan: TrialPlan) -> TrialResult | None:
    """Return what logs tell of the planned steps; None unless they hold all of them.

    A program that does not know of the plan trains on: what it did after it is not measured.
    """
    last = plan.warmup_steps + plan.measure_steps
    return result_from_logs(logs, warmup_steps=plan.warmup_steps, last_step=last)


class LogWatch:
    """Tells whether the logs of a running program without our callback hold its planned steps.

    Args:
        logs: the logs, which may not exist yet.
        plan: what is asked of the trial.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        logs: Sequence[Path],
        plan: TrialPlan,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs = logs
        self._plan = plan
        self._clock = clock
        self._size = 0
        self._next_s = clock()

    def is_complete(self) -> bool:
        """Tell it, from what was read at most a few seconds ago."""
        began_s = self._clock()
        if began_s < self._next_s:
            return False
        size = sum(path.stat().st_size for path in self._logs if path.is_file())
        if size == self._size:
            return False
        self._size = size
        try:
            return complete_result(self._logs, self._plan) is not None
        except (ConfigError, OSError):
            return False
        finally:
            took_s = self._clock() - began_s
            self._next_s = began_s + max(_READ_EVERY_S, _REST * took_s)


def result_from_logs(
    logs: Iterable[Path], *, warmup_steps: int, last_step: int | None = None
) -> TrialResult | None:
    """Return the measured steps of the first log that a reader understands; None: there is none.

    Memory and effective knobs stay unknown: a log does not tell them.

    Args:
        logs: logs of the trial, the most telling first.
        warmup_steps: first steps that are not measured.
        last_step: the last one that is; logs that end before it tell nothing. None: all are.
    """
    for path in logs:
        is_read = path.is_file() and path.stat().st_size <= LARGEST_LOG
        records = read_log(path) if is_read else None
        if records is None or (last_step is not None and _last(records) < last_step):
            continue
        measured = [
            o
            for o in records.observations
            if warmup_steps < o.step and (last_step is None or o.step <= last_step)
        ]
        times = [o.step_time_s for o in measured if o.step_time_s]
        if times:
            return TrialResult(
                outcome="ok",
                step_time_s=times,
                loss=_column(measured, "loss"),
                grad_norm=_column(measured, "grad_norm"),
                overflow=_column(measured, "overflow"),
                update_skipped=_column(measured, "update_skipped"),
                message=f"read from {path.name} ({records.format}, {records.records} lines)",
            )
    return None


def _last(records: LogRecords) -> int:
    return max((o.step for o in records.observations), default=0)


def _column(observations: list[Observation], name: str) -> list[float] | None:
    values = [getattr(o, name) for o in observations]
    return values if all(value is not None for value in values) else None
