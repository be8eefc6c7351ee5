"""Stop a trial that cannot catch up with the best any more: what it records, as it grows.

`search.halving` judges it at its rungs. A trial that writes no progress is never stopped, nor is
the base config, nor one that is about to end.
"""

from __future__ import annotations

import math
import stat
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.contract import SignalRow, read_rows
from mindtune.controller.errors import ConfigError
from mindtune.search.halving import Bar, ceiling, hopeless
from mindtune.search.scoring import MeasuredTrial

__all__ = ["Progress", "ProgressReader", "possible_trial", "stop_reason"]

_MIN_SAVING_S = 2.0
"""A trial that is over by then may end by itself: what it measures is worth more."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a running trial has recorded."""

    steps: int
    """Steps done, warm-up included."""
    step_time_s: tuple[float, ...]
    """Of the steps after the warm-up that were timed."""
    is_bad: tuple[bool, ...]
    """Of the same steps: whether they were non-finite, overflowed or skipped."""

    @property
    def measured(self) -> int:
        """Number of measured steps."""
        return len(self.step_time_s)


class ProgressReader:
    """Reads a trial's signals.csv as it grows."""

    def __init__(self, path: Path, *, warmup_steps: int) -> None:
        self._path = path
        self._warmup_steps = warmup_steps
        self._size = -1
        self._progress = Progress(steps=0, step_time_s=(), is_bad=())

    @property
    def has_begun(self) -> bool:
        """Whether the trial writes this table."""
        return self._path.exists()

    def read(self) -> Progress:
        """Return the progress so far; rows that cannot be read end it."""
        try:
            status = self._path.stat()
        except OSError:
            return self._progress
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            return self._progress
        if size != self._size:
            self._size = size
            self._progress = self._count()
        return self._progress

    def _count(self) -> Progress:
        steps, is_bad, times = 0, [], []
        try:
            with self._path.open(encoding="utf-8", errors="replace", newline="") as lines:
                for row in read_rows(lines, source=str(self._path)):
                    seen = row.observation
                    steps = max(steps, seen.step)
                    if seen.step <= self._warmup_steps or not _is_training(row):
                        continue
                    if seen.step_time_s is not None and 0 < seen.step_time_s < math.inf:
                        times.append(seen.step_time_s)
                        is_bad.append(_is_bad(row))
        except (ConfigError, OSError):
            # Another program's table that cannot be read is no progress; its result decides.
            pass
        return Progress(steps=steps, step_time_s=tuple(times), is_bad=tuple(is_bad))


def _is_training(row: SignalRow) -> bool:
    return row.observation.phase in (None, "train")


def _is_bad(row: SignalRow) -> bool:
    seen = row.observation
    values = (seen.loss, seen.grad_norm)
    return (
        any(value is not None and not math.isfinite(value) for value in values)
        or bool(seen.overflow)
        or bool(seen.update_skipped)
    )


def stop_reason(progress: Progress, bar: Bar, *, measure_steps: int) -> str | None:
    """Return why a trial is to be stopped, or None while it may catch up with the best.

    Args:
        progress: what it has recorded.
        bar: the best trial so far.
        measure_steps: steps that it is to measure in all.
    """
    found = hopeless(progress.step_time_s, progress.is_bad, bar, measure_steps=measure_steps)
    if found is None:
        return None
    left_s = (measure_steps - progress.measured) * found.step_time_s
    if left_s < _MIN_SAVING_S:
        return None
    return (
        f"stopped after {progress.measured} of {measure_steps} steps: at best {found.share:.0%} "
        f"of the best value by its first {found.steps} (a step of {found.step_time_s:.3g} s, best "
        f"config {bar.step_time_s:.3g} s), and noise explains {found.margin:.0%}"
    )


def possible_trial(progress: Progress, *, measure_steps: int) -> MeasuredTrial | None:
    """Return the best that a stopped trial could have come to; None before its first rung."""
    best = ceiling(progress.step_time_s, progress.is_bad, measure_steps=measure_steps)
    if best is None:
        return None
    return MeasuredTrial(step_time_s=(best.step_time_s,) * measure_steps, bad_steps=best.bad)
