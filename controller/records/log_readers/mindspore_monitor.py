"""Lines of MindSpore's own `LossMonitor` and `TimeMonitor`.

`epoch: 1 step: 5, loss is 2.3`, where steps count anew in each epoch, and `Train epoch time: 24.6
ms, per step time: 12.3 ms`: the mean step time of an epoch, which is given to its last step. In a
log that has lines of epochs alone, each is one record, counted by line. The first step of a run,
and so the first epoch's mean, holds the compilation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mindtune.controller.records.log_readers.reader import (
    INTEGER,
    NUMBER,
    LogFormat,
    LogReader,
    Record,
    StepCounter,
    number,
)
from mindtune.policies.signals import Observation

__all__ = ["MINDSPORE_MONITOR"]

_LOSS = re.compile(
    rf"\bepoch: *({INTEGER}),? +step: *({INTEGER}), *loss is *[\[(]? *"
    rf"(?:Tensor\([^)]*value= *)?({NUMBER})",
    re.IGNORECASE,
)
_TIME = re.compile(
    rf"\bper step time: *({NUMBER}) *ms(?:, *(?:avg|mean) loss: *({NUMBER}))?", re.IGNORECASE
)
_EPOCH_TIME = "poch time"


class _Reader:
    def __init__(self) -> None:
        self._counter = StepCounter()
        self._last: int | None = None
        self._epochs = 0
        self._timed = False

    def feed(self, line: str) -> Sequence[Record] | None:
        found = _LOSS.search(line) if "loss is" in line else None
        if found is not None:
            step = self._counter.count(int(found[1]), int(found[2]))
            starts = step == 1
            self._last = step
            phase = "compile" if starts else None
            return [Record(Observation(step=step, loss=number(found[3]), phase=phase))]
        timed = _TIME.search(line) if _EPOCH_TIME in line else None
        if timed is None:
            return None
        time_s = number(timed[1]) / 1000
        phase = None if self._timed else "compile"
        self._timed = True
        if self._last is not None:
            return [Record(Observation(step=self._last, step_time_s=time_s, phase=phase))]
        self._epochs += 1
        loss = number(timed[2]) if timed[2] else None
        observation = Observation(step=self._epochs, loss=loss, step_time_s=time_s, phase=phase)
        return [Record(observation)]

    def finish(self) -> Sequence[Record]:
        return []


def _start() -> LogReader:
    return _Reader()


MINDSPORE_MONITOR = LogFormat("mindspore_monitor", "MindSpore LossMonitor and TimeMonitor", _start)
