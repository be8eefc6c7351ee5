"""The rows of the experiment: one line of `rows.jsonl` per search that ended.

The file is append-only. A row is written as soon as its search has ended, so that the experiment
may be stopped at any time and goes on where it was.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from mindtune.controller.contract import Document, parse
from mindtune.controller.errors import ConfigError
from mindtune.controller.records.append_file import open_append
from mindtune.experiments.provenance import Provenance

__all__ = ["RowKey", "SearchRow", "append_row", "read_rows"]

RowKey = tuple[str, str, int]
"""Problem, method, seed."""


class SearchRow(Document):
    """What one search of one problem, method and seed came to."""

    FILE: ClassVar[str] = "rows.jsonl"

    problem: str
    method: str
    seed: int = Field(ge=0)
    configs: int = Field(ge=1)
    """Of the space."""
    feasible: int = Field(ge=1)
    """That the rules let pass before any trial."""
    accepted_failures: int = Field(ge=0)
    """Of those, configs that cannot run."""
    rejected_runnable: int = Field(ge=0)
    """Of the others, configs that could run."""
    regrets: tuple[float, ...]
    """After each trial: how far the search, if it ended there, would be below the best of the
    space, as a share of it; 1 while nothing has run. What it has found is the best true value of
    its leaders: as many of the best measured configs as a study of that length confirms by
    repeats (one to three)."""
    outcomes: tuple[str, ...]
    """Of each trial."""
    ask_s: float = Field(ge=0)
    """Median time to propose a config, rules and calibration included."""
    wall_s: float = Field(ge=0)
    """That the trials would have taken."""
    measured: Provenance

    @property
    def key(self) -> RowKey:
        """What no two rows of one file share."""
        return (self.problem, self.method, self.seed)

    def regret_after(self, trials: int) -> float:
        """Return the regret after so many trials, or after the last one."""
        return self.regrets[min(trials, len(self.regrets)) - 1]

    def trials_to(self, regret: float) -> int | None:
        """Return after how many trials the regret was that low for the first time; None: never.

        It may rise again: a config that luck measured too well takes a leader's place.
        """
        numbers = (n for n, one in enumerate(self.regrets, start=1) if one <= regret)
        return next(numbers, None)

    def failures(self, trials: int) -> int:
        """Return how many of the first trials did not end ok."""
        return sum(outcome != "ok" for outcome in self.outcomes[:trials])


def append_row(path: Path, row: SearchRow) -> None:
    """Append one row; it is in the file when this returns.

    Raises:
        ConfigError: The file cannot be written.
    """
    with open_append(path) as file:
        file.write(row.to_json(indent=None) + "\n")


def read_rows(path: Path) -> dict[RowKey, SearchRow]:
    """Return the rows of a file in their order; none where there is no file.

    A cut last line, which a killed writer left, is passed over.

    Raises:
        ConfigError: A whole line is no row, or two rows have one key.
    """
    rows: dict[RowKey, SearchRow] = {}
    if not path.exists():
        return rows
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break
            row = _row(line, source=f"{path}, line {number}")
            if row.key in rows:
                raise ConfigError(
                    f"{path}, line {number}: {row.key} must stand once, but it is there before; "
                    "remove one of the two lines."
                )
            rows[row.key] = row
    return rows


def _row(line: str, *, source: str) -> SearchRow:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} must be JSON, but: {error.msg}.") from None
    return parse(SearchRow, content, source=source)
