"""Tables with a header line: our own signals.csv, and CSV of other programs.

Any subset of columns in any order; names of other programs are understood where they are known
(`num_updates`, `lr`, `gnorm`, `step_time_ms`, ...). An empty cell is "not measured"; a line that
cannot be read is passed over, as a killed writer leaves one.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from typing import NamedTuple

from mindtune.controller.contract.signal_table import ALIASES
from mindtune.controller.records.log_readers import fields
from mindtune.controller.records.log_readers.numerals import COMMA_NUMBER, Commas
from mindtune.controller.records.log_readers.reader import (
    LogFormat,
    LogReader,
    Record,
    is_whole,
    observed,
)
from mindtune.policies.signals import SIGNAL_NAMES

__all__ = ["CSV_TABLE", "SIGNALS_TABLE"]

_OWN_SEPARATOR = ","
_SEPARATORS = (_OWN_SEPARATOR, "\t", ";")
_EVENT = "event"
_OVERFLOW_EVENT = "overflow"
_BOOKKEEPING = frozenset({"wall_time_s", "phase", "run"})
"""Columns that our own writer always writes, and nobody else."""
_HEADER_LINES = 20
"""Lines in which a header is looked for: comments may come first."""
_DECIMAL = re.compile(r"[-+]?\d+,\d+")
"""Where a semicolon separates the cells, a comma is the point."""
_COMMAS = re.compile(COMMA_NUMBER)
_QUOTE = '"'
_LONGEST = 1 << 15
"""Characters of a row that is read in the short way."""


class _Cell(NamedTuple):
    """What one column tells."""

    column: int
    signal: str
    factor: float
    is_count: bool


class _Reader:
    def __init__(self, names: fields.Names, *, own: bool) -> None:
        self._names = names
        self._commas = Commas()
        self._own = own
        self._separator = ","
        self._columns: list[str] | None = None
        self._cells: list[_Cell] = []
        self._step_index = self._phase_index = -1
        self._step_column = ""
        self._is_ours = False
        self._last = 0
        self._lines = 0

    def feed(self, line: str) -> Sequence[Record] | None:
        if self._columns is None:
            self._lines += 1
            if self._lines <= _HEADER_LINES:
                self._read_header(line)
            return None
        if self._is_ours and not line.endswith("\n"):
            return None  # a killed writer's, cut perhaps inside a number
        if self._cells and _QUOTE not in line and len(line) < _LONGEST:
            record = self._plain_row(line, len(self._columns))
            if record is not None:
                return [record]
        cells = _cells(line, self._separator)
        if len(cells) != len(self._columns):
            return None
        row = {name: cell.strip() for name, cell in zip(self._columns, cells, strict=True)}
        if row[self._columns[0]] == self._columns[0]:
            return None  # the header again, of an appended table
        return self._record(row, line)

    def _read_header(self, line: str) -> None:
        for separator in _SEPARATORS:
            names = [name.strip() for name in _cells(line.lstrip("# "), separator)]
            normal = [fields.normal(name) for name in names]
            counts = (*self._names.steps, *fields.EPOCH_NAMES)
            step = next((name for name in counts if name in normal), None)
            if step is None or len(names) < 2 or not self._names_signals(names):
                continue
            known = separator == _OWN_SEPARATOR and all(
                name in SIGNAL_NAMES or name in ALIASES for name in names
            )
            if known == self._own:
                self._separator, self._columns = separator, names
                self._step_column = names[normal.index(step)]
                self._is_ours = set(names) >= _BOOKKEEPING
                if self._own:
                    self._cells = _meanings(names, self._names)
                    self._step_index = names.index(self._step_column)
                    self._phase_index = names.index("phase") if "phase" in names else -1
            return

    def _record(self, row: dict[str, str], line: str) -> Sequence[Record] | None:
        if not self._own and any("," in cell for cell in row.values()):
            self._commas.note(line)
            row = {name: self._plain(cell) for name, cell in row.items()}
        signals = self._names.collect((name, cell) for name, cell in row.items() if cell)
        step = fields.read_value(row[self._step_column])
        overflows = row.get(_EVENT) == _OVERFLOW_EVENT
        if overflows:
            signals.update({"overflow": 1.0, "update_skipped": 1.0})
        if step is None and overflows:
            # An attempt that made no step: it follows the one before.
            step = (self._last + 1.0, "")
        if step is None or not is_whole(step[0]):
            return None
        if not self._own and not self._names.tells(signals):
            return None
        self._last = int(step[0])
        return [Record(fields.make(self._last, signals, phase=row.get("phase") or None))]

    def _plain_row(self, line: str, columns: int) -> Record | None:
        """Return a row of bare numbers; None: there is more in it, and it is read with care."""
        texts = line.rstrip("\r\n").split(_OWN_SEPARATOR)
        if len(texts) != columns or "_" in line or not line.isascii():
            return None
        signals: dict[str, float] = {}
        try:
            step = float(texts[self._step_index])
            for index, signal, factor, is_count in self._cells:
                text = texts[index]
                if not text:
                    continue
                value = float(text) * factor
                if not is_count:
                    signals[signal] = value
                elif is_whole(value):
                    signals[signal] = int(value)
        except ValueError:
            return None
        if not is_whole(step):
            return None
        if signals.get("mfu") != signals.get("mfu"):  # NaN
            del signals["mfu"]
        phase = texts[self._phase_index].strip() if self._phase_index >= 0 else ""
        self._last = int(step)
        return Record(observed(step=self._last, phase=phase or None, **signals))

    def _plain(self, cell: str) -> str:
        """Return a cell without the commas of its number; a list stands for its first."""
        if self._separator == ";" and _DECIMAL.fullmatch(cell):
            return cell.replace(",", ".")
        return (self._commas.plain(cell) or "") if _COMMAS.fullmatch(cell) else cell

    def _names_signals(self, names: Sequence[str]) -> bool:
        return self._names.tells(self._names.collect((name, 0.0) for name in names))

    def finish(self) -> Sequence[Record]:
        return []


def _meanings(columns: Sequence[str], names: fields.Names) -> list[_Cell]:
    """Return what the columns tell; nothing, where two of them tell of one signal."""
    cells = []
    for index, column in enumerate(columns):
        meaning = names.meaning(column)
        if meaning is not None:
            signal, factor = meaning
            cells.append(_Cell(index, signal, factor, signal in fields.COUNTS))
    unique = len({cell.signal for cell in cells}) == len(cells)
    return cells if unique else []


def _cells(line: str, separator: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error:  # such as a cell of 200 KB
        return []


def _start_own() -> LogReader:
    return _Reader(fields.KNOWN, own=True)


def _start(names: fields.Names = fields.KNOWN) -> LogReader:
    return _Reader(names, own=False)


SIGNALS_TABLE = LogFormat(
    "mindtune", "signals.csv of mindtune, or the folder of a run", _start_own, begins_anew=True
)
CSV_TABLE = LogFormat(
    "csv", "a table with a header line that names a step", _start, mapped=_start,
    begins_anew=True,
)  # fmt: skip
