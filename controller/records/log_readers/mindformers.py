"""Lines of MindFormers' `MFLossMonitor`, 1.x and 2.x, and of its PyNative trainer.

A step's record is `{ Epoch:[ 1/ 1], step:[ 30/ 120], loss:[3.14/4.33], per_step_time: 47ms, lr:
..., overflow cond: False, loss_scale: 1.0, global_norm: [1.43], ...`, without braces and with
`time: 47.0 ms` in old releases, after a prefix that differs between console and file. What is not
what it looks like: the printed loss scale is the one after the step, lowered if that overflowed;
large scales are rounded (2147483600.0 is 2^31); the PyNative trainer prints `grad_norm: NaN` for
none, and `nan` for a norm that is not a number. A terminal may have wrapped a record: what its
later lines tell is added, but for the values that a break runs through.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from mindtune.controller.records.log_readers.reader import (
    CUT,
    INTEGER,
    NUMBER,
    LogFormat,
    LogReader,
    Part,
    Record,
    flag,
    number,
    observed,
)
from mindtune.policies.signals import Observation

__all__ = ["MINDFORMERS"]

_STEP = re.compile(
    rf"(?:\{{ ?|(?=Epoch))(?:Epoch: ?\[ *(?P<epoch>{INTEGER})/ *\d+\], *)?"
    rf"step: ?\[ *(?P<step>{INTEGER})/ *(?P<steps>{INTEGER})\], "
)
_BEFORE = 40
"""Characters in front of the step in which the record begins, with its epoch."""
_ENDS = ("}", "Epoch:", "step:")
"""The end of a record, or where another one begins."""
_LOSS = re.compile(rf"\[ *({NUMBER}) *(?:/ *(?:{NUMBER})? *)?\]|({NUMBER})")
_PLAIN = re.compile(rf"\[? *({NUMBER}) *\]?")
_LAST_SCALE = re.compile(r"\d+\.\d|\[.*\]")
"""A scale that ends a record of an old release; it is printed with one digit behind the point."""
_LAST_NORM = re.compile(r"\[[^\]]*\]")
_MILLISECONDS = "ms"
_SKIP_LINE = re.compile(
    rf"\bskip_data_grad_norm_threshold: *({NUMBER}), *is_skip: *\[? *(True|False)\b"
)
_REST = re.compile(
    r"\b(?:overflow cond|loss_scale|global_norm|grad_norm|train_throughput_per_npu): "
)
"""Stands in what a terminal has wrapped of a record."""
_COMPLETE = ("}", "train_throughput_per_npu: ")
"""The end of a record, or its last value."""
_LOGGED = " - "
"""Stands in every line of MindFormers' logger, and in no record."""
_WRAPPED = 6
"""Lines that one record may be wrapped over."""
_NO_NORM = "NaN"
_SCALE_FACTOR = 2.0
"""MindFormers' DynamicLossScaleUpdateCell halves by default."""


class _Newest(NamedTuple):
    """The record of the line before, whose rest may follow."""

    head: re.Match[str]
    text: str
    lines: int
    last: int | None
    """Step of the record before it."""
    scale: float | None
    """Scale after that step."""


