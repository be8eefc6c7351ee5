"""What a reader of one log format is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mindtune.policies.signals import Observation

__all__ = ["ANSI", "NUMBER", "LineReader", "LogFormat", "StepCounter", "number"]

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colours and cursor moves of a terminal."""
NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf|NaN|Inf|NAN|INF)"
"""A number as programs print it, non-finite ones included."""


class LineReader(Protocol):
    """Reads one log, line by line; keeps what it needs between lines and nothing else."""

    def feed(self, line: str) -> Observation | None:
        """Return what a line tells, or None where it is no data line. Never raises."""


@dataclass(frozen=True)
class LogFormat:
    """A format by name, with a fresh reader per log."""

    name: str
    description: str
    start: Callable[[], LineReader]


def number(text: str) -> float:
    """Return the number that `NUMBER` matched."""
    word = text.lower()
    return math.nan if "nan" in word else float(word)


class StepCounter:
    """Counts optimizer steps on over epochs in which a log counts from 1 again."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._offset = 0
        self._last = 0

    def count(self, epoch: int, step: int, steps_per_epoch: int | None = None) -> int:
        """Return the step since the start of the log's first epoch.

        Args:
            epoch: from 1.
            step: inside the epoch, from 1.
            steps_per_epoch: None: taken from the last step of the epoch before.
        """
        if steps_per_epoch is not None:
            return (epoch - 1) * steps_per_epoch + step
        if self._epoch is not None and epoch > self._epoch:
            self._offset += self._last
        elif self._epoch is not None and epoch < self._epoch:
            self._offset = 0  # another run, appended
        self._epoch, self._last = epoch, step
        return self._offset + step
