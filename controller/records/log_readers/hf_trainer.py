"""The Hugging Face Trainer: its `trainer_state.json`, and the dictionaries that it prints.

The state's `log_history` is read entry by entry, so its size does not matter and a cut end is no
harm. A printed dictionary names no step; it is taken from the progress bar before it, and counted
in printed dictionaries where there is none. A terminal, or a program that prints in columns, may
have wrapped one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from mindtune.controller.records.log_readers import fields
from mindtune.controller.records.log_readers.pieces import Pieces
from mindtune.controller.records.log_readers.reader import (
    CUT,
    INTEGER,
    NUMBER,
    PART,
    LogFormat,
    LogReader,
    Record,
    is_whole,
)
from mindtune.controller.records.log_readers.scaler_events import ScalerEvents

__all__ = ["TRAINER_CONSOLE", "TRAINER_STATE"]

_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_ARRAY = re.compile(r"\s*\[\s*(?=\{\s*\")")
"""What other programs write: the array alone."""
_SEPARATORS = re.compile(r"[\s,]*")
_LONGEST = 1 << 22
"""Characters of one entry of the history; one that is longer is none of the Trainer's."""
_LONG = 1 << 12
"""Characters that an entry of the Trainer hardly has: such a one is begun anew less often."""
_BEGINNING = 64
"""Characters of a file in which an array begins, if it is one."""
_TOKENS_SEEN = "num_input_tokens_seen"


class _Entries:
    """Makes records of log entries; counts tokens on."""

    def __init__(self) -> None:
        self._tokens: tuple[int, float] | None = None

    def record(self, step: int, entry: dict[str, Any]) -> list[Record] | None:
        """Return what one entry says; None where it is about no step, as the last one."""
        if "train_runtime" in entry:
            return None
        signals = fields.collect(entry.items())
        if not fields.is_training(signals) and "eval_loss" not in signals:
            return None
        observation = fields.make(step, signals)
        seen = fields.read_value(entry.get(_TOKENS_SEEN))
        if seen is not None:
            before, self._tokens = self._tokens, (step, seen[0])
            if before is not None and step > before[0] and "loss" in signals:
                tokens = round((seen[0] - before[1]) / (step - before[0]))
                observation = fields.make(step, {**signals, "tokens": float(tokens)})
        return [Record(observation)]


class _StateReader:
    """Reads text in pieces of any size."""

    def __init__(self) -> None:
        self._entries = _Entries()
        self._decoder = json.JSONDecoder()
        self._buffer = ""
        self._inside = False
        self._ended = False
        self._begun = False
        self._retry_at = 0
        self._waiting: list[str] = []
        """Pieces that are not in the buffer yet: to put each into it would be quadratic."""
        self._size = 0
        """Characters of the buffer and these."""

    def feed(self, line: str) -> Sequence[Record] | None:
        if self._ended:
            return None
        self._waiting.append(line)
        self._size += len(line)
        if self._inside and self._size < _LONGEST:
            closes = "}" in line or "]" in line
            if not closes or self._size < self._retry_at:
                return None
        self._join()
        if not self._inside:
            found = _HISTORY.search(self._buffer)
            if found is None and not self._begun:
                found = _ARRAY.match(self._buffer)
                self._begun = len(self._buffer) >= _BEGINNING or found is not None
            if found is None:
                self._keep(self._buffer[-256:])
                return None
            self._inside = True
            self._keep(self._buffer[found.end() :])
        return self._take()

    def _join(self) -> None:
        self._buffer += "".join(self._waiting)
        self._waiting.clear()

    def _keep(self, text: str) -> None:
        self._buffer, self._size = text, len(text)

    def _take(self) -> Sequence[Record] | None:
        records: list[Record] = []
        understood = False
        position = 0
        while True:
            position = _after_separators(self._buffer, position)
            if self._buffer[position : position + 1] == "]":
                self._ended = True
                self._keep("")
                break
            try:
                entry, position = self._decoder.raw_decode(self._buffer, position)
            except (ValueError, RecursionError):
                self._keep(self._buffer[position:])
                size = self._size
                self._ended = size > _LONGEST
                # A long entry is not begun anew at every bracket in it: that would be quadratic.
                self._retry_at = size + size // 4 if size > _LONG else 0
                break
            step = fields.read_value(_step_of(entry)) if isinstance(entry, dict) else None
            if step is not None and is_whole(step[0]):
                told = self._entries.record(int(step[0]), entry)
                understood = understood or told is not None
                records += told or []
        return records if understood else None

    def finish(self) -> Sequence[Record]:
        if not self._inside or self._ended:
            return []
        self._join()
        return self._take() or []


