"""The result of a trial whose program leaves none: what its log says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mindtune.controller.contract import TrialResult
from mindtune.controller.records.log_readers import read_log
from mindtune.policies.signals import Observation

__all__ = ["LARGEST_LOG", "result_from_logs"]

LARGEST_LOG = 256 * 2**20
"""Bytes of a log that is still read. All readers together take 4 MB/s (measured), and a program
that prints without end must not cost the study more than a trial does."""


def result_from_logs(logs: Iterable[Path], *, warmup_steps: int) -> TrialResult | None:
    """Return the measured steps of the first log that a reader understands; None: there is none.

    Memory and effective knobs stay unknown: a log does not tell them.

    Args:
        logs: logs of the trial, the most telling first.
        warmup_steps: first steps that are not measured.
    """
    for path in logs:
        is_read = path.is_file() and path.stat().st_size <= LARGEST_LOG
        records = read_log(path) if is_read else None
        if records is None:
            continue
        measured = [o for o in records.observations if o.step > warmup_steps]
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


def _column(observations: list[Observation], name: str) -> list[float] | None:
    values = [getattr(o, name) for o in observations]
    return values if all(value is not None for value in values) else None
