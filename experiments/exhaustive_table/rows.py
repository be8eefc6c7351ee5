"""The table: one line of CSV per measurement, appended when it is made.

A killed recorder leaves at most one line without its end, which is no row. A row says what it
depends on, so that rows which are not comparable are never mixed.
"""

from __future__ import annotations

import csv
import io
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindtune.controller.errors import ConfigError
from mindtune.controller.records.append_file import open_append
from mindtune.search.errors import SearchError
from mindtune.search.knobs import Config, canonical, knob_text

__all__ = ["MOST_OTHER_WORK", "Row", "append_row", "comparable", "read_rows", "relative_spread"]

MOST_OTHER_WORK = 0.1
"""Share of the machine that other programs may take during a measurement that counts."""

_BEFORE = ("number", "repeat")
_AFTER = (
    "outcome", "value", "mfu", "stability", "median_step_time_s", "step_time_spread",
    "step_times_s", "bad_steps", "peak_memory_bytes", "final_loss", "wall_s", "others_share",
    "peak_flops", "identity", "processor", "cores", "mindspore", "revision", "date", "message",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement of a config; None: not measured."""

    number: int
    """Of the config in the table."""
    repeat: int
    config: Config
    outcome: str
    value: float | None = None
    mfu: float | None = None
    stability: float | None = None
    step_times_s: tuple[float, ...] = ()
    """Of each measured step."""
    bad_steps: int = 0
    """Measured steps that were non-finite, skipped or loss-spiking."""
    peak_memory_bytes: int | None = None
    final_loss: float | None = None
    wall_s: float = 0.0
    others_share: float = 0.0
    """Share of the machine that other programs took meanwhile."""
    peak_flops: float | None = None
    """Of a device, which MFU is taken of."""
    identity: str
    """Hash of study, program and installed versions: equal for rows that are comparable."""
    processor: str
    cores: float
    mindspore: str
    revision: str
    date: str
    message: str = ""

    @property
    def conditions(self) -> tuple[str, str, float]:
        """What must be equal for rows to be comparable."""
        return self.identity, self.processor, self.cores

    def cells(self) -> list[str]:
        """Return the row as text, in the order of the header."""
        median = _median(self.step_times_s)
        found: dict[str, object] = {
            **{name: getattr(self, name) for name in (*_BEFORE, *_AFTER) if hasattr(self, name)},
            "median_step_time_s": median,
            "step_time_spread": relative_spread(self.step_times_s),
            "step_times_s": " ".join(f"{seconds:.6g}" for seconds in self.step_times_s),
        }
        knobs = [knob_text(value) for value in self.config.values()]
        return [_text(found[name]) for name in _BEFORE] + knobs + [
            _text(found[name]) for name in _AFTER
        ]  # fmt: skip


def relative_spread(step_times_s: Sequence[float]) -> float | None:
    """Return the interquartile range of step times over their median; None for fewer than two."""
    if len(step_times_s) < 2:
        return None
    ordered = sorted(step_times_s)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / (_median(ordered) or math.inf)


def append_row(path: Path, row: Row) -> None:
    """Append a row, on disk when this returns; the file is made with its header.

    Raises:
        ConfigError: if the file cannot be written, or its header is another one.
    """
    header = [*_BEFORE, *row.config, *_AFTER]
    with open_append(path) as file:
        if file.tell() == 0:
            file.write(_line(header))
        elif _header(path) != header:
            raise ConfigError(
                f"{path} has other columns than this study's table; give another folder."
            )
        file.write(_line(row.cells()))
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a table, without a last line that has no end; empty: no file.

    Raises:
        ConfigError: if the file is no such table.
    """
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be a readable text file, but: {error}.") from None
    whole = text[: text.rfind("\n") + 1]
    table = csv.DictReader(io.StringIO(whole), strict=True)
    try:
        names = set(table.fieldnames or ())
        if names and not names >= {*_BEFORE, *_AFTER}:
            raise ConfigError(f"{path} must be a table of this experiment, but has other columns.")
        return [_row(cells) for cells in table]
    except (csv.Error, ValueError, TypeError, SearchError) as error:
        raise ConfigError(f"{path}, line {table.line_num} is no row: {error}") from None


def comparable(rows: Iterable[Row], *, most_other_work: float = MOST_OTHER_WORK) -> list[Row]:
    """Return the rows that count and were measured as the last of them; of equal ones the later.

    Args:
        rows: Of a table, in the order in which they were measured.
        most_other_work: Share of the machine that other programs may have taken meanwhile.
    """
    found = [row for row in rows if row.others_share <= most_other_work]
    latest = {
        (row.number, row.repeat): row for row in found if row.conditions == found[-1].conditions
    }
    return list(latest.values())


def _row(cells: dict[Any, Any]) -> Row:
    if None in cells or None in cells.values():
        raise ValueError("it has not as many cells as the header")
    knobs = [name for name in cells if name not in (*_BEFORE, *_AFTER)]
    return Row(
        number=int(cells["number"]),
        repeat=int(cells["repeat"]),
        config={name: canonical(name, cells[name]) for name in knobs},
        outcome=cells["outcome"],
        value=_number(cells["value"]),
        mfu=_number(cells["mfu"]),
        stability=_number(cells["stability"]),
        step_times_s=tuple(map(float, cells["step_times_s"].split())),
        bad_steps=int(cells["bad_steps"]),
        peak_memory_bytes=None
        if cells["peak_memory_bytes"] == ""
        else int(cells["peak_memory_bytes"]),
        final_loss=_number(cells["final_loss"]),
        wall_s=float(cells["wall_s"]),
        others_share=float(cells["others_share"]),
        peak_flops=_number(cells["peak_flops"]),
        identity=cells["identity"],
        processor=cells["processor"],
        cores=float(cells["cores"]),
        mindspore=cells["mindspore"],
        revision=cells["revision"],
        date=cells["date"],
        message=cells["message"],
    )


def _number(text: str) -> float | None:
    return None if text == "" else float(text)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _header(path: Path) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file))


def _line(cells: Sequence[str]) -> str:
    line = io.StringIO()
    # One row, one line: a line break in a message would make two of them.
    csv.writer(line, lineterminator="\n").writerow([" ".join(cell.split()) for cell in cells])
    return line.getvalue()
