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

from mindtune.controller.contract import ContractModel, Count, Document
from mindtune.experiments.provenance import Provenance
from mindtune.experiments.row_file import append_row, read_keyed_rows

__all__ = ["FILL", "RowKey", "SearchRow", "SpaceFacts", "append_row", "newest", "read_rows"]

RowKey = tuple[str, str, int, int, str]
"""Problem, method, seed, trials, revision of the code."""
FILL = "degrees_fill_cluster"
"""The rule that is asked first. Which configs it rejects follows from what the user lists for the
degrees, so that a longer list looks like more work done."""


class SpaceFacts(ContractModel):
    """What is true of a problem, whoever searches it. Counts are of configs."""

    configs: int = Field(ge=1)
    """Of the space."""
    rejected: dict[str, Count]
    """Rule -> configs that fail it and none before it; the rules that reject any."""
    rejected_runnable: dict[str, Count]
    """Rule -> those of them that could run after all."""
    feasible: int = Field(ge=1)
    """That the rules let pass before any trial."""
    accepted_refused: Count
    """Of those, configs that the program does not even start."""
    accepted_failures: Count
    """Of those, configs that start and fail."""
    refused: Count
    """Layouts that fill the cluster and that the program does not start."""
    failing: Count
    """Layouts that fill the cluster, start and fail."""
    failing_for_memory: Count
    """Those of them that fail for memory; the others' cause is not known."""
    accepted_for_memory: Count
    """Those of them that the rules let pass."""
    best: float = Field(gt=0)
    """Largest true value of all, configs that the rules reject included."""
    best_feasible: float = Field(gt=0)
    """Largest true value of those that the rules let pass."""

    @property
    def filling(self) -> int:
        """Layouts that use every device."""
        return self.configs - self.rejected.get(FILL, 0)

    @property
    def rejected_filling(self) -> float:
        """Share of them that some rule rejects."""
        return 1.0 - self.feasible / self.filling

    @property
    def rejected_for_memory(self) -> float:
        """Share of them that only its predicted memory rejects."""
        return self.rejected.get("memory", 0) / self.filling

    @property
    def runnable(self) -> int:
        """Layouts that fill the cluster and run."""
        return self.filling - self.refused - self.failing

    @property
    def accepted_that_cannot_run(self) -> float:
        """Share of the accepted configs that cannot run."""
        return (self.accepted_refused + self.accepted_failures) / self.feasible

    @property
    def failures_accepted(self) -> float:
        """Share of the configs that fail for memory which were accepted; 0 where none fails."""
        return self.accepted_for_memory / max(self.failing_for_memory, 1)

    @property
    def rejected_that_can_run(self) -> float:
        """Share of the rejected layouts that could run; 0 where none is rejected."""
        return sum(self.rejected_runnable.values()) / max(self.filling - self.feasible, 1)

    @property
    def runnable_rejected(self) -> float:
        """Share of the layouts that could run which were rejected."""
        return sum(self.rejected_runnable.values()) / max(self.runnable, 1)

    @property
    def lost(self) -> float:
        """By how much the best accepted config lies below the best of all, as a share of it."""
        return 1.0 - self.best_feasible / self.best


class SearchRow(Document):
    """What one search of one problem, method and seed came to."""

    FILE: ClassVar[str] = "rows.jsonl"

    problem: str
    method: str
    seed: int = Field(ge=0)
    trials: int = Field(ge=1)
    """The most that the search might take."""
    space: SpaceFacts
    regrets: tuple[float, ...]
    """After each trial that ended: how far the winner of a study that ended there would be below
    the best of the space, as a share of it; 1 while there is none."""
    leader_regrets: tuple[float, ...]
    """The same for the best of the configs that such a study confirms: what a confirmation without
    noise would find."""
    outcomes: tuple[str, ...]
    """Of each trial, in the order of their ends."""
    own_s: float = Field(ge=0)
    """Median time of the method's own for a trial: to propose it and to take its result in, rules,
    calibration and model included."""
    slowest_own_s: float = Field(ge=0)
    """The longest of them; the first one has besides what is prepared once."""
    wall_s: float = Field(ge=0)
    """From the first start to the last end, confirmation not counted, in the problem's time."""
    measured: Provenance

    @property
    def key(self) -> RowKey:
        """What no two rows of one file share."""
        return (self.problem, self.method, self.seed, self.trials, self.measured.revision)

    def regret_after(self, trials: int) -> float:
        """Return the regret after so many trials, or after the last one."""
        return self.regrets[min(trials, len(self.regrets)) - 1]

    def leader_regret_after(self, trials: int) -> float:
        """Return the same without the confirmation's noise."""
        return self.leader_regrets[min(trials, len(self.leader_regrets)) - 1]

    def trials_to(self, regret: float) -> int | None:
        """Return after how many trials the regret was that low for the first time; None: never.

        It may rise again: a config that luck measured too well takes a leader's place.
        """
        numbers = (n for n, one in enumerate(self.regrets, start=1) if one <= regret)
        return next(numbers, None)

    def failures(self, trials: int) -> int:
        """Return how many of the first trials ended without a value of their own."""
        return sum(outcome not in ("ok", "pruned") for outcome in self.outcomes[:trials])


def newest(rows: Iterable[SearchRow]) -> list[SearchRow]:
    """Return the rows that are of the same code and trials as the last of problem and method."""
    known = list(rows)
    kept = {(row.problem, row.method): row.key[-2:] for row in known}
    return [row for row in known if kept[row.problem, row.method] == row.key[-2:]]


def read_rows(path: Path) -> dict[RowKey, SearchRow]:
    """Return the rows of a file by key; see `read_keyed_rows`."""
    return read_keyed_rows(path, SearchRow, lambda row: row.key)
