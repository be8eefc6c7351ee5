"""The rows of the experiment: one line of `rows.jsonl` per search that ended.

The file is append-only. A row is written as soon as its search has ended, so that the experiment
may be stopped at any time and goes on where it was. Rows of several revisions of the code may
stand in one file; `newest` keeps those that no later ones replace.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from mindtune.controller.contract import Document
from mindtune.experiments.provenance import Provenance
from mindtune.experiments.row_file import append_row, read_keyed_rows

__all__ = ["RowKey", "SearchRow", "append_row", "newest", "read_rows"]

RowKey = tuple[str, str, int, int | None, str]
"""Problem, method, seed, trials, revision of the code."""


class SearchRow(Document):
    """What one search of one problem, method and seed came to."""

    FILE: ClassVar[str] = "rows.jsonl"

    problem: str
    method: str
    seed: int = Field(ge=0)
    trials: int | None = Field(default=None, ge=1)
    """The most that the search might take; null: not said, in rows of old files."""
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
        return (self.problem, self.method, self.seed, self.trials, self.measured.revision)

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


def newest(rows: Iterable[SearchRow]) -> list[SearchRow]:
    """Return the rows that are of the same code and trials as the last of problem and method."""
    known = list(rows)
    kept = {(row.problem, row.method): row.key[-2:] for row in known}
    return [row for row in known if kept[row.problem, row.method] == row.key[-2:]]


def read_rows(path: Path) -> dict[RowKey, SearchRow]:
    """Return the rows of a file by key; see `read_keyed_rows`."""
    return read_keyed_rows(path, SearchRow, lambda row: row.key)
