"""Progress of fairseq and metaseq: `| train_inner | {"loss": "16.4", "num_updates": "1", ...}`.

JSON with every number as text, or `loss=16.4, num_updates=1` in its plain style. `num_updates`
counts updates that were made, so overflowing ones, which a note tells of, lie between two of them.
Losses are in bits. Means over an epoch (`train`) are taken only where nothing else is told. A
terminal may have wrapped JSON; the plain style has no end that would show it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from mindtune.controller.records.log_readers import fields
from mindtune.controller.records.log_readers.pieces import Pieces
from mindtune.controller.records.log_readers.reader import (
    CUT,
    NUMBER,
    PART,
    VALUE,
    LogFormat,
    LogReader,
    Record,
    is_whole,
    number,
    whole,
)
from mindtune.policies.signals import Observation

__all__ = ["FAIRSEQ"]

_JSON = re.compile(r"\| *(train_inner|train|valid\w*|[\w-]*valid[\w-]*) *\| *(\{.*\})\s*$")
_BEGINS = re.compile(r"\| *(?:train_inner|train|[\w-]*valid[\w-]*) *\| *\{")
_PLAIN = re.compile(r"\bepoch \d+: +\d+ / \d+ ")
_SUMMARY = re.compile(r"\| *(?:valid \| )?epoch \d+ \| (.*)")
_PAIR = re.compile(rf"(?<![a-z_])([a-z_]+)[= ]({NUMBER})(?=,)")
"""The last one, a time of the process, is left out: a line may have been cut there."""
_SUMMARY_PAIR = re.compile(rf"(?<![a-z_])([a-z_]+) ({NUMBER})(?= *\||\s*$)")
_OVERFLOW = re.compile(rf"overflow detected, ignoring gradient, setting loss scale to: ({VALUE})")
_FACTOR = 2.0
"""The scale that overflowed is twice the one that the note sets."""
_MOST_LEFT = 64


class _Reader:
    def __init__(self) -> None:
        self._updates: int | None = None
        self._overflows: list[float] = []
        self._told_inner = False
        self._pieces = Pieces(_BEGINS, "}")

    def feed(self, line: str) -> Sequence[Record] | None:
        if self._pieces.is_open and "|" in line and _BEGINS.search(line) is None:
            self._pieces.drop()  # a line of its own: the writer of the record was killed
        if self._pieces.is_open or ("{" in line and "}" not in line):
            pieces = self._pieces.take(line)
            if pieces is not None:
                line = _joined(pieces)
            elif self._pieces.is_open:
                return PART
        if "|" not in line:
            return None
        note = _OVERFLOW.search(line) if "overflow" in line else None
        if note is not None:
            self._overflows = [*self._overflows[-_MOST_LEFT:], number(note[1]) * _FACTOR]
            return []
        found = _JSON.search(line)
        if found is not None:
            try:
                told = json.loads(found[2])
            except (ValueError, RecursionError):
                return None
            return self._told(found[1], told) if isinstance(told, dict) else None
        heads = list(_PLAIN.finditer(line))
        if heads:  # of two lines in one the second is whole
            return self._told("train_inner", _pairs(_PAIR.findall(line[heads[-1].end() :])))
        summary = _SUMMARY.search(line) if "num_updates" in line else None
        if summary is not None:
            told = _pairs(_SUMMARY_PAIR.findall(summary[1]))
            return self._told("valid" if "valid" in line else "train", told)
        return None

    def finish(self) -> Sequence[Record]:
        """Tell of overflows after the last update: what most runs end with that are given up."""
        start = self._updates or 0
        return [
            Record(Observation(
                step=start + i, overflow=1.0, update_skipped=1.0, loss_scale=scale
            ))
            for i, scale in enumerate(self._overflows, start=1)
        ]  # fmt: skip

    def _told(self, kind: str, told: dict[str, Any]) -> Sequence[Record] | None:
        if kind == "train" and self._told_inner:
            return []
        prefix = "" if kind == "train_inner" else f"{kind}_"
        updates = _number(told, f"{prefix}num_updates", "num_updates")
        if updates is None or not is_whole(updates):
            return None
        step = int(updates)
        if kind == "train":
            told = {name.removeprefix(prefix): value for name, value in told.items()}
        elif kind == "train_inner":
            self._told_inner = True
        else:
            loss = _number(told, f"{prefix}loss", "loss")
            return [] if loss is None else [Record(Observation(step=step, eval_loss=loss))]
        return [Record(self._observation(step, told))]

    def _observation(self, step: int, told: dict[str, Any]) -> Observation:
        words, rate = _number(told, "wpb"), _number(told, "wps", "ewps")
        scale = _number(told, "loss_scale")
        before, self._updates = self._updates, step
        made = step - before if before is not None and step > before else 1
        lost, self._overflows = self._overflows, []
        share = len(lost) / (len(lost) + made) if scale is not None else None
        return Observation(
            step=step,
            loss=_number(told, "loss"),
            grad_norm=_number(told, "gnorm"),
            learning_rate=_number(told, "lr"),
            loss_scale=scale,
            overflow=share,
            update_skipped=share,
            global_batch_size=whole(_number(told, "bsz")),
            tokens=whole(words),
            tokens_per_s=rate or None,
            step_time_s=words / rate if words and rate and math.isfinite(rate) else None,
        )


def _joined(pieces: list[str]) -> str:
    """Return wrapped JSON as one line, in which what a break runs through cannot be read."""
    text = pieces[0]
    for piece in pieces[1:]:
        text += (CUT if text.count('"') % 2 else " ") + piece
    return text


def _pairs(told: list[tuple[str, str]]) -> dict[str, str]:
    """Return what a plain line names; nothing, if two lines were written into one."""
    updates = {value for name, value in told if name == "num_updates"}
    return dict(reversed(told)) if len(updates) == 1 else {}  # the first of a name holds


def _number(told: dict[str, Any], *names: str) -> float | None:
    for name in names:
        read = fields.read_value(told.get(name))
        if read is not None:
            return read[0]
    return None


def _start() -> LogReader:
    return _Reader()


FAIRSEQ = LogFormat("fairseq", "fairseq and metaseq progress (json or simple)", _start)
