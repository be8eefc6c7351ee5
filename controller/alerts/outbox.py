"""The queue between a training and the process that sends.

Theory of operation. `put` asks the limits, appends to a bounded queue and returns: it neither
writes nor waits. A thread hands the alerts on and, when that is due, the digest of what was held
back. `close` hands on what is left and waits for the answers, `END_DEADLINE_S` seconds at most,
which only a server that does not answer takes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

from mindtune.controller.alerts.alert import Alert
from mindtune.controller.alerts.courier import Courier
from mindtune.controller.alerts.limits import AlertLimits
from mindtune.controller.alerts.send import END_DEADLINE_S

__all__ = ["Outbox"]

_MAX_WAITING: Final = 64


class Outbox:
    """Alerts on their way out.

    Args:
        courier: Who takes them.
        limits: What may go out when.
        run: Name and place of the run, for a digest of its own.
    """

    def __init__(self, courier: Courier, limits: AlertLimits, *, run: str) -> None:
        self._courier = courier
        self._limits = limits
        self._run = run
        self._waiting: deque[Alert] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="mindtune-alerts", daemon=True)
        self._thread.start()

    def put(self, alert: Alert) -> None:
        """Take in an alert; any thread may call, and none waits."""
        with self._changed:
            if self._closing:
                return
            if len(self._waiting) >= _MAX_WAITING and not alert.urgent:
                self._limits.hold(alert)
                return
            admitted = self._limits.admit(alert, time.monotonic())
            if admitted is not None:
                self._waiting.append(admitted)
            # Also if it was held back: the digest has a time now.
            self._changed.notify()

    def close(self) -> None:
        """Send what is left and wait for it; harmless when called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(END_DEADLINE_S + 2.0)

    def _work(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                if not self._waiting and not self._closing:
                    now_s = time.monotonic()
                    due_s = self._limits.due_s(now_s)
                    self._changed.wait(None if due_s is None else max(0.0, due_s - now_s))
                closing = self._closing
                batch = list(self._waiting)
                self._waiting.clear()
                digest = self._limits.digest(time.monotonic(), run=self._run, last=closing)
            for alert in batch if digest is None else [*batch, digest]:
                self._courier.send(alert)
        self._courier.close()
