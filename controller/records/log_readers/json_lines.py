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
_STATE = '"log_history"'
_AROUND = " \t\r\n[],"
"""What stands around an object where it is an element of an array, one per line."""


class _Reader:
    def __init__(self, marker: str, names: fields.Names) -> None:
        self._marker = marker
        self._names = names
        self._is_state = False

    def feed(self, line: str) -> Sequence[Record] | None:
        if "{" not in line or self._marker not in line or self._is_state:
            return None
        if _STATE in line:  # of the Trainer; its entries may stand one per line
            self._is_state = True
            return None
        text = line.strip(_AROUND)
        if not text.startswith("{"):
            return None
        try:
            told = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return self._record(_flat(told)) if isinstance(told, dict) else None

    def _record(self, told: dict[str, Any]) -> Sequence[Record] | None:
        step = self._step(told)
        if step is None:
            return None
        signals = self._names.collect(told.items())
        if not self._names.tells(signals):
            # The last line of LLaMA-Factory repeats the step without a loss.
            return [] if self._marker == _LLAMA_FACTORY else None
        return [Record(fields.make(step, signals), elapsed_s=_seconds(told.get("elapsed_time")))]

    def _step(self, told: dict[str, Any]) -> int | None:
        names = {fields.normal(name): value for name, value in told.items()}
        for name in self._names.steps:
            value = names.get(name)
            if isinstance(value, str):
                value = value.partition("/")[0]  # ms-swift tells it as 5/100
            read = fields.read_value(value)
            if read is not None and is_whole(read[0]):
                return int(read[0])
        return None

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


def _seconds(text: object) -> float | None:
    found = _ELAPSED.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


_LLAMA_FACTORY = '"current_steps"'


def _start_llama_factory() -> LogReader:
    return _Reader(_LLAMA_FACTORY, fields.KNOWN)


def _start(names: fields.Names = fields.KNOWN) -> LogReader:
    return _Reader("", names)


LLAMA_FACTORY = LogFormat(
    "llamafactory", "trainer_log.jsonl of LLaMA-Factory", _start_llama_factory, lag=3
)
JSON_LINES = LogFormat(
    "jsonl", "one JSON object with a step per line", _start, mapped=_start, is_general=True
)
