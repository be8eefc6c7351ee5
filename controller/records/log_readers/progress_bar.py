"""Progress bars of tqdm with a loss: `Epoch: 0: 100%|###| 226/226 [01:58<00:00, 1.9it/s, loss=4]`.

Bars count from the start in each epoch. In a log with bars of epochs, one without an epoch (or one
that says so) is of an evaluation. The time of a step is the bar's own running mean.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mindtune.controller.records.log_readers import fields
from mindtune.controller.records.log_readers.reader import (
    CUT,
    INTEGER,
    NUMBER,
    LogFormat,
    LogReader,
    Record,
    number,
)
from mindtune.controller.records.log_readers.scaler_events import ScalerEvents
from mindtune.policies.signals import Observation

__all__ = ["PROGRESS_BAR"]

_BAR = re.compile(
    rf"%\|[^|]*\| *(?P<n>{INTEGER})/(?P<of>{INTEGER}) *\[(?P<rest>[^\]]*)"
    rf"(?:\](?P<tail>.*))?"
)
_HEAD = 200
_LONGEST = 2000
"""Characters of a bar and of what stands before it; a bar is as wide as a screen."""
_RATE = re.compile(rf"(?<![\d.,])({NUMBER}) *(it/s|s/it)\b")
_PAIR = re.compile(rf"([A-Za-z][\w/ -]*?)[=:] *({NUMBER})(?=[,\]\s]|$)")
_EPOCH = re.compile(rf"\bepoch\W*({INTEGER})", re.IGNORECASE)
_EVALUATES = re.compile(r"\b(?:val|valid\w*|eval\w*|test\w*)\b", re.IGNORECASE)


class _Reader:
    def __init__(self) -> None:
        self._events = ScalerEvents()
        self._first_epoch: int | None = None
        self._last = 0

    def feed(self, line: str) -> Sequence[Record] | None:
        if self._events.feed(line):
            return []
        start = line.find("%|")
        found = _BAR.match(line, start, start + _LONGEST) if start > 0 else None
        if found is None:
            return None
        head = line[max(0, start - _HEAD) : start]
        tail = found["tail"]
        # A bar is cut to the width of the screen, perhaps inside its last number.
        text = found["rest"] + (CUT if tail is None else f",{tail}")
        signals = fields.collect((name.strip(), value) for name, value in _PAIR.findall(text))
        if "loss" not in signals:
            return None
        epoch = _EPOCH.search(head) or _EPOCH.search(tail or "")
        if _EVALUATES.search(head) or (epoch is None and self._first_epoch is not None):
            return [Record(Observation(step=self._last, eval_loss=signals["loss"]))]
        count, total = int(found["n"]), int(found["of"])
        if count == 0:
            return None
        if epoch is not None:
            number_of = int(epoch[1])
            if self._first_epoch is None:
                self._first_epoch = min(number_of, 1)  # programs count epochs from 0 or from 1
            count += max(0, number_of - self._first_epoch) * total
        rate = _RATE.search(found["rest"])
        if rate is not None and number(rate[1]) > 0:
            per = number(rate[1])
            signals["step_time_s"] = per if rate[2] == "s/it" else 1 / per
        interval, self._last = max(1, count - self._last), count
        return [Record(fields.make(count, {**self._events.take(interval), **signals}))]

    def finish(self) -> Sequence[Record]:
        return []


def _start() -> LogReader:
    return _Reader()


PROGRESS_BAR = LogFormat("tqdm", "progress bars of tqdm with a loss", _start)
