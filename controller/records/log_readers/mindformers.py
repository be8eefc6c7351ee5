"""Lines of MindFormers' `MFLossMonitor`, 1.x and 2.x.

A step's record is `{ Epoch:[ 1/ 1], step:[ 30/ 120], loss:[3.14/4.33], per_step_time: 47ms, lr:
..., overflow cond: False, loss_scale: 1.0, global_norm: [1.43], ...`, after a prefix that differs
between console and file. Two things are not what they look like: with an overflow the printed loss
scale is already the lowered one, and large scales are rounded (2147483600.0 is 2^31).
"""

from __future__ import annotations

import math
import re

from mindtune.controller.records.log_readers.reader import (
    NUMBER,
    LineReader,
    LogFormat,
    StepCounter,
    number,
)
from mindtune.policies.signals import Observation

__all__ = ["MINDFORMERS"]

_STEP = re.compile(
    r"\{ (?:Epoch:\[ *(?P<epoch>\d+)/ *\d+\], )?step:\[ *(?P<step>\d+)/ *(?P<steps>\d+)\], "
)
_LOSS = re.compile(rf"\bloss: *\[? *({NUMBER})")
_TIME = re.compile(r"\bper_step_time: *(\d+)ms")
_RATE = re.compile(rf"\blr: *({NUMBER})")
_OVERFLOW = re.compile(r"\boverflow cond: *\[? *(True|False)")
_SCALE = re.compile(rf"\bloss_scale: *\[? *({NUMBER})")
_NORM = re.compile(rf"\b(?:global_norm|grad_norm): *\[? *({NUMBER})")
_SKIPPED = re.compile(r"\bis_skip: *\[? *(True|False)")
_SCALE_FACTOR = 2.0
"""MindFormers' DynamicLossScaleUpdateCell halves by default."""


class _Reader:
    def __init__(self) -> None:
        self._counter = StepCounter()
        self._first = True

    def feed(self, line: str) -> Observation | None:
        head = _STEP.search(line)
        if head is None:
            return None
        overflow = _flag(_OVERFLOW, line)
        scale = _value(_SCALE, line)
        if scale is not None and math.isfinite(scale) and scale > 1:
            scale = 2.0 ** round(math.log2(scale))
            scale *= _SCALE_FACTOR if overflow else 1.0
        time_ms = _value(_TIME, line)
        step = self._counter.count(int(head["epoch"] or 1), int(head["step"]), int(head["steps"]))
        phase = "compile" if self._first else "train"
        self._first = False
        return Observation(
            step=step,
            phase=phase,
            loss=_value(_LOSS, line),
            step_time_s=None if time_ms is None else time_ms / 1000,
            learning_rate=_value(_RATE, line),
            overflow=overflow,
            update_skipped=_flag(_SKIPPED, line),
            loss_scale=scale,
            grad_norm=_value(_NORM, line),
        )


def _value(pattern: re.Pattern[str], line: str) -> float | None:
    found = pattern.search(line)
    return None if found is None else number(found[1])


def _flag(pattern: re.Pattern[str], line: str) -> float | None:
    found = pattern.search(line)
    return None if found is None else float(found[1] == "True")


def _start() -> LineReader:
    return _Reader()


MINDFORMERS = LogFormat("mindformers", "MindFormers MFLossMonitor", _start)
