"""The columns of signals.csv, and how a row is spelled and read.

An empty cell means "not measured"; `nan` and `inf` are values. Floats are written with the fewest
digits that read back to the same number. Unknown columns are kept as text.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mindtune.controller.errors import ConfigError
from mindtune.policies.signals import SIGNAL_NAMES, Observation

__all__ = ["ALIASES", "SignalRow", "format_header", "format_row", "read_rows"]

ALIASES: dict[str, tuple[str, float]] = {
    "lr": ("learning_rate", 1.0),
    "gnorm": ("grad_norm", 1.0),
    "step_time_ms": ("step_time_s", 1e-3),
}
"""Column of other programs -> (our column, factor)."""

_BYTE_ORDER_MARK = "\ufeff"
"""What some programs put in front of UTF-8."""
_KNOWN = frozenset(SIGNAL_NAMES)
_TEXT = frozenset({"phase"})
_WHOLE = frozenset({
    "step", "run", "global_batch_size", "micro_batch_size", "num_microbatches", "tokens",
    "device_memory_used_bytes", "device_memory_total_bytes", "memory_allocated_bytes",
    "straggler_rank",
})  # fmt: skip


_LARGEST = 10**18
"""As of a `Count` in the other files."""


@dataclass(frozen=True)
class SignalRow:
    """One line of signals.csv."""

    observation: Observation
    extra: Mapping[str, str] = field(default_factory=dict)
    """Unknown columns, as they stood."""


def format_header(extra: Sequence[str] = ()) -> str:
    """Return the header line, with extra columns at its end."""
    return _line([*SIGNAL_NAMES, *extra])


def format_row(row: SignalRow, extra: Sequence[str] = ()) -> str:
    """Return one line; columns stand in the order of `format_header`."""
    values = [_spell(getattr(row.observation, name)) for name in SIGNAL_NAMES]
    return _line([*values, *(row.extra.get(name, "") for name in extra)])


def read_rows(lines: Iterable[str], *, source: str) -> Iterator[SignalRow]:
    """Read rows as they come; a cut last line (a killed writer) is passed over.

    Args:
        lines: the file's lines with their line ends, header first.
        source: what to call the file in messages.

    Raises:
        ConfigError: if the header has no `step` column, or a whole line cannot be read.
    """
    iterator = iter(lines)
    header = _cells(next(iterator, "").removeprefix(_BYTE_ORDER_MARK), f"{source}, line 1")
    columns = [ALIASES.get(name.strip(), (name.strip(), 1.0)) for name in header]
    if "step" not in [name for name, _ in columns]:
        raise ConfigError(
            f"{source} must start with a header line that names a `step` column, but got "
            f"{','.join(header) or 'an empty file'}."
        )
    for number, line in enumerate(iterator, start=2):
        cells = _cells(line, f"{source}, line {number}")
        if not cells:
            continue
        complete = line.endswith(("\n", "\r")) and len(cells) == len(columns)
        if not complete and not line.endswith(("\n", "\r")):
            return
        try:
            yield _row(columns, cells)
        except ValueError as error:
            raise ConfigError(f"{source}, line {number}: {error}.") from None


def _cells(line: str, source: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error as error:  # such as a cell of 200 KB
        raise ConfigError(f"{source} must be CSV, but: {error}.") from None


def _row(columns: Sequence[tuple[str, float]], cells: Sequence[str]) -> SignalRow:
    if len(cells) != len(columns):
        raise ValueError(f"must have {len(columns)} cells, but got {len(cells)}")
    known: dict[str, float | int | str | None] = {}
    extra: dict[str, str] = {}
    for (name, factor), cell in zip(columns, cells, strict=True):
        text = cell.strip()
        if name not in _KNOWN:
            extra[name] = text
        elif text:
            known[name] = _read(name, text, factor)
    if known.get("step") is None:
        raise ValueError("step must be a whole number, but it is empty")
    return SignalRow(Observation(**known), extra)  # type: ignore[arg-type]


def _read(name: str, text: str, factor: float) -> float | int | str:
    if name in _TEXT:
        return text
    if name in _WHOLE:
        number = float(text)
        if not number.is_integer():
            raise ValueError(f"{name} must be a whole number, but got {text!r}")
        if abs(number) > _LARGEST:
            raise ValueError(f"{name} must be at most {_LARGEST:.0e}, but got {text!r:.40}")
        return int(text) if text.lstrip("+-").isdigit() else int(number)
    try:
        return float(text) * factor
    except ValueError:
        raise ValueError(f"{name} must be a number, but got {text!r}") from None


def _spell(value: float | str | None) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        return repr(value)
    return str(value)


def _line(cells: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()
