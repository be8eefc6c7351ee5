"""Writing and reading signals.csv."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mindtune.controller.contract import (
    SignalRow,
    format_header,
    format_row,
    read_rows,
    refuse_pipe,
    write_atomic,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.records.append_file import cut_partial_line, open_append
from mindtune.policies.signals import Observation

__all__ = ["SignalWriter", "iterate_signals", "read_signals"]


class SignalWriter:
    """Appends rows to signals.csv; one process, the one of rank 0, writes.

    A file that is there already is continued as the next segment (column `run`). Rows reach the
    file at once on an alarm, and otherwise within `flush_every_s` or `flush_every_rows`, looked at
    when a row comes; the first row is written at once, as a sign of life.

    Args:
        path: The file.
        extra: Further columns, kept as text.
        flush_every_s: Longest time that rows stay in memory while rows come.
        flush_every_rows: Most rows that stay in memory.
        clock: Monotonic time in seconds.

    Raises:
        ConfigError: The file cannot be written, or is no signal table.
    """

    def __init__(
        self,
        path: Path,
        *,
        extra: Sequence[str] = (),
        flush_every_s: float = 1.0,
        flush_every_rows: int = 50,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flush_every_s = flush_every_s
        self._flush_every_rows = flush_every_rows
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting = 0
        self._flushed_s: float | None = None
        self.run, self._extra = _continue_table(path, tuple(extra))
        self._file = open_append(path)
        if self._file.tell() == 0:
            self._file.write(format_header(self._extra))
            self._file.flush()

    def write(
        self,
        observation: Observation,
        *,
        extra: Mapping[str, str] | None = None,
        alarm: bool = False,
    ) -> None:
        """Append one row; its `run` is this writer's segment."""
        row = SignalRow(replace(observation, run=self.run), extra or {})
        line = format_row(row, self._extra)
        with self._lock:
            self._file.write(line)
            self._waiting += 1
            now_s = self._clock()
            due = self._flushed_s is None or now_s - self._flushed_s >= self._flush_every_s
            if alarm or due or self._waiting >= self._flush_every_rows:
                self._flush(now_s)

    def flush(self) -> None:
        """Hand all rows to the operating system."""
        with self._lock:
            if not self._file.closed:
                self._flush(self._clock())

    def close(self) -> None:
        """Write what waits and close; harmless when called twice."""
        with self._lock:
            self._file.close()

    def _flush(self, now_s: float) -> None:
        self._file.flush()
        self._waiting = 0
        self._flushed_s = now_s


def read_signals(path: Path) -> list[SignalRow]:
    """Read a signal table at once; see `iterate_signals`."""
    return list(iterate_signals(path))


def iterate_signals(path: Path) -> Iterator[SignalRow]:
    """Read a signal table row by row; a cut last line is passed over.

    Raises:
        ConfigError: it is missing, unreadable or no signal table.
    """
    refuse_pipe(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from read_rows(file, source=str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} must exist, but there is no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be a readable text file, but: {error}.") from None


def _continue_table(path: Path, extra: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """Make an existing table ready for our columns; return the next segment and all extras."""
    if not path.exists() or path.stat().st_size == 0:
        return 0, extra
    cut_partial_line(path)
    if path.stat().st_size == 0:
        return 0, extra
    rows = read_signals(path)
    known = tuple(rows[0].extra) if rows else ()
    columns = tuple(dict.fromkeys([*known, *extra]))
    with path.open(encoding="utf-8", newline="") as file:
        header = file.readline()
    if header != format_header(columns):
        # Another program's columns, or an older version's: the same rows under our header.
        text = format_header(columns) + "".join(format_row(row, columns) for row in rows)
        write_atomic(path, text)
    segments = [row.observation.run or 0 for row in rows]
    return (max(segments) + 1 if segments else 0), columns
