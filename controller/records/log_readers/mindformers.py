"""Lines of MindFormers' `MFLossMonitor`, 1.x and 2.x, and of its PyNative trainer.

A step's record is `{ Epoch:[ 1/ 1], step:[ 30/ 120], loss:[3.14/4.33], per_step_time: 47ms, lr:
..., overflow cond: False, loss_scale: 1.0, global_norm: [1.43], ...`, without braces and with
`time: 47.0 ms` in old releases, after a prefix that differs between console and file. What is not
what it looks like: the printed loss scale is the one after the step, lowered if that overflowed;
large scales are rounded (2147483600.0 is 2^31); the PyNative trainer prints `grad_norm: NaN` for
none, and `nan` for a norm that is not a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mindtune.controller.records.log_readers.reader import (
    INTEGER,
    NUMBER,
    LogFormat,
    LogReader,
    Record,
    flag,
    number,
)
from mindtune.policies.signals import Observation

__all__ = ["MINDFORMERS"]

_STEP = re.compile(
    rf"(?:\{{ ?|(?=Epoch))(?:Epoch: ?\[ *(?P<epoch>{INTEGER})/ *\d+\], *)?"
    rf"step: ?\[ *(?P<step>{INTEGER})/ *(?P<steps>{INTEGER})\], "
)
_NEXT = re.compile(r"\}|\bEpoch: ?\[|\bstep: ?\[")
"""The end of a record, or where another one begins."""
_INSIDE = r"(?= *[,\]])"
"""What follows a value inside a record. A line end does not: a terminal may have cut it there."""
_LOSS = re.compile(
    rf"\bloss: *(?:\[ *({NUMBER})(?= *(?:/ *(?:{NUMBER})? *\]|\]))|({NUMBER}){_INSIDE})"
)
_TIME = re.compile(rf"\b(?:per_step_)?time: *({NUMBER}) *ms\b")
_RATE = re.compile(rf"\blr: *\[? *({NUMBER}){_INSIDE}")
_OVERFLOW = re.compile(r"\boverflow cond: *\[? *(True|False)\b")
_SCALE = re.compile(rf"\bloss_scale: *\[? *({NUMBER})(?:{_INSIDE}|(?<=\.\d)\s*$)")
"""The last value of an old record; a scale is printed with one digit behind the point."""
_NORM = re.compile(
    rf"\bglobal_norm:? *\[ *({NUMBER}) *\](?= *[,}}]|\s*$)"
    rf"|\b(?:global|grad)_norm: *({NUMBER})(?= *[,}}])"
)
_SKIPPED = re.compile(r"\bis_skip: *\[? *(True|False)\b")
_SKIP_LINE = re.compile(
    rf"\bskip_data_grad_norm_threshold: *({NUMBER}), *is_skip: *\[? *(True|False)\b"
)
_NO_NORM = "NaN"
_SCALE_FACTOR = 2.0
"""MindFormers' DynamicLossScaleUpdateCell halves by default."""


class _Reader:
    def __init__(self) -> None:
        self._last: int | None = None
        self._scale: float | None = None

    def feed(self, line: str) -> Sequence[Record] | None:
        if "step:" not in line or "loss" not in line:
            return self._skip(line)
        heads = list(_STEP.finditer(line))
        if not heads:
            return self._skip(line)
        # Several heads: one rank wrote into the line of another. Each is read up to the next.
        return [self._record(head, _own_part(line, head.end())) for head in heads]

    def _record(self, head: re.Match[str], line: str) -> Record:
        step = int(head["step"])
        if head["epoch"]:
            step += max(0, int(head["epoch"]) - 1) * int(head["steps"])
        starts = self._last is None or step < self._last
        follows = self._last is not None and step == self._last + 1
        overflow = _flag(_OVERFLOW, line)
        scale = _value(_SCALE, line)
        if scale is not None and math.isfinite(scale) and scale > 1:
            scale = 2.0 ** round(math.log2(scale))
        used = scale
        if follows and self._scale is not None and scale is not None:
            used = self._scale
        elif overflow and scale is not None and scale > 1:
            used = scale * _SCALE_FACTOR
        self._last, self._scale = step, scale
        time_ms = _value(_TIME, line)
        observation = Observation(
            step=step,
            phase="compile" if starts else "train",
            loss=_value(_LOSS, line),
            step_time_s=None if time_ms is None else time_ms / 1000,
            learning_rate=_value(_RATE, line),
            overflow=overflow,
            update_skipped=_flag(_SKIPPED, line),
            loss_scale=used,
            grad_norm=_norm(line),
        )
        return Record(observation)

    def _skip(self, line: str) -> Sequence[Record] | None:
        """Read the line about skipped data, which follows that of its step."""
        found = _SKIP_LINE.search(line) if "is_skip" in line else None
        if found is None:
            return None
        if self._last is None:
            return []
        observation = Observation(
            step=self._last, skip_threshold=number(found[1]), update_skipped=flag(found[2])
        )
        return [Record(observation)]

    def finish(self) -> Sequence[Record]:
        return []


def _own_part(line: str, start: int) -> str:
    end = _NEXT.search(line, start)
    return line[start:] if end is None else line[start : end.end()]


def _norm(line: str) -> float | None:
    """Return the norm; None for a list of several numbers, as a lost decimal point makes one."""
    found = _NORM.search(line)
    if found is None or found[2] == _NO_NORM:
        return None
    return number(found[1] or found[2])


def _value(pattern: re.Pattern[str], line: str) -> float | None:
    found = pattern.search(line)
    return None if found is None else number(found[found.lastindex or 1])


def _flag(pattern: re.Pattern[str], line: str) -> float | None:
    found = pattern.search(line)
    return None if found is None else flag(found[1])


def _start() -> LogReader:
    return _Reader()


MINDFORMERS = LogFormat("mindformers", "MindFormers MFLossMonitor and PyNative trainer", _start)
