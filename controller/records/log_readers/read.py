"""Find the format of a log, and read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers.deepspeed import DEEPSPEED
from mindtune.controller.records.log_readers.fairseq import FAIRSEQ
from mindtune.controller.records.log_readers.gpt_lines import LLM_C, NANO_GPT
from mindtune.controller.records.log_readers.hf_trainer import TRAINER_CONSOLE, TRAINER_STATE
from mindtune.controller.records.log_readers.json_lines import JSON_LINES, LLAMA_FACTORY
from mindtune.controller.records.log_readers.key_value import KEY_VALUE
from mindtune.controller.records.log_readers.lines import read_lines, timestamp
from mindtune.controller.records.log_readers.megatron import MEGATRON
from mindtune.controller.records.log_readers.merge import TimedRecord, merge_records
from mindtune.controller.records.log_readers.mindformers import MINDFORMERS
from mindtune.controller.records.log_readers.mindspore_monitor import MINDSPORE_MONITOR
from mindtune.controller.records.log_readers.progress_bar import PROGRESS_BAR
from mindtune.controller.records.log_readers.reader import LogFormat, LogReader, Record
from mindtune.controller.records.log_readers.table import CSV_TABLE, SIGNALS_TABLE
from mindtune.policies.signals import Observation

__all__ = ["AUTO", "READERS", "LogRecords", "LogStream", "find_format", "open_log", "read_log"]

READERS: tuple[LogFormat, ...] = (
    SIGNALS_TABLE, CSV_TABLE, TRAINER_STATE, LLAMA_FACTORY, MINDFORMERS, MEGATRON, FAIRSEQ,
    DEEPSPEED, TRAINER_CONSOLE, LLM_C, NANO_GPT, MINDSPORE_MONITOR, JSON_LINES, PROGRESS_BAR,
    KEY_VALUE,
)  # fmt: skip
"""Every format that can be read, the more special ones first. The one that finds the most losses
in the first lines that hold any reads all of a log; among equals the first."""
AUTO = "auto"
_SAMPLE = 2000
"""Lines by which a format is recognized, once there is a data line at all."""


class LogStream:
    """The observations of a log, read as they are asked for; may be iterated once.

    Args:
        path: the log.
        format: its format.
    """

    def __init__(self, path: Path, format: LogFormat) -> None:  # noqa: A002 - its own word
        self.path = path
        self.format = format
        self.records = 0
        """Data lines understood so far."""
        self.is_cut = False
        """Whether a compressed log broke off: it is still being written, or damaged."""

    def __iter__(self) -> Iterator[Observation]:
        """Yield one observation per step.

        Raises:
            ConfigError: if the file cannot be read.
        """
        return merge_records(self._records(), lag=self.format.lag)

    def _cut(self) -> None:
        self.is_cut = True

    def _records(self) -> Iterator[TimedRecord]:
        reader = self.format.start()
        for line in read_lines(self.path, on_damage=self._cut):
            records = reader.feed(line)
            if records is None:
                continue
            self.records += 1 if self.format.by_line else len(records)
            if records:
                written_s = timestamp(line) if self.format.by_line else None
                for record in records:
                    yield TimedRecord(record, written_s)
        for record in reader.finish():
            yield TimedRecord(record)


@dataclass(frozen=True)
class LogRecords:
    """What a log tells."""

    format: str
    """Name of the format."""
    records: int
    """Data lines understood."""
    observations: tuple[Observation, ...]
    """One per step and segment, in the order of their first line."""


def read_log(path: Path) -> LogRecords | None:
    """Return what a log tells; None where no reader understands a line of it.

    Raises:
        ConfigError: if the file cannot be read.
    """
    found = find_format(path)
    if found is None:
        return None
    stream = LogStream(path, found)
    observations = tuple(stream)
    return LogRecords(found.name, stream.records, observations)


def open_log(path: Path, format: str = AUTO) -> LogStream:  # noqa: A002 - the option's word
    """Return the observations of a log, or of a run's folder.

    Args:
        path: a log file, or a folder that holds a signals.csv.
        format: name of a reader, or `auto`.

    Raises:
        ConfigError: if there is no such format or file, or if no reader understands it.
    """
    if path.is_dir():
        path = path / "signals.csv"
    if not path.exists():
        raise ConfigError(f"{path} must be a log or the folder of a run, but it does not exist.")
    names = [entry.name for entry in READERS]
    if format == AUTO:
        found = find_format(path)
        if found is None:
            raise ConfigError(
                f"{path} must be a training log of a known format, but no reader understands a "
                f"line of it; known are:\n{_listing()}\nGive --format if one of them should fit, "
                "or write the values to a CSV with a header such as step,loss,grad_norm."
            )
    elif format not in names:
        raise ConfigError(
            f"--format must be {AUTO} or one of {', '.join(names)}, but got {format!r}."
        )
    else:
        found = READERS[names.index(format)]
    return LogStream(path, found)


def _listing() -> str:
    return "\n".join(f"  {entry.name}: {entry.description}" for entry in READERS)


def find_format(path: Path) -> LogFormat | None:
    """Return the format of a log; None where no reader understands a line of it.

    Raises:
        ConfigError: if the file cannot be read.
    """
    rivals = [_Rival(entry, entry.start()) for entry in READERS]
    for count, line in enumerate(read_lines(path), start=1):
        for rival in rivals:
            rival.take(rival.reader.feed(line))
        if count % _SAMPLE == 0 and any(rival.records for rival in rivals):
            break
    for rival in rivals:
        rival.take(rival.reader.finish() or None)
    able = [rival for rival in rivals if rival.records]
    return max(able, key=lambda rival: rival.losses).entry if able else None


@dataclass
class _Rival:
    """A reader that tries a log, and what it has found."""

    entry: LogFormat
    reader: LogReader
    losses: int = 0
    records: int = 0

    def take(self, records: Sequence[Record] | None) -> None:
        """Count what a line gave."""
        if records is None:
            return
        self.records += len(records)
        self.losses += sum(record.observation.loss is not None for record in records)
