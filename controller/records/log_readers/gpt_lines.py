"""Lines of small GPT trainers: llm.c, and nanoGPT with its descendants.

llm.c writes `s:10 trl:7.14 lr:0.000085 norm:1.22` to main.log (`tel:` is a validation loss) and
`step   10/18865 | loss 7.14 (+0.1z)| norm 1.22 ...` to the console. nanoGPT prints
`iter 10: loss 7.1, time 140.2ms, mfu 12.3%`, its speed-run descendant `step:10/1875
train_loss:7.1 train_time:44119ms step_avg:nanms`. There the time counts from the start and is
reset once, and a `step_avg` of NaN is a mean over nothing, no fault.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mindtune.controller.records.log_readers import fields
from mindtune.controller.records.log_readers.reader import (
    ENDS,
    INTEGER,
    NUMBER,
    VALUE,
    LogFormat,
    LogReader,
    Record,
    number,
)
from mindtune.policies.signals import Observation

__all__ = ["LLM_C", "NANO_GPT"]

_MAIN = re.compile(rf"^\s*s:({INTEGER}) (tel|trl):({VALUE})(?: lr:({VALUE}))?(?: norm:({VALUE}))?")
_CONSOLE = re.compile(rf"^\s*step +({INTEGER})/{INTEGER} ?[|:] *(?:train )?loss ({VALUE})")
_CONSOLE_PARTS = re.compile(rf"\| *(norm|lr)? *({NUMBER})(?: *(ms|% bf16 MFU|tok/s)\b|{ENDS})")
_OLD_TIME = re.compile(rf"\(({NUMBER}) ms, ({NUMBER}) tok/s\)")
_VALIDATION = re.compile(rf"^\s*val loss ({VALUE})")


class _LlmCReader:
    def __init__(self) -> None:
        self._last = 0

    def feed(self, line: str) -> Sequence[Record] | None:
        found = _MAIN.match(line)
        if found is not None:
            step, value = int(found[1]), number(found[3])
            if found[2] == "tel":
                return [Record(Observation(step=step, eval_loss=value))]
            return [Record(Observation(
                step=step,
                loss=value,
                learning_rate=number(found[4]) if found[4] else None,
                grad_norm=number(found[5]) if found[5] else None,
            ))]  # fmt: skip
        found = _CONSOLE.match(line)
        if found is not None and "ms" in line:
            self._last = int(found[1])
            return [Record(self._console(line, number(found[2])))]
        found = _VALIDATION.match(line)
        if found is not None:
            return [Record(Observation(step=self._last, eval_loss=number(found[1])))]
        return None

    def _console(self, line: str, loss: float) -> Observation:
        signals = {"loss": loss}
        old = _OLD_TIME.search(line)
        if old is not None:
            signals["step_time_s"] = number(old[1]) / 1000
            signals["tokens_per_s"] = number(old[2])
        for name, value, unit in _CONSOLE_PARTS.findall(line):
            if name == "norm":
                signals["grad_norm"] = number(value)
            elif name == "lr":
                signals["learning_rate"] = number(value)
            elif unit == "ms":
                signals["step_time_s"] = number(value) / 1000
            elif unit == "tok/s":
                signals["tokens_per_s"] = number(value)
            elif unit:
                signals["mfu"] = number(value) / 100
        return fields.make(self._last, signals)

    def finish(self) -> Sequence[Record]:
        return []


_ITER = re.compile(
    rf"^\s*iter ({INTEGER}): loss ({NUMBER}), time ({NUMBER})ms\b(?:, mfu ({NUMBER})%)?"
)
_ESTIMATE = re.compile(rf"^\s*step ({INTEGER}): train loss {NUMBER}, val loss ({VALUE})")
_SPEED_RUN = re.compile(
    rf"^\s*step:({INTEGER})/{INTEGER} (train_loss|val_loss):({VALUE})"
    rf"(?: train_time:({NUMBER})ms\b)?"
)
_NO_MFU = -100.0
"""nanoGPT prints this before its first measurement."""


class _NanoGptReader:
    def __init__(self) -> None:
        self._step: int | None = None
        self._time_ms: float | None = None

    def feed(self, line: str) -> Sequence[Record] | None:
        found = _SPEED_RUN.match(line)
        if found is not None:
            step, value = int(found[1]), number(found[3])
            if found[2] == "val_loss":
                return [Record(Observation(step=step, eval_loss=value))]
            time_s = self._since_before(step, number(found[4]) if found[4] else None)
            return [Record(Observation(step=step, loss=value, step_time_s=time_s))]
        found = _ITER.match(line)
        if found is not None:
            mfu = number(found[4]) if found[4] else _NO_MFU
            return [Record(Observation(
                step=int(found[1]),
                loss=number(found[2]),
                step_time_s=number(found[3]) / 1000,
                mfu=mfu / 100 if mfu > _NO_MFU else None,
            ))]  # fmt: skip
        found = _ESTIMATE.match(line)
        if found is not None:
            return [Record(Observation(step=int(found[1]), eval_loss=number(found[2])))]
        return None

    def _since_before(self, step: int, time_ms: float | None) -> float | None:
        before, before_ms = self._step, self._time_ms
        self._step, self._time_ms = step, time_ms
        if time_ms is None or before is None or before_ms is None:
            return None
        if step <= before or time_ms < before_ms:
            return None
        return (time_ms - before_ms) / (step - before) / 1000

    def finish(self) -> Sequence[Record]:
        return []


def _start_llm_c() -> LogReader:
    return _LlmCReader()


def _start_nano_gpt() -> LogReader:
    return _NanoGptReader()


LLM_C = LogFormat("llm.c", "main.log and console of llm.c", _start_llm_c)
NANO_GPT = LogFormat("nanogpt", "nanoGPT and modded-nanogpt", _start_nano_gpt)
