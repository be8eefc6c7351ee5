"""Opens the profiler for a few steps when something is wrong, or when a user asks.

Theory of operation. A window that is closed costs a look at the findings of a step and at a clock,
and once a second one at a file name. A finding of a kind that the settings name, or the file
`profile.request` in the run's folder, makes it due: it opens before the next step, takes its
steps, closes, and the summary goes to profiles.jsonl. Steps in between have phase `profile`, so
their times count nowhere; opening and closing stand in no step's time. Steps that held a compile,
an evaluation or a save are passed over and the window stays open longer, at most `_LONGEST` times
as many steps as asked for. Windows are few: `max_windows` in a run, resumed or not, and `gap`
steps apart unless asked for.

Rank 0 alone profiles. What the profiler raises ends the profiling, never the training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mindtune.controller.contract import KernelTime, ProfileRecord, ProfilerSection
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.observing import StepTime
from mindtune.controller.metrics.profile_summary import Shares, Span
from mindtune.controller.records import RunFolder, append_profile, read_profiles
from mindtune.policies.findings import Finding

__all__ = ["Profiler", "ProfilerWindow"]

_LOGGER = logging.getLogger(__name__)
_REQUEST = "request"
_LONGEST = 4
_MOST_FAILURES = 5
"""Looks at what cannot be read, which may be half written: it costs the training thread."""
_LOOK_EVERY_S = 1.0
"""A name on a shared file system may take milliseconds to look up."""
_PHASES = (None, "train", "profile")


class Profiler(Protocol):
    """What profiles; its calls may raise anything."""

    def start(self, folder: Path) -> None:
        """Begin to profile into a folder."""

    def stop(self) -> None:
        """Stop; what was taken is on its way into the folder."""

    def shares(self, folder: Path, steps: list[Span]) -> Shares | None:
        """Return the summary of the steps; None: not ready yet."""


@dataclass
class _Window:
    """One that is open, or waits for its summary."""

    reason: str
    wanted: int
    folder: Path
    began_s: float
    cost_s: float
    failures: int = 0
    """Times that what was written could not be read."""
    seen: int = 0
    first_step: int = 0
    last_step: int = 0
    data_s: float | None = 0.0


class ProfilerWindow:
    """The profiler of one run.

    Args:
        settings: What opens it, for how long, how often.
        profiler: What profiles.
        folder: The run's folder.
        clock: Seconds since the epoch, as the profiler's own records have them.
    """

    def __init__(
        self,
        settings: ProfilerSection,
        profiler: Profiler,
        folder: RunFolder,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._profiler = profiler
        self._folder = folder
        self._clock = clock
        self._kinds = frozenset(kind.value for kind in settings.findings)
        self._request = folder.profile_request
        self._is_deaf = False
        self._looked_s = -_LOOK_EVERY_S
        self._left = settings.max_windows - len(read_profiles(folder.profiles))
        self._step = 0
        self._next_step = 0
        self._due: str | None = None
        self._window: _Window | None = None
        self._steps: list[Span] = []
        self._waiting: list[tuple[_Window, list[Span]]] = []

    @property
    def is_open(self) -> bool:
        """Whether the next step is profiled."""
        return self._window is not None

    def take(
        self, timed: StepTime, *, data_time_s: float | None, findings: Iterable[Finding]
    ) -> bool:
        """Take in a step that has just ended; tell whether `turn` is to be called.

        Args:
            timed: The step, by this rank's clock.
            data_time_s: Of its time, waiting for data; None: not known.
            findings: What it showed.
        """
        self._step = timed.step
        if self._window is not None:
            return self._count(self._window, timed, data_time_s)
        self._due = self._asked(timed.step, findings)
        return self._due is not None

    def turn(self) -> None:
        """Open or close, as `take` has said."""
        step = self._step
        try:
            if self._window is None:
                self._open(step)
            else:
                self._close(self._window, step)
        except Exception as error:  # noqa: BLE001 - whatever a profiler raises must not end a run
            _LOGGER.warning("step %d: the profiler failed and rests from now on: %s", step, error)
            self._window, self._left = None, 0

    def end(self) -> None:
        """Close what is open and write what has been summarised."""
        if self._window is not None:
            self.turn()
        for window, steps in self._waiting:
            self._write(window, steps, final=True)
        self._waiting.clear()

    def _asked(self, step: int, findings: Iterable[Finding]) -> str | None:
        """Return what the window is due for; None: nothing."""
        reason = None
        if self._kinds and self._left > 0 and step >= self._next_step:
            found = (entry.kind.value for entry in findings)
            reason = next((kind for kind in found if kind in self._kinds), None)
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return reason
        self._looked_s = now_s
        self._waiting = [entry for entry in self._waiting if not self._write(*entry, final=False)]
        return _REQUEST if self._is_requested(step) else reason

    def _is_requested(self, step: int) -> bool:
        """Look for the file, and take it away: it was seen."""
        if self._is_deaf:
            return False
        try:
            self._request.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:  # a folder, or one that this process may not write to
            _LOGGER.warning("%s cannot be removed, so it is not heard: %s", self._request, error)
            self._is_deaf = True
            return False
        if self._left <= 0:
            _LOGGER.warning(
                "step %d: no profiler window is left of %d; raise profiler.max_windows",
                step,
                self._settings.max_windows,
            )
        return self._left > 0

    def _open(self, step: int) -> None:
        began_s = self._clock()
        name = f"step_{step + 1}"
        folder = self._folder.path / "profiles" / name
        folder.mkdir(parents=True, exist_ok=True)
        self._left -= 1
        self._profiler.start(folder)
        self._steps = []
        now_s = self._clock()
        self._window = _Window(
            self._due or "", self._settings.steps, folder, now_s, now_s - began_s
        )
        _LOGGER.info("step %d: profiling %d steps (%s)", step, self._settings.steps, self._due)

    def _count(self, window: _Window, timed: StepTime, data_time_s: float | None) -> bool:
        end_s = self._clock()
        window.seen += 1
        began_s = max(window.began_s, end_s - timed.step_time_s)
        # The clock of the kernels' times may be set back: such a step tells nothing.
        if timed.phase in _PHASES and began_s < end_s:
            self._steps.append((began_s, end_s))
            window.first_step = window.first_step or timed.step
            window.last_step = timed.step
            if data_time_s is None or window.data_s is None:
                window.data_s = None
            else:
                window.data_s += data_time_s
        window.began_s = end_s
        return len(self._steps) >= window.wanted or window.seen >= _LONGEST * window.wanted

    def _close(self, window: _Window, step: int) -> None:
        began_s = self._clock()
        self._window = None
        self._next_step = step + self._settings.gap
        self._profiler.stop()
        window.cost_s += self._clock() - began_s
        if not self._steps:
            _LOGGER.warning("no step of the profiler window only trained; it tells nothing")
        elif not self._write(window, self._steps, final=False):
            self._waiting.append((window, self._steps))

    def _write(self, window: _Window, steps: list[Span], *, final: bool) -> bool:
        """Write what a window showed; False: its summary is not ready."""
        began_s = self._clock()
        shares: Shares | None = None
        message = ""
        try:
            shares = self._profiler.shares(window.folder, steps)
        except Exception as error:  # noqa: BLE001 - a file of another version, or half of one
            window.failures += 1
            message = f"what the profiler wrote cannot be read: {error}"
        if shares is None:
            if not final and window.failures < _MOST_FAILURES:
                return False
            message = message or "the profiler's own analysis was not ready when the run ended"
        shares = shares or Shares()
        total_s = sum(end - begin for begin, end in steps)
        data = None if window.data_s is None else min(1.0, window.data_s / total_s)
        host = None
        if shares.busy is not None and data is not None:
            host = max(0.0, 1.0 - shares.busy - data)
        if shares.busy is None and not message:
            message = "the profiler wrote no kernel of these steps"
        record = ProfileRecord(
            first_step=window.first_step,
            last_step=window.last_step,
            steps=len(steps),
            reason=window.reason,
            step_time_s=total_s / len(steps),
            compute_share=shares.compute,
            communication_share=shares.communication,
            communication_overlap=shares.overlap,
            communication_bytes_per_s=shares.bytes_per_s,
            data_share=data,
            host_share=host,
            kernels=[KernelTime(kind=kind, share=share) for kind, share in shares.kernels],
            cost_s=window.cost_s + self._clock() - began_s,
            files=window.folder.relative_to(self._folder.path).as_posix(),
            message=message,
        )
        try:
            append_profile(self._folder.profiles, record)
        except (ConfigError, OSError) as error:
            _LOGGER.error("a profile cannot be written: %s", error)  # noqa: TRY400 - no traceback
        _LOGGER.info("profiled steps %d to %d", window.first_step, window.last_step)
        return True
