"""Raises a hang, which ends no step and so is seen by no policy.

Theory of operation. The training thread says `heartbeat(step, phase)` whenever it enters a phase;
each heartbeat replaces the one before, of whatever phase, so a forgotten "save began" cannot kill
a run that has gone on. A thread compares the age of the newest heartbeat with the limit of its
phase. Past the limit it writes the stacks of all Python threads into a file, calls the owner's
callback once, and ends the process where that is asked for. The next heartbeat ends the stall and
arms the watchdog again. `reset()` forgets everything, as after a restart from a checkpoint.

A thread that hangs while it holds the interpreter's lock stops this thread too; MindSpore's
compile and run calls let go of it (seen with 2.10: another thread ran every 10 ms throughout).

The limit of training adapts to the median time from one advance of the step number to the next,
with data wait, without other phases; of a sink of many steps that is the time of the sink. Until
there are enough of them the step time of the trials counts, if it is known: it only ever makes the
limit longer, so that on a slower machine it is no worse than none. Time
in which the watchdog itself did not run (a suspended process or machine) is not counted against
training.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import statistics
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from mindtune.controller.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mindtune.controller.contract.live_sections import WatchdogSection

__all__ = ["HANG_EXIT_CODE", "Hang", "Phase", "Watchdog", "WatchdogLimits", "make_watchdog"]

Phase = Literal["compile", "train", "eval", "save"]
"""What the training thread does; the values of the column `phase` of `signals.csv`."""

HANG_EXIT_CODE: Final = 3
"""Exit code of a run that failed."""

_LOGGER = logging.getLogger(__name__)
_HISTORY = 101
# Before this many intervals the median says little; the least limit holds alone.
_MIN_HISTORY = 3
# A poll that comes this late means that the process did not run, not that training stood still.
_LATE_POLL_S = 5.0
_FAREWELL_S = 30.0
_LAST_WORDS_S = 5.0


@dataclass(frozen=True, kw_only=True)
class WatchdogLimits:
    """Longest time without a heartbeat, in seconds, by phase."""

    compile_s: float = 30 * 60.0
    """Start-up, first step and every later compile; a first step of 15 minutes is healthy
    (DLRover pull request 1749)."""
    train_min_s: float = 10 * 60.0
    """Least limit while training (DLRover's hang detector uses 10 minutes)."""
    train_factor: float = 20.0
    """Multiple of the median time from step to step, where that is longer."""
    eval_s: float = 30 * 60.0
    """Evaluation."""
    save_s: float = 30 * 60.0
    """Writing a checkpoint."""

    def __post_init__(self) -> None:
        for name in ("compile_s", "train_min_s", "train_factor", "eval_s", "save_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(
                    f"{name} of the watchdog must be above 0, but got {value}; "
                    "use inf to switch that limit off."
                )


class Hang(NamedTuple):
    """A stall past its limit."""

    stalled_s: float
    """Age of the newest heartbeat."""
    limit_s: float
    step: int
    """Step of the newest heartbeat; 0 before the first."""
    phase: Phase
    stacks: Path | None
    """File with the stacks of all Python threads; None where none was written."""

    def message(self) -> str:
        """One line for findings, logs and alerts."""
        where = f"; Python stacks in {self.stacks}" if self.stacks is not None else ""
        return (
            f"no heartbeat for {self.stalled_s:.0f} s in phase {self.phase} after step "
            f"{self.step} (limit {self.limit_s:.0f} s){where}"
        )


class _Beat(NamedTuple):
    step: int
    phase: Phase
    time_s: float


class Watchdog:
    """Watches the heartbeats of one training thread.

    Args:
        on_hang: Called once per stall, from the watchdog's thread; it raises the finding `hang`.
        limits: Longest times without a heartbeat.
        stacks_path: File that stacks are appended to; None: none are written.
        exit_on_hang: End the process with code 3 once `on_hang` returns, 35 s after the stall was
            raised at most. No cleanup runs: a thread that hangs would not let it.
        step_time_s: Of a step in the trials of this config; None: not known.
        poll_s: Time between two looks at the newest heartbeat.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        on_hang: Callable[[Hang], None],
        *,
        limits: WatchdogLimits | None = None,
        stacks_path: Path | None = None,
        exit_on_hang: bool = False,
        step_time_s: float | None = None,
        poll_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not poll_s > 0:
            raise ConfigError(f"poll_s must be above 0 seconds, but got {poll_s}; e.g. 1.")
        self._on_hang = on_hang
        self._limits = WatchdogLimits() if limits is None else limits
        self._stacks_path = stacks_path
        self._exit_on_hang = exit_on_hang
        self._step_time_s = step_time_s or 0.0
        self._poll_s = poll_s
        self._clock = clock
        self._lock = threading.Lock()
        self._intervals: deque[float] = deque(maxlen=_HISTORY)
        self._beat = _Beat(0, "compile", clock())
        self._advance: _Beat | None = None
        self._raised = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, in phase `compile` until the first heartbeat."""
        self.reset()
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="mindtune-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; harmless when called twice or before `start`."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def reset(self) -> None:
        """Forgets all heartbeats, as after a restart: the next step may compile again."""
        with self._lock:
            self._intervals.clear()
            self._beat = _Beat(0, "compile", self._clock())
            self._advance = None
            self._raised = False

    def heartbeat(self, step: int, phase: Phase) -> None:
        """Says that the training thread is alive and what it does from now on.

        Args:
            step: Last step begun.
            phase: What follows.

        Raises:
            ConfigError: There is no such phase.
        """
        if phase not in _PHASES:
            raise ConfigError(f"phase must be one of {', '.join(_PHASES)}, but got {phase!r}.")
        now_s = self._clock()
        with self._lock:
            last = self._beat
            self._beat = _Beat(step, phase, now_s)
            if phase != "train":
                self._advance = None
            elif self._advance is None:
                self._advance = self._beat
            elif step > self._advance.step:
                self._intervals.append(now_s - self._advance.time_s)
                self._advance = self._beat
            recovered = self._raised
            self._raised = False
        if recovered:
            _LOGGER.warning("step %d: going on after %.0f s", step, now_s - last.time_s)

    def limit_s(self) -> float:
        """Longest time without a heartbeat that the present phase allows."""
        with self._lock:
            return self._limit_s(self._beat.phase)

    def check(self) -> Hang | None:
        """Looks once, as the thread does every `poll_s`; raises a stall that is new.

        Returns:
            The stall, where this call is the one that raised it.
        """
        return self._check(self._clock())

    def _check(self, now_s: float) -> Hang | None:
        with self._lock:
            beat = self._beat
            limit_s = self._limit_s(beat.phase)
            stalled_s = now_s - beat.time_s
            if self._raised or stalled_s <= limit_s:
                return None
            self._raised = True
        if self._exit_on_hang:
            # Should what follows hang as well, the process ends all the same: the callback, the
            # disk of the stacks, or the log, whose pipe nobody may read any more.
            farewell = threading.Timer(_FAREWELL_S, _exit_now)
            farewell.daemon = True
            farewell.start()
        hang = Hang(stalled_s, limit_s, beat.step, beat.phase, None)
        hang = hang._replace(stacks=self._write_stacks(hang))
        _in_time(lambda: _LOGGER.critical("%s", hang.message()))
        try:
            self._on_hang(hang)
        except Exception:
            _LOGGER.exception("the callback for a hang failed")
        if self._exit_on_hang:
            _exit_now()
        return hang

    def _limit_s(self, phase: Phase) -> float:
        limits = self._limits
        if phase == "train":
            usual_s = self._step_time_s
            if len(self._intervals) >= _MIN_HISTORY:
                usual_s = statistics.median(self._intervals)
            return max(limits.train_min_s, limits.train_factor * usual_s)
        return {"compile": limits.compile_s, "eval": limits.eval_s, "save": limits.save_s}[phase]

    def _write_stacks(self, hang: Hang) -> Path | None:
        """Appends the stacks of all Python threads to the file; None where that fails."""
        if self._stacks_path is None:
            return None
        try:
            with self._stacks_path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {hang.message()}\n")
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
                file.write("\n")
        except OSError as error:
            _LOGGER.warning("stacks not written: %s", error)
            return None
        return self._stacks_path

    def _run(self) -> None:
        looked_s = self._clock()
        while not self._stop.wait(self._poll_s):
            now_s = self._clock()
            late_s = now_s - looked_s - self._poll_s
            looked_s = now_s
            if late_s > _LATE_POLL_S:
                self._forgive(late_s, now_s)
            self._check(now_s)

    def _forgive(self, late_s: float, now_s: float) -> None:
        """Moves the newest heartbeat on by time in which this process did not run."""
        with self._lock:
            time_s = max(self._beat.time_s, min(self._beat.time_s + late_s, now_s))
            self._beat = self._beat._replace(time_s=time_s)


_PHASES: tuple[Phase, ...] = get_args(Phase)


def make_watchdog(
    section: WatchdogSection,
    on_hang: Callable[[Hang], None],
    *,
    stacks_path: Path | None,
    step_time_s: float | None = None,
) -> Watchdog | None:
    """Return the watchdog that a user asked for, if one was; arguments as of `Watchdog`."""
    if not section.enabled:
        return None
    return Watchdog(
        on_hang,
        limits=section.limits(),
        stacks_path=stacks_path,
        exit_on_hang=section.exit_on_hang,
        step_time_s=step_time_s,
    )


def _exit_now() -> None:
    """Ends the process without cleanup, but with its last words written, if they can be."""
    _in_time(_flush)
    os._exit(HANG_EXIT_CODE)


def _in_time(write: Callable[[], None]) -> None:
    """Waits for a log that may take nothing more, but not for ever."""
    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(_LAST_WORDS_S)


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # A closed pipe takes nothing more; the exit code still tells.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
