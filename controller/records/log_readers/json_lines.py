"""One JSON object per line: LLaMA-Factory's `trainer_log.jsonl`, and metrics of other programs.

A line is a data line if its object names a step and a signal. In LLaMA-Factory's the time since
the start of the process tells a resumed run from a second writer of the same steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from mindtune.controller.records.log_readers import fields
from mindtune.controller.records.log_readers.reader import (
    LogFormat,
    LogReader,
    Record,
    is_whole,
)

__all__ = ["JSON_LINES", "LLAMA_FACTORY"]

_ELAPSED = re.compile(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d)")
_STEPS = (*fields.STEP_NAMES, "train_global_step", "trainer_global_step")


class _Reader:
    def __init__(self, marker: str) -> None:
        self._marker = marker

    def feed(self, line: str) -> Sequence[Record] | None:
        text = line.strip()
        if not text.startswith("{") or self._marker not in text:
            return None
        try:
            told = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return self._record(_flat(told)) if isinstance(told, dict) else None

    def _record(self, told: dict[str, Any]) -> Sequence[Record] | None:
        step = _step(told)
        if step is None:
            return None
        signals = fields.collect(told.items())
        if not fields.is_training(signals) and "eval_loss" not in signals:
            # The last line of LLaMA-Factory repeats the step without a loss.
            return [] if self._marker == _LLAMA_FACTORY else None
        return [Record(fields.make(step, signals), elapsed_s=_seconds(told.get("elapsed_time")))]

    def finish(self) -> Sequence[Record]:
        return []


def _flat(told: dict[str, Any]) -> dict[str, Any]:
    """Return nested objects as `outer/inner`, one level deep, as loggers of metrics nest them."""
    flat: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, dict):
            flat.update({f"{name}/{inner}": entry for inner, entry in value.items()})
        else:
            flat[name] = value
    return flat


def _step(told: dict[str, Any]) -> int | None:
    names = {fields.normal(name): value for name, value in told.items()}
    for name in _STEPS:
        read = fields.read_value(names.get(name))
        if read is not None and is_whole(read[0]):
            return int(read[0])
    return None


def _seconds(text: object) -> float | None:
    found = _ELAPSED.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


_LLAMA_FACTORY = '"current_steps"'


def _start_llama_factory() -> LogReader:
    return _Reader(_LLAMA_FACTORY)


def _start() -> LogReader:
    return _Reader("")


LLAMA_FACTORY = LogFormat(
    "llamafactory", "trainer_log.jsonl of LLaMA-Factory", _start_llama_factory, lag=3
)
JSON_LINES = LogFormat("jsonl", "one JSON object with a step per line", _start)