class _Reader:
    def __init__(self) -> None:
        self._last: int | None = None
        self._scale: float | None = None
        self._newest: _Newest | None = None

    def feed(self, line: str) -> Sequence[Record] | None:
        newest, self._newest = self._newest, None
        first = None
        if "step:" in line and "loss" in line:
            first = _STEP.search(line, max(0, line.find("step:") - _BEFORE))
        if first is None:
            return self._skip(line) if newest is None else self._rest(line, newest)
        heads = [first]
        if "step:" in line[first.end() :]:
            heads += _STEP.finditer(line, first.end())
        # Several heads: one rank wrote into the line of another. Each is read up to the next.
        before = self._last, self._scale
        texts = [_own_part(line, head.end()) for head in heads]
        if len(heads) == 1 and not any(mark in texts[0] for mark in _COMPLETE):
            self._newest = _Newest(first, texts[0].rstrip("\r\n"), 1, *before)
        return [self._record(head, text) for head, text in zip(heads, texts, strict=True)]

    def _rest(self, line: str, newest: _Newest) -> Sequence[Record] | None:
        """Read what a terminal has wrapped of the record in the lines before."""
        if _LOGGED in line or _REST.search(line) is None:
            return self._skip(line)
        told = newest.text.rstrip()
        told = f"{told} " if told.endswith(",") else f"{newest.text}{CUT}"
        text = f"{told}{_own_part(line, 0)}".rstrip("\r\n")
        lines = newest.lines + 1
        if lines < _WRAPPED and not any(mark in text for mark in _COMPLETE):
            self._newest = newest._replace(text=text, lines=lines)
        self._last, self._scale = newest.last, newest.scale
        return Part([self._record(newest.head, text)])

    def _record(self, head: re.Match[str], line: str) -> Record:
        step = int(head["step"])
        if head["epoch"]:
            step += max(0, int(head["epoch"]) - 1) * int(head["steps"])
        starts = self._last is None or step < self._last
        follows = self._last is not None and step == self._last + 1
        told = _fields(line)
        overflow = _flag(told.get("overflow cond"))
        scale = _number(told.get("loss_scale"))
        if scale is not None and math.isfinite(scale) and scale > 1:
            scale = 2.0 ** round(math.log2(scale))
        used = scale
        if follows and self._scale is not None and scale is not None:
            used = self._scale
        elif overflow and scale is not None and scale > 1:
            used = scale * _SCALE_FACTOR
        self._last, self._scale = step, scale
        time_ms = _milliseconds(told.get("per_step_time") or told.get("time"))
        loss = _LOSS.fullmatch(told.get("loss", ""))
        norm = told.get("global_norm") or told.get("grad_norm")
        return Record(observed(
            step=step,
            phase="compile" if starts else "train",
            loss=None if loss is None else number(loss[1] or loss[2]),
            step_time_s=None if time_ms is None else time_ms / 1000,
            learning_rate=_number(told.get("lr")),
            overflow=overflow,
            update_skipped=_flag(told.get("is_skip")),
            loss_scale=used,
            grad_norm=None if norm == _NO_NORM else _number(norm),
        ))  # fmt: skip

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
    ends = [end for end in (line.find(mark, start) for mark in _ENDS) if end >= 0]
    return line[start : min(ends) + 1] if ends else line[start:]


def _fields(text: str) -> dict[str, str]:
    """Return what a record names; a value counts if a mark shows that it is whole.

    Inside, that is the comma behind it. The last one may have been cut by a terminal, so of it
    only forms that end in a mark of their own are taken.
    """
    told: dict[str, str] = {}
    *inside, last = text.split(", ")
    for part in inside:
        name, sign, value = part.partition(":")
        if not sign:
            name, value = _pair(part)
        told.setdefault(name.strip(), value.strip())
    name, value = _pair(last.rstrip(" }\r\n"))
    ending = {"loss_scale": _LAST_SCALE, "global_norm": _LAST_NORM, "is_skip": _LAST_NORM}
    if name in ending and ending[name].fullmatch(value):
        told.setdefault(name, value)
    return told


def _pair(part: str) -> tuple[str, str]:
    name, sign, value = part.partition(":")
    if not sign:  # `global_norm [10.5]`
        name, _, value = part.strip().partition(" ")
    return name.strip(), value.strip()


def _number(text: str | None) -> float | None:
    """Return a number; None for a list of several, as a lost decimal point makes one."""
    found = None if text is None else _PLAIN.fullmatch(text)
    return None if found is None else number(found[1])


def _milliseconds(text: str | None) -> float | None:
    whole = text is not None and text.endswith(_MILLISECONDS)
    return _number(text.removesuffix(_MILLISECONDS).rstrip()) if whole and text else None


def _flag(text: str | None) -> float | None:
    return None if text is None else flag(text.strip("[] "))


def _start() -> LogReader:
    return _Reader()


MINDFORMERS = LogFormat("mindformers", "MindFormers MFLossMonitor and PyNative trainer", _start)
