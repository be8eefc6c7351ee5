"""Logs of DeepSpeed: its engine, its loss scalers, and what scripts print around them.

The engine prints every `steps_per_print` steps `[Rank 0] step=470, skipped=6, lr=[...]` and a line
of its timer, the pipeline engine `steps: 10 loss: 5.4 iter time (s): 0.12`; DeepSpeed-Chat prints
losses of actor and critic and the latency of a step; other scripts lines of step and loss. Lines
of a script carry the step where there are any; what the engine says is added to them. Where two
engines print alike (actor and critic) an overflow of either is an overflow of the step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mindtune.controller.records.log_readers import fields
from mindtune.controller.records.log_readers.key_value import parse_line
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
from mindtune.controller.records.log_readers.scaler_events import ScalerEvents
from mindtune.policies.signals import Observation

__all__ = ["DEEPSPEED"]

_ENGINE = re.compile(
    rf"\[Rank (\d+)\] step=({INTEGER}), skipped=({INTEGER}), lr=\[ *({VALUE})?[^\]]*\]"
)
_TIMER = re.compile(
    rf"global_step=({INTEGER}), RunningAvgSamplesPerSec=.*?CurrSamplesPerSec={NUMBER}"
    rf"(?:, MemAllocated=({NUMBER})GB)?"
)
_PIPELINE = re.compile(
    rf"\bsteps: ({INTEGER}) loss: ({VALUE}) iter time \(s\): ({VALUE}) samples/sec:"
)
_PPO = re.compile(
    rf"epoch: ({INTEGER}) ?\| ?step: ({INTEGER}) ?\| ?ppo.?ep(?:och)?: ?\d+ ?\| ?"
    rf"act(?:or)?[_ ]loss: ?({VALUE})",
    re.IGNORECASE,
)
_LATENCY = re.compile(rf"(?:E2E latency=|End-to-End => Latency: ?)({NUMBER}) ?s\b")
_PERPLEXITY = re.compile(rf"^\s*ppl: ({VALUE})")
_OTHER_RANK = re.compile(r"\bRank: ([1-9]\d*)\b")
_OWN_NAME = "deepspeed"
"""Lines of a script are taken as DeepSpeed's once the log has named it."""
_GIB = 2**30
_MOST_LEFT = 64
"""Overflows after the last step of a log that are told one by one."""


class _Reader:
    def __init__(self) -> None:
        self._events = ScalerEvents()
        self._counter = StepCounter()
        self._rank: str | None = None
        self._engine: dict[str, float] | None = None
        self._engine_step = -1
        self._before: tuple[int, int] | None = None
        self._last: int | None = None
        self._scripted = False
        self._is_deepspeed = False

    def feed(self, line: str) -> Sequence[Record] | None:
        if self._events.feed(line):
            self._is_deepspeed = True
            return []
        if not self._is_deepspeed and _OWN_NAME in line.lower():
            self._is_deepspeed = True
        if "step" not in line and "ppl" not in line and "atency" not in line:
            return None if "poch" not in line else self._named(line)
        engine = _ENGINE.search(line)
        if engine is not None:
            self._is_deepspeed = True
            return self._from_engine(engine)
        timer = _TIMER.search(line)
        if timer is not None:
            if self._engine is not None and timer[2] and int(timer[1]) == self._engine_step:
                self._engine["memory_allocated_bytes"] = float(round(number(timer[2]) * _GIB))
            return []
        return self._script(line)

    def _script(self, line: str) -> Sequence[Record] | None:
        found = _PPO.search(line)
        if found is not None:
            step = self._counter.count(int(found[1]), int(found[2]))
            return self._from_script(step, {"loss": number(found[3])})
        found = _LATENCY.search(line)
        if found is not None:
            if self._last is None:
                return []
            return [Record(Observation(step=self._last, step_time_s=number(found[1])))]
        found = _PIPELINE.search(line)
        if found is not None:
            signals = {"loss": number(found[2]), "step_time_s": number(found[3])}
            return self._from_script(int(found[1]), signals)
        found = _PERPLEXITY.search(line)
        if found is not None:
            perplexity = number(found[1])
            loss = math.log(perplexity) if perplexity > 0 else math.nan
            return [Record(Observation(step=self._last or 0, eval_loss=loss))]
        return self._named(line)

    def _named(self, line: str) -> Sequence[Record] | None:
        if not self._is_deepspeed or "loss" not in line.lower():
            return None
        named = parse_line(line)
        if named.step is None or not {"loss", "eval_loss"} & set(named.signals):
            return None
        if _OTHER_RANK.search(line):
            return []
        step = self._counter.count(named.epoch, named.step, named.of_steps)
        return self._from_script(step, named.signals)

    def finish(self) -> Sequence[Record]:
        records = self._held()
        left = min(self._events.count, _MOST_LEFT)
        signals = self._events.take(1)
        start = -1 if self._last is None else self._last
        return [
            *records,
            *(Record(fields.make(start + i, signals)) for i in range(1, left + 1)),
        ]

    def _from_script(self, step: int, signals: dict[str, float]) -> list[Record]:
        before, self._last, self._scripted = self._last, step, True
        if before is not None and step < before:
            self._events.restart()
        interval = step - before if before is not None and step > before else 1
        told = self._engine or {}
        self._engine = None
        told.pop("overflow", None)  # counted step by step, since a second engine may print alike
        told.pop("update_skipped", None)
        events = self._events.take(max(interval, self._events.count if before is None else 1))
        return [Record(fields.make(step, {**told, **events, **signals}))]

    def _from_engine(self, found: re.Match[str]) -> list[Record]:
        rank, step, skipped = found[1], int(found[2]), int(found[3])
        self._rank = self._rank or rank
        if rank != self._rank or step == self._engine_step:
            return []  # another rank or another engine
        records = self._held()
        signals: dict[str, float] = {}
        if found[4]:
            signals["learning_rate"] = number(found[4])
        since = self._before
        if since is None or step < since[0] or skipped < since[1]:
            since = (0, 0)
        if step > since[0]:
            rate = min(1.0, (skipped - since[1]) / (step - since[0]))
            signals["overflow"] = signals["update_skipped"] = rate
        if not self._scripted:
            events = self._events.take(1)
            if "loss_scale" in events:
                signals["loss_scale"] = events["loss_scale"]
        self._before, self._engine_step, self._engine = (step, skipped), step, signals
        return records

    def _held(self) -> list[Record]:
        """Return the engine's own record, where no line of a script was about it."""
        signals, self._engine = self._engine, None
        if signals is None or self._scripted:
            return []
        self._last = self._engine_step
        return [Record(fields.make(self._engine_step, signals))]


def _start() -> LogReader:
    return _Reader()


DEEPSPEED = LogFormat(
    "deepspeed", "DeepSpeed's engine and loss scalers, DeepSpeed-Chat", _start, lag=2
)
