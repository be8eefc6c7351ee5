"""Find the format of a log, and read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers.mindformers import MINDFORMERS
from mindtune.controller.records.log_readers.mindspore_monitor import MINDSPORE_MONITOR
from mindtune.controller.records.log_readers.reader import ANSI, LogFormat
from mindtune.policies.signals import Observation

__all__ = ["READERS", "LogRecords", "read_log"]

READERS: tuple[LogFormat, ...] = (MINDFORMERS, MINDSPORE_MONITOR)
"""Every format that can be read; the first that understands a line of a log reads all of it."""


@dataclass(frozen=True)
class LogRecords:
    """What a log tells."""

    format: str
    """Name of the format."""
    records: int
    """Data lines understood."""
    observations: tuple[Observation, ...]
    """One per step, in the order of their first line; a repeated step holds its last line."""


def read_log(path: Path) -> LogRecords | None:
    """Return what a log tells; None where no reader understands a line of it.

    Raises:
        ConfigError: if the file cannot be read.
    """
    chosen = next((entry for entry in READERS if _understands(entry, path)), None)
    if chosen is None:
        return None
    steps: dict[int, Observation] = {}
    records = 0
    reader = chosen.start()
    for line in _lines(path):
        observation = reader.feed(line)
        if observation is not None:
            records += 1
            steps[observation.step] = observation
    return LogRecords(chosen.name, records, tuple(steps.values()))


def _understands(entry: LogFormat, path: Path) -> bool:
    reader = entry.start()
    return any(reader.feed(line) is not None for line in _lines(path))


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                yield ANSI.sub("", line)
    except OSError as error:
        raise ConfigError(f"{path} must be readable, but: {error.strerror}.") from None
