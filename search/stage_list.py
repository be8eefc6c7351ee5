"""Numbers per pipeline stage, one row per model chunk, and their one spelling as text.

A knob's value is a scalar everywhere (YAML, CSV, command line), so the list `[2, 1, 0, 1]` is
spelled `2/1/0/1`, and a list with one row per chunk `[[1, 1], [0, 1]]` is spelled `1/1+0/1`.
Both list forms are MindFormers' own (`recompute_config.recompute`, `model_config.offset`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["StageList", "column_sums", "parse_stage_list", "plain_list", "stage_list_text"]

StageList = tuple[tuple[int, ...], ...]
"""Chunk -> stage -> number; all rows are equally long."""

_ROW = r"-?[0-9]+(?:/-?[0-9]+)*"
_TEXT = re.compile(rf"{_ROW}(?:\+{_ROW})*")


def parse_stage_list(value: object) -> StageList:
    """Return the rows of a list, of a list of lists, or of their spelling as text.

    Raises:
        ValueError: with the rule, if it is none of them, or the rows differ in length.
    """
    if isinstance(value, str):
        text = value.strip()
        if not _TEXT.fullmatch(text):
            raise ValueError("must be whole numbers per stage such as 2/1/0/1")
        rows = [[int(number) for number in row.split("/")] for row in text.split("+")]
    elif isinstance(value, Sequence) and value:
        is_nested = all(isinstance(row, Sequence) and not isinstance(row, str) for row in value)
        rows = [list(row) for row in value] if is_nested else [list(value)]
    else:
        raise ValueError("must be a list with one whole number per stage")
    whole = all(isinstance(n, int) and not isinstance(n, bool) for row in rows for n in row)
    if not whole or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ValueError("must hold one whole number per stage, in rows of one length")
    return tuple(tuple(row) for row in rows)


def stage_list_text(rows: StageList) -> str:
    """Return the canonical spelling."""
    return "+".join("/".join(map(str, row)) for row in rows)


def plain_list(rows: StageList) -> list[int] | list[list[int]]:
    """Return the rows as YAML and MindFormers have them: one row as a flat list."""
    return list(rows[0]) if len(rows) == 1 else [list(row) for row in rows]


def column_sums(rows: StageList) -> tuple[int, ...]:
    """Return the sum of each stage over its chunks."""
    return tuple(sum(column) for column in zip(*rows, strict=True))
