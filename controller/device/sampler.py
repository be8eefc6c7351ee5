"""Samples a probe off the training thread.

Theory of operation: one daemon thread owns the probe, from its first read to its close. It stores
each finished reading under a lock that is never held while the driver is asked, so a caller waits
for no driver. A driver that hangs leaves the newest reading to age until it counts as stale, and
the process can still end. One that raises is asked again after a growing pause. One that is slow
is asked less often: the thread rests at least as long as a read took.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from mindtune.controller.device.reading import EMPTY_READING, DeviceReading, Probe
from mindtune.controller.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["DeviceSample", "SamplingThread"]

_LOGGER = logging.getLogger(__name__)
_MAX_PAUSE_S = 30.0
_MIN_STALE_S = 5.0


class DeviceSample(NamedTuple):
    """A reading and its age in seconds."""

    reading: DeviceReading
    age_s: float


class _Stored(NamedTuple):
    """A reading and the time span that its utilization covers."""

    begin_s: float
    end_s: float
    reading: DeviceReading


class SamplingThread:
    """Reads a probe every period; the newest reading is there at once.

    Args:
        probe: Handed over: it is read and closed by the thread alone.
        period_s: Time from read to read; the probe's least period where that is longer.
        stale_after_s: Age from which a reading counts as none; None: four periods, at least 5 s.
        history_s: How long readings are kept for `mean_utilization`.
        clock: Monotonic time in seconds, for ages and windows.

    Raises:
        ConfigError: A time is not positive.
    """

    def __init__(
        self,
        probe: Probe,
        *,
        period_s: float = 0.5,
        stale_after_s: float | None = None,
        history_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (
            ("period_s", period_s),
            ("stale_after_s", stale_after_s),
            ("history_s", history_s),
        ):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0 seconds, but got {value}; e.g. 0.5.")
        self._probe = probe
        self._least_period_s = period_s
        self._told_stale_after_s = stale_after_s
        self._history_s = history_s
        self._clock = clock
        self._lock = threading.Lock()
        self._stored: deque[_Stored] = deque()
        self._begin_s = 0.0
        self._failures = 0
        self._last_error: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mindtune-sampler", daemon=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _period_s(self) -> float:
        # A probe may know its least period only once its first read has opened the driver.
        return max(self._least_period_s, self._probe.min_period_s)

    @property
    def _stale_after_s(self) -> float:
        told = self._told_stale_after_s
        return max(4 * self._period_s, _MIN_STALE_S) if told is None else told

    @property
    def last_error(self) -> str | None:
        """Message of the newest failed read; None while the newest read worked."""
        return self._last_error

    def start(self) -> Self:
        """Starts the thread and returns at once; the first reading arrives later."""
        self._begin_s = self._clock()
        self._thread.start()
        return self

    def latest(self) -> DeviceSample | None:
        """The newest reading with its age; None before the first and where it is stale."""
        with self._lock:
            newest = self._stored[-1] if self._stored else None
        if newest is None:
            return None
        age_s = self._clock() - newest.end_s
        return None if age_s > self._stale_after_s else DeviceSample(newest.reading, age_s)

    def reading(self) -> DeviceReading:
        """The newest reading, all None where there is none or it is stale."""
        sample = self.latest()
        return EMPTY_READING if sample is None else sample.reading

    def mean_utilization(self, window_s: float) -> float | None:
        """Utilization averaged over the last `window_s` seconds of time, not of readings.

        Returns:
            0..1; None where nothing was measured in the window or the newest reading is stale.
        """
        if self.latest() is None:
            return None
        window_begin_s = self._clock() - window_s
        with self._lock:
            stored = list(self._stored)
        weighted = covered_s = 0.0
        for begin_s, end_s, reading in stored:
            overlap_s = end_s - max(begin_s, window_begin_s)
            if overlap_s > 0 and reading.device_utilization is not None:
                weighted += overlap_s * reading.device_utilization
                covered_s += overlap_s
        return weighted / covered_s if covered_s > 0 else None

    def stop(self, timeout_s: float = 2.0) -> bool:
        """Ends the thread; harmless when called twice.

        Args:
            timeout_s: Longest wait for a read that is under way.

        Returns:
            Whether the thread has ended. If not, the driver hangs; the thread is left behind and
            does not keep the process alive.
        """
        self._stop.set()
        if self._thread.ident is None:
            self._probe.close()
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _LOGGER.warning(
                "%s gave no answer within %g s; left behind", self._probe.name, timeout_s
            )
            return False
        return True

    def _run(self) -> None:
        pause_s = 0.0
        try:
            while not self._stop.wait(pause_s):
                pause_s = self._sample()
        finally:
            self._probe.close()

    def _sample(self) -> float:
        """Reads once and returns the pause before the next read, in seconds."""
        asked_s = time.perf_counter()
        try:
            reading = self._probe.read()
        except Exception as error:  # noqa: BLE001 - whatever a driver raises must not end a run
            self._fail(error)
            return float(min(self._period_s * 2.0 ** min(self._failures, 16), _MAX_PAUSE_S))
        now_s = self._clock()
        if self._failures:
            _LOGGER.info("%s answers again", self._probe.name)
        self._failures = 0
        self._last_error = None
        with self._lock:
            self._stored.append(_Stored(self._begin_s, now_s, reading))
            while self._stored[0].end_s < now_s - self._history_s:
                self._stored.popleft()
        self._begin_s = now_s
        took_s = time.perf_counter() - asked_s
        return max(self._period_s - took_s, min(took_s, _MAX_PAUSE_S))

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        self._last_error = f"{type(error).__name__}: {error}"
        if self._failures == 1:
            _LOGGER.warning("%s cannot be read: %s", self._probe.name, self._last_error)
