"""Lines of MindSpore's own `LossMonitor` and `TimeMonitor`.

`epoch: 1 step: 5, loss is 2.3`, where steps count anew in each epoch, and `Train epoch time: 24.6
ms, per step time: 12.3 ms`: the mean step time of an epoch, which is given to its last step. Of a
loss that is not finite there is no line: the training ends with an error that names the step. In a
log that has lines of epochs alone, each is one record, counted by line. The first step of a run,
and so the first epoch's mean, holds the compilation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mindtune.controller.records.log_readers.reader import (
    INTEGER,
    NUMBER,
    VALUE,
    LogFormat,
    LogReader,
    Record,
    StepCounter,
    number,
)
from mindtune.policies.signals import Observation

__all__ = ["MINDSPORE_MONITOR"]

_LOSS = re.compile(
    rf"\bepoch: *({INTEGER}),? +(?:step: *({INTEGER}), *)?loss is *[\[(]? *"
    rf"(?:Tensor\([^)]*value= *\[?)?({NUMBER})(?=[,;)\]]|\s*$)",
    re.IGNORECASE,
)
_NOT_FINITE = re.compile(
    rf"\bepoch: ({INTEGER}) step: ({INTEGER})(?:, loss is NAN or INF,|\. Invalid loss,)"
)
"""The error of MindSpore 2, and of 1."""
_TIME = re.compile(
    rf"\bper step time: *({NUMBER}) *ms\b(?:, *(?:avg|mean) loss: *({VALUE}))?", re.IGNORECASE
)
_EPOCH = "poch:"
_TIMES = ("poch time", "nterval time")


class _Reader:
    def __init__(self) -> None:
        self._counter = StepCounter()
        self._last: int | None = None
        self._epochs = 0
        self._timed = False

    def feed(self, line: str) -> Sequence[Record] | None:
        found = _LOSS.search(line) if "loss is" in line else None
        if found is not None:
            # Where another rank wrote into the line, the rest of its number may end it.
            return None if line.count(_EPOCH) > 1 else [self._loss(found)]
        ended = _NOT_FINITE.search(line) if "terminating training" in line else None
        if ended is not None:
            step = self._counter.count(int(ended[1]), int(ended[2]))
            return [Record(Observation(step=step, loss=math.nan))]
        timed = _TIME.search(line) if any(word in line for word in _TIMES) else None
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

    def _loss(self, found: re.Match[str]) -> Record:
        # A script that sinks all of an epoch prints one line per epoch, and no step.
        epoch = int(found[1])
        step = self._counter.count(epoch, int(found[2])) if found[2] else epoch
        self._last = step
        phase = "compile" if step == 1 else None
        return Record(Observation(step=step, loss=number(found[3]), phase=phase))

    def finish(self) -> Sequence[Record]:
        return []


def _start() -> LogReader:
    return _Reader()


MINDSPORE_MONITOR = LogFormat("mindspore_monitor", "MindSpore LossMonitor and TimeMonitor", _start)
