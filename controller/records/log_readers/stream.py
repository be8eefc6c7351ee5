"""The observations of a log, as they are asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindtune.controller.records.log_readers import fields
from mindtune.controller.records.log_readers.detect import Detection
from mindtune.controller.records.log_readers.endings import Failure, ended_by, failure_in
from mindtune.controller.records.log_readers.fields import Names
from mindtune.controller.records.log_readers.lines import read_lines, timestamp
from mindtune.controller.records.log_readers.merge import TimedRecord, merge_records
from mindtune.controller.records.log_readers.reader import CUT, LogFormat, Part
from mindtune.controller.records.log_readers.wrapping import unwrap
from mindtune.policies.signals import Observation

__all__ = ["LogStream"]

_SPEAKS = re.compile(r"\bloss\w{0,20}(?: is)?\W{1,6}[-+]?\d", re.IGNORECASE)
"""A line that looks as if it told a loss."""
_LOOKED_AT = 400
"""Characters of a line in which a loss is looked for."""
_SHOWN = 100
"""Characters shown of a line that was not understood."""


class LogStream:
    """A log of one process, in one file or in several that follow each other.

    Args:
        paths: the files, in the order of time.
        format: their format.
        detection: how sure the format is; None: the user gave it.
        names: the user's own names for signals.
        kept: what must not be closed before the log is read.
    """

    def __init__(
        self,
        paths: Path | Sequence[Path],
        format: LogFormat,  # noqa: A002 - its own word
        *,
        detection: Detection | None = None,
        names: Names | None = None,
        kept: object = None,
    ) -> None:
        self.paths = (paths,) if isinstance(paths, Path) else tuple(paths)
        self.path = self.paths[0]
        self.format = format
        self.detection = detection
        self.records = 0
        """Data lines understood so far."""
        self.lines = 0
        """Lines read so far."""
        self.is_cut = False
        """Whether a compressed log broke off: it is still being written, or damaged."""
        self.not_understood = 0
        """Lines so far that look as if they told a loss, and were not understood."""
        self.failure: Failure | None = None
        """How the program failed, as the lines after the last step say; None: they do not."""
        self._last_step: int | None = None
        self._first_of_these = ""
        self._open_end = False
        self._names = names
        self._kept = kept

    def __iter__(self) -> Iterator[Observation]:
        """Yield one observation per step.

        Raises:
            ConfigError: if the file cannot be read.
        """
        return merge_records(self.timed_records(), lag=self.format.lag)

    def timed_records(self) -> Iterator[TimedRecord]:
        """Yield what the lines tell, before it is put together by steps.

        Raises:
            ConfigError: if a file cannot be read.
        """
        if self.format.events is not None:
            names = self._names or fields.KNOWN
            for path in self.paths:
                for record, event_s in self.format.events(path, names):
                    self.records += 1
                    yield TimedRecord(record, event_s)
            return
        reader = self.format.reader(self._names)
        by_line = self.format.by_line
        writer: int | None = None
        last: int | None = None
        for index, path in enumerate(self.paths):
            if index and self.format.begins_anew:
                reader = self.format.reader(self._names)
            for line in read_lines(path, on_damage=self._cut):
                self.lines += 1
                text, rank, stamp = unwrap(line)
                writer = writer if rank is None else rank  # a wrapped line names it once
                is_open = by_line and not line.endswith("\n")
                records = reader.feed(text + CUT if is_open else text)
                if records is None:
                    ending = None if last is None or not by_line else ended_by(text, last)
                    if ending is not None:
                        yield TimedRecord(ending, None, writer)
                    elif by_line and "oss" in text and _SPEAKS.search(text, 0, _LOOKED_AT):
                        self._miss(text)
                    if by_line:
                        self.failure = failure_in(text, self.failure)
                    continue
                self._open_end = is_open
                if not isinstance(records, Part):
                    self.records += 1 if by_line else len(records)
                if records:
                    written_s = timestamp(stamp) if by_line else None
                    last = self._last_step = records[-1].observation.step
                    self.failure = None
                    for record in records:
                        yield TimedRecord(record, written_s, writer)
            if self.format.begins_anew or path is self.paths[-1]:
                for record in reader.finish():
                    yield TimedRecord(record)

    def _cut(self) -> None:
        self.is_cut = True

    def _miss(self, text: str) -> None:
        if not self.not_understood:
            self._first_of_these = f"line {self.lines}: {text.strip()[:_SHOWN]!r}"
        self.not_understood += 1

    def notes(self) -> list[str]:
        """Say how the log was read, and what of it was not; complete after the last step."""
        told = [] if self.detection is None else [self.detection.describe()]
        if self.failure is not None:
            told.append(
                f"the log ends after step {self._last_step} with {self.failure.text!r}; the "
                "verdict is of the training until then."
            )
        if self.not_understood:
            told.append(
                f"{self.not_understood} of {self.lines} lines look as if they told a loss and "
                f"were not understood, first {self._first_of_these}."
            )
        if self._open_end:
            told.append("the last line has no end: a number that it breaks off in was not taken.")
        return told
