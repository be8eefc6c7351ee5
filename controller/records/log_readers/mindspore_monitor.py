"""Lines of MindSpore's own `LossMonitor`: `epoch: 1 step: 5, loss is 2.3`.

`TimeMonitor` says a mean step time at the end of each epoch only; it is given to the last step of
that epoch.
"""

from __future__ import annotations

import re
from dataclasses import replace

from mindtune.controller.records.log_readers.reader import (
    NUMBER,
    LineReader,
    LogFormat,
    StepCounter,
    number,
)
from mindtune.policies.signals import Observation

__all__ = ["MINDSPORE_MONITOR"]

_LOSS = re.compile(rf"\bepoch: *(\d+) +step: *(\d+), *loss is *({NUMBER})")
_TIME = re.compile(r"\bper step time: *([\d.]+) *ms")


class _Reader:
    def __init__(self) -> None:
        self._counter = StepCounter()
        self._last: Observation | None = None

    def feed(self, line: str) -> Observation | None:
        found = _LOSS.search(line)
        if found is not None:
            step = self._counter.count(int(found[1]), int(found[2]))
            self._last = Observation(step=step, loss=number(found[3]))
            return self._last
        timed = _TIME.search(line)
        if timed is None or self._last is None:
            return None
        last, self._last = self._last, None
        return replace(last, step_time_s=float(timed[1]) / 1000)


def _start() -> LineReader:
    return _Reader()


MINDSPORE_MONITOR = LogFormat("mindspore_monitor", "MindSpore LossMonitor and TimeMonitor", _start)
