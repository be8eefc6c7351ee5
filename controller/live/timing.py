"""Splits the wall clock into optimizer steps and the waiting for data within them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["StepTimer", "StepTiming"]


class StepTiming(NamedTuple):
    """Times of one optimizer step."""

    step_time_s: float
    """End to end: from the end of the step before to the end of this one, without pauses."""
    data_time_s: float | None
    """Of it, between the end of one call of the step and the beginning of the next; None: the
    beginning of a call was not seen."""
    own_time_s: float | None
    """Of it, everything up to where the gradients of this process were there; None: not told."""
    host_time_s: float
    """Of it, everything outside of the calls: waiting for data, callbacks, the controller; where a
    call tells when it gives its work to the device, also what precedes that."""


class StepTimer:
    """Takes the times of optimizer steps, each of which may be several calls.

    `start`, then per call `begin_call` (its data is there) and `end_call`; `lap` once the last
    call of an optimizer step has ended. `leave` moves the beginning of the next wait to now, so
    that the controller's own work counts as step time but not as waiting. `pause` and `resume`
    enclose what is no training.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.start()

    def start(self) -> None:
        """Begin the first step now."""
        now_s = self._clock()
        self._started_s = now_s
        self._step_begin_s = now_s
        self._wait_begin_s = now_s
        self._call_end_s = now_s
        self._data_s = 0.0
        self._data_known = True
        self._call_begin_s = now_s
        self._calls_s = 0.0
        self._excluded_s = 0.0
        self._own_s: float | None = None
        self._paused_s = 0.0
        self._paused_in_wait_s = 0.0
        self._pause_begin_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start to the end of the newest call."""
        return self._call_end_s - self._started_s

    def begin_call(self, *, waited: bool = True) -> None:
        """The data of a call is there; `waited` False: nobody knows since when."""
        self._call_begin_s = self._clock()
        self._excluded_s = 0.0
        waited_s = self._call_begin_s - self._wait_begin_s - self._paused_in_wait_s
        self._data_s += max(0.0, waited_s)
        self._data_known = self._data_known and waited
        self._paused_in_wait_s = 0.0

    def end_call(self) -> None:
        """A call has returned."""
        self._call_end_s = self._clock()
        self._calls_s += self._call_end_s - self._call_begin_s
        self._wait_begin_s = self._call_end_s

    def exclude(self, seconds: float) -> None:
        """Take seconds out of the call in progress: spent on what is no part of the step."""
        self._paused_s += seconds
        self._calls_s -= seconds
        self._excluded_s += seconds

    def launch(self) -> None:
        """The call gives its work to the device now; what came before was the host's own."""
        self._calls_s += self._excluded_s
        self._excluded_s = 0.0
        self._call_begin_s = self._clock()

    def gradients_ready(self) -> None:
        """The gradients of this process are there; what follows waits for others."""
        self._own_s = self._clock() - self._step_begin_s - self._paused_s

    def leave(self) -> None:
        """The controller's own work is done; what follows is waiting."""
        self._wait_begin_s = self._clock()

    def lap(self) -> StepTiming:
        """Return the times of the optimizer step that the newest call completed."""
        step_s = self._call_end_s - self._step_begin_s - self._paused_s
        data_s = min(self._data_s, step_s) if self._data_known else None
        own_s = None if self._own_s is None else max(0.0, self._own_s)
        host_s = max(0.0, step_s - self._calls_s)
        self._data_known = True
        self._step_begin_s = self._call_end_s
        self._data_s = 0.0
        self._calls_s = 0.0
        self._own_s = None
        self._paused_s = 0.0
        return StepTiming(max(0.0, step_s), data_s, own_s, host_s)

    def pause(self) -> None:
        """Something that is no training begins; a second pause in a row changes nothing."""
        if self._pause_begin_s is None:
            self._pause_begin_s = self._clock()

    def resume(self) -> None:
        """Training goes on; harmless without a pause."""
        if self._pause_begin_s is None:
            return
        lasted_s = self._clock() - self._pause_begin_s
        self._pause_begin_s = None
        self._paused_s += lasted_s
        self._paused_in_wait_s += lasted_s