def _step_of(entry: dict[str, Any]) -> object:
    return next((entry[name] for name in fields.STEP_NAMES if name in entry), None)


def _after_separators(text: str, position: int) -> int:
    found = _SEPARATORS.match(text, position)
    return position if found is None else found.end()


_DICTIONARY = re.compile(r"\{ *'[^{}]*\}")
_BEGINS = re.compile(r"\{ *'(?:eval_)?loss':")
"""A dictionary of the Trainer's, whose end may stand on a later line."""
_PAIR = re.compile(rf"'([\w/.@-]+)': *'?({NUMBER})(?:/\d+)?'?(?= *[,}}])")
_STEPS = ("step", "global_step/max_steps", "global_step")
"""ms-swift prints `'global_step/max_steps': '5/100'`."""
_MOST_DIGITS = 15
_BAR = re.compile(rf"\d%\|[^|]*\| *({INTEGER})/({INTEGER}) ")


class _ConsoleReader:
    def __init__(self) -> None:
        self._entries = _Entries()
        self._events = ScalerEvents()
        self._bar: tuple[int, int] | None = None
        self._of_steps: int | None = None
        self._last = 0
        self._names_step = False
        self._pieces = Pieces(_BEGINS, "}")

    def feed(self, line: str) -> Sequence[Record] | None:
        if self._events.feed(line):
            return []
        for bar in _BAR.finditer(line) if "%|" in line else ():
            self._bar = (int(bar[1]), int(bar[2]))
        found = _DICTIONARY.search(line) if "{" in line else None
        if found is not None:
            self._pieces.drop()
        elif "{" in line or self._pieces.is_open:
            pieces = self._pieces.take(line)
            if pieces is None:
                return PART if self._pieces.is_open else None
            found = _DICTIONARY.search(CUT.join(pieces))
        if found is None:
            return None
        entry = dict(_PAIR.findall(found[0]))
        has_step = any(name in entry for name in _STEPS)
        if not has_step and CUT in found[0]:
            whole = found[0].replace(CUT, "")
            if any(f"'{name}'" in whole for name in _STEPS):
                return None  # a break runs through it
        if not has_step and ("epoch" not in entry or self._names_step):
            return None
        told = self._entries.record(self._step(entry), entry)
        if told is None or "loss" not in entry:
            return told
        observation = told[0].observation
        interval = max(1, observation.step - self._last)
        signals = self._events.take(interval)
        self._last = observation.step
        if not signals:
            return told
        return [*told, Record(fields.make(observation.step, signals))]

    def _step(self, entry: dict[str, str]) -> int:
        """Return the training bar's step; evaluation has a bar of its own, with another total."""
        training = "loss" in entry
        told = next((entry[name] for name in _STEPS if name in entry), "")
        self._names_step = self._names_step or bool(told)
        if told.isdigit() and len(told) <= _MOST_DIGITS:
            return int(told)
        if self._bar is not None and training and self._bar[0] > 0:
            if self._of_steps is None or self._bar[1] == self._of_steps:
                self._of_steps = self._bar[1]
                return self._bar[0]
            return self._last + 1
        return self._last + 1 if training else self._last

    def finish(self) -> Sequence[Record]:
        return []


def _start_state() -> LogReader:
    return _StateReader()


def _start_console() -> LogReader:
    return _ConsoleReader()


TRAINER_STATE = LogFormat(
    "hf_trainer_state", "trainer_state.json of the Hugging Face Trainer", _start_state,
    by_line=False, begins_anew=True,
)  # fmt: skip
TRAINER_CONSOLE = LogFormat(
    "hf_trainer", "dictionaries that the Hugging Face Trainer prints", _start_console
)
