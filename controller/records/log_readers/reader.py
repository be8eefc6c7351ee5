"""What a reader of one log format is, and what readers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mindtune.policies.signals import Observation

__all__ = ["INTEGER", "NUMBER", "LogFormat", "LogReader", "Record", "StepCounter", "flag",
           "is_whole", "number", "whole"]  # fmt: skip

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?i:nan|inf(?:inity)?)\b)"
"""A number as programs print it, non-finite ones included."""
INTEGER = r"\d{1,15}"
"""A count; more digits than 15 are damage, and a float could not hold them."""
_LARGEST = 10**15


@dataclass(frozen=True)
class Record:
    """What a log says about one step; several records may be about the same one."""

    observation: Observation
    elapsed_s: float | None = None
    """Seconds since its process started, where the log says so: tells a restart."""


class LogReader(Protocol):
    """Reads one log, line by line; keeps what it needs between lines and nothing else."""

    def feed(self, line: str) -> Sequence[Record] | None:
        """Return what a line tells; None where it is no data line. Never raises.

        A line that was understood may give nothing yet: its record comes with a later line.
        """

    def finish(self) -> Sequence[Record]:
        """Return what was still held back when the log ended."""


@dataclass(frozen=True)
class LogFormat:
    """A format by name, with a fresh reader per log."""

    name: str
    description: str
    start: Callable[[], LogReader]
    lag: int = 1
    """Records by which a second writer of the same steps may be behind the first one."""
    by_line: bool = True
    """False: the reader takes text as it comes, lines do not matter."""


def number(text: str) -> float:
    """Return the number that `NUMBER` matched."""
    word = text.lower()
    return math.nan if "nan" in word else float(word)


def flag(word: str) -> float | None:
    """Return 1 or 0 for a truth value as programs print it; None for anything else."""
    return {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0}.get(word.strip().lower())


def is_whole(value: float) -> bool:
    """Tell whether a number is a count."""
    return math.isfinite(value) and value.is_integer() and 0 <= value < _LARGEST


def whole(value: float | None) -> int | None:
    """Return a positive count as an integer, None for anything else."""
    return int(value) if value is not None and value > 0 and is_whole(value) else None


class StepCounter:
    """Counts optimizer steps on over epochs in which a log counts from the start again."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._offset = 0
        self._last = 0
        self._counted = 0

    def count(self, epoch: int | None, step: int, steps_per_epoch: int | None = None) -> int:
        """Return the step since the start of the log's first epoch.

        Args:
            epoch: None: the log has none, and its steps count on.
            step: as printed; inside the epoch, or counted on over epochs.
            steps_per_epoch: None: taken from the last step of the epoch before.
        """
        if epoch is None:
            return step
        if steps_per_epoch and step <= steps_per_epoch:
            return max(0, epoch - 1) * steps_per_epoch + step
        if self._epoch is not None and epoch < self._epoch:
            self._offset, self._counted = 0, 0  # another run, appended
        elif self._epoch is not None and epoch > self._epoch and step <= self._last:
            # At least one step lies between two records, even if both are the first of an epoch.
            self._offset += max(self._last, self._counted + 1 - step - self._offset)
        self._epoch, self._last = epoch, step
        self._counted = self._offset + step
        return self._counted
