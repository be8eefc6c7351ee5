"""Stop a trial that cannot catch up with the best any more.

Theory of operation. The value is mfu^a x stability^b, and MFU falls as 1 / step time because
every config trains the same samples per step. What is still to be measured is assumed to go as
well as it can: the median step as fast as the fastest step seen, no further bad step, no jitter.
If even that value lies below the best one by a margin, the rest of the trial is not worth its
time. A trial that writes no progress is never stopped, nor is the base config.
"""

from __future__ import annotations

import math
import stat
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.contract import SignalRow, read_rows
from mindtune.controller.errors import ConfigError

__all__ = ["Bar", "Progress", "ProgressReader", "hopeless"]

_MARGIN = 0.2
"""Share by which the optimistic value must lie below the best. Two equal trials on a busy
two-core machine differ by about that much."""
_MIN_STEPS = 5
_MIN_SHARE = 0.2
"""Share of the measured steps that a judgement needs, and at least `_MIN_STEPS`."""
_MIN_SAVING_S = 2.0
"""A trial that is over by then may end by itself: what it measures is worth more."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The best trial so far, as what a running one is compared with."""

    step_time_s: float
    stability: float
    mfu_exponent: float
    stability_exponent: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a running trial has recorded."""

    steps: int
    """Steps done, warm-up included."""
    step_time_s: tuple[float, ...]
    """Of the steps after the warm-up that were timed."""
    bad: int
    """Of them, steps that are non-finite, overflowed or skipped."""

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
        self._progress = Progress(steps=0, step_time_s=(), bad=0)

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
        steps, bad, times = 0, 0, []
        try:
            with self._path.open(encoding="utf-8", errors="replace", newline="") as lines:
                for row in read_rows(lines, source=str(self._path)):
                    seen = row.observation
                    steps = max(steps, seen.step)
                    if seen.step <= self._warmup_steps or not _is_training(row):
                        continue
                    if seen.step_time_s is not None and 0 < seen.step_time_s < math.inf:
                        times.append(seen.step_time_s)
                        bad += _is_bad(row)
        except (ConfigError, OSError):
            # Another program's table that cannot be read is no progress; its result decides.
            pass
        return Progress(steps=steps, step_time_s=tuple(times), bad=bad)


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


def hopeless(progress: Progress, bar: Bar, *, measure_steps: int) -> str | None:
    """Return why a trial cannot catch up with the best, or None while it can.

    Args:
        progress: what it has recorded.
        bar: the best trial so far.
        measure_steps: steps that it is to measure in all.
    """
    needed = max(_MIN_STEPS, math.ceil(_MIN_SHARE * measure_steps))
    if progress.measured < needed:
        return None
    fastest_s = min(progress.step_time_s)
    if (measure_steps - progress.measured) * fastest_s < _MIN_SAVING_S:
        return None
    speed = bar.step_time_s / fastest_s
    stability = max(0.0, 1.0 - progress.bad / measure_steps)
    steadiness = stability / bar.stability if bar.stability > 0 else 1.0
    share = speed**bar.mfu_exponent * steadiness**bar.stability_exponent
    if share >= 1.0 - _MARGIN:
        return None
    return (
        f"stopped after {progress.measured} of {measure_steps} steps: at best "
        f"{share:.0%} of the best value (fastest step {fastest_s:.3g} s, best config "
        f"{bar.step_time_s:.3g} s)"
    )
