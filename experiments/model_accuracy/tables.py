"""Reads a folder of published tables."""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from mindtune.experiments.model_accuracy.mapping import Device, Row, UnmappedError, map_row

__all__ = ["Tables", "TablesError", "read_tables"]

_NO_RUNS = ("manifest.csv", "ranking_groups.csv", "device_peaks.csv")
_NEEDED = {"table", "framework", "layers", "hidden", "device", "n_devices", "status"}
"""Columns by which a table of runs is known; any other that is missing states nothing."""


class TablesError(Exception):
    """A folder that holds no tables, or a file that is none; the message says what is wrong."""


@dataclass(frozen=True)
class Tables:
    """All rows that could be mapped, and what the others lacked."""

    rows: tuple[Row, ...]
    unmapped: Counter[tuple[str, str]]
    """(file, reason) -> rows."""
    skipped: tuple[str, ...]
    """Files without the columns of a table of runs."""


def read_tables(folder: Path) -> Tables:
    """Return the rows of every CSV of the folder, file by file in the order of their names.

    Raises:
        TablesError: if the folder has no table of runs, or no `device_peaks.csv`, or if one of
            its files cannot be read.
    """
    if not (folder / "device_peaks.csv").is_file():
        raise TablesError(f"{folder} must hold device_peaks.csv, the devices' speed and memory")
    devices = _devices(folder / "device_peaks.csv")
    rows: list[Row] = []
    unmapped: Counter[tuple[str, str]] = Counter()
    skipped = []
    for path in sorted(folder.glob("*.csv")):
        if path.name in _NO_RUNS:
            continue
        names, lines = _lines(path)
        if not names >= _NEEDED:
            skipped.append(path.name)
            continue
        for number, cells in enumerate(lines, start=1):
            mapped = _mapped(cells, path.name, number, devices)
            if isinstance(mapped, Row):
                rows.append(mapped)
            else:
                unmapped[path.name, mapped] += 1
    if not rows:
        raise TablesError(f"no CSV of {folder} holds a run that says enough to be predicted")
    return Tables(tuple(rows), unmapped, tuple(skipped))


def _lines(path: Path) -> tuple[set[str], list[dict[str, str]]]:
    """Return the columns of a file and its rows; a cell that is missing is empty.

    Raises:
        TablesError: if it is no text, or no CSV.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, restval="")
            return set(reader.fieldnames or ()), [defaultdict(str, cells) for cells in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise TablesError(f"{path} must be a CSV file in UTF-8, but: {error}") from None


def _mapped(
    cells: dict[str, str], file: str, number: int, devices: dict[str, Device]
) -> Row | str:
    """Return the row, or why there is none."""
    try:
        return map_row(cells, file, number, devices)
    except UnmappedError as error:
        return str(error)


def _devices(path: Path) -> dict[str, Device]:
    return {cells["device"]: _device(cells, path) for cells in _lines(path)[1]}


def _device(cells: dict[str, str], path: Path) -> Device:
    peak, peak_fp8 = cells["peak_bf16_fp16_dense_tflops"], cells["peak_fp8_dense_tflops"]
    try:
        return Device(
            peak=float(peak) * 1e12,
            peak_fp8=float(peak_fp8) * 1e12 if peak_fp8 else None,
            memory=float(cells["memory_gb"]) * 2.0**30,
            intra=_rate(cells["intra_node_gb_s_per_dev_one_way"], r"([0-9.]+) aggregate"),
            inter=_rate(cells["inter_node_gb_s_per_dev_one_way"], None),
        )
    except ValueError as error:
        raise TablesError(
            f"{path} must state peak and memory of {cells['device']!r} as numbers, but: {error}"
        ) from None


def _rate(text: str, preferred: str | None) -> float | None:
    """Return bytes per second: the preferred number of a cell, its quotient, or its first one."""
    found = re.search(preferred, text) if preferred else None
    found = found or re.search(r"([0-9.]+)(?:/([0-9.]+))?", text)
    if found is None:
        return None
    divisor = float(found[2]) if found.re.groups > 1 and found[2] else 1.0
    return float(found[1]) / divisor * 1e9
