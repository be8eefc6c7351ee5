"""Finds the format of a log, and says how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.records.log_readers.fields import Names
from mindtune.controller.records.log_readers.formats import READERS
from mindtune.controller.records.log_readers.lines import read_lines
from mindtune.controller.records.log_readers.reader import (
    CUT,
    LogFormat,
    LogReader,
    Part,
    Record,
)
from mindtune.controller.records.log_readers.tensorboard import TENSORBOARD, is_event_file
from mindtune.controller.records.log_readers.wrapping import unwrap

__all__ = ["Detection", "detect"]

_SAMPLE = 2000
"""Lines by which a format is recognized, once there is a data line at all."""
_LOOK, _ENOUGH = 500, 200
"""Lines after which it is asked, and losses by which the format of one program is told."""


@dataclass(frozen=True)
class Detection:
    """The format of a log, as its first lines tell it."""

    format: LogFormat
    lines: int
    """Lines that were looked at."""
    losses: int
    """Losses that its reader found in them; records, if no reader found a loss."""
    next_best: str | None = None
    """The format that found the second most."""
    next_losses: int = 0
    rival_losses: int = 0
    """What the best of its rivals found: a general format is none of one program's."""

    @property
    def sureness(self) -> float:
        """Its share of what it and its best rival found; 1 without one, 0.5 beside an equal."""
        return self.losses / max(1, self.losses + self.rival_losses)

    def describe(self) -> str:
        """Return a sentence for the user."""
        if self.format is TENSORBOARD:
            return f"the format {self.format.name} is told by the file's own mark."
        found = f"{self.losses} values of the loss or steps in the first {self.lines} lines"
        rest = (
            "no other reader finds any"
            if self.next_best is None
            else f"next best is {self.next_best} with {self.next_losses}"
        )
        return f"the format {self.format.name} is {self.sureness:.0%} sure: {found}; {rest}."


def detect(path: Path, names: Names | None = None) -> Detection | None:
    """Return the format of a log; None where no reader understands a line of it.

    Args:
        path: the log.
        names: the user's own names; formats with fixed names do not take part then.

    Raises:
        ConfigError: if the file cannot be read.
    """
    if is_event_file(path):
        return Detection(TENSORBOARD, lines=0, losses=0)
    rivals = [
        _Rival(entry, entry.reader(names))
        for entry in READERS
        if entry.events is None and (names is None or entry.mapped is not None)
    ]
    count = 0
    for count, line in enumerate(read_lines(path), start=1):
        text = unwrap(line).text
        whole = text if line.endswith("\n") else text + CUT
        for rival in rivals:
            rival.take(rival.reader.feed(whole if rival.entry.by_line else text))
        if count % _LOOK == 0 and _is_told(rivals, count):
            break
    for rival in rivals:
        rival.take(rival.reader.finish() or None)
    able = [rival for rival in rivals if rival.records]
    if not able:
        return None
    with_loss = any(rival.losses for rival in able)
    able.sort(key=lambda rival: rival.weight, reverse=True)
    told = [rival.losses if with_loss else rival.records for rival in able]
    runner_up = able[1].entry.name if len(able) > 1 and told[1] else None
    best = able[0].entry
    return Detection(
        best,
        lines=count,
        losses=told[0],
        next_best=runner_up,
        next_losses=0 if runner_up is None else told[1],
        rival_losses=max(
            (
                found
                for rival, found in zip(able[1:], told[1:], strict=True)
                if best.is_general or not rival.entry.is_general
            ),
            default=0,
        ),
    )


def _is_told(rivals: list[_Rival], count: int) -> bool:
    most = max((rival.losses for rival in rivals if not rival.entry.is_general), default=0)
    return most >= _ENOUGH or (count % _SAMPLE == 0 and any(rival.records for rival in rivals))


@dataclass
class _Rival:
    """A reader that tries a log, and what it has found."""

    entry: LogFormat
    reader: LogReader
    losses: int = 0
    records: int = 0

    @property
    def weight(self) -> int:
        """Its losses; those of one program's format count twice, as they are found by more."""
        return self.losses * (1 if self.entry.is_general else 2)

    def take(self, records: Sequence[Record] | None) -> None:
        """Count what a line gave."""
        if records is None or isinstance(records, Part):
            return
        self.records += len(records)
        self.losses += sum(record.observation.loss is not None for record in records)
