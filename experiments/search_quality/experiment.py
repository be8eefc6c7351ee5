"""One search of one problem, from the base config to the last trial."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace

from mindtune.experiments.provenance import Provenance
from mindtune.experiments.search_quality.methods import METHODS
from mindtune.experiments.search_quality.problem import Problem
from mindtune.experiments.search_quality.rows import SearchRow
from mindtune.search.constraints import SpaceReport
from mindtune.search.knobs import Config

__all__ = ["best_value", "search"]


def best_value(problem: Problem) -> float:
    """Return the largest true value of a problem's space, rejected configs included."""
    values = (problem.true_value(config) for config in problem.report.space.configs())
    return max(value for value in values if value is not None)


def search(
    problem: Problem, method: str, *, seed: int, trials: int, best: float, measured: Provenance
) -> SearchRow:
    """Return what a search came to.

    Args:
        problem: What to search.
        method: Key of `METHODS`.
        seed: Of the base config, of the method and of every trial.
        trials: The most that it may take.
        best: `best_value` of the problem.
        measured: Where and when.
    """
    report = _with_base(problem, seed)
    searcher = METHODS[method](report, trials, seed)
    regrets: list[float] = []
    outcomes: list[str] = []
    asked_s: list[float] = []
    wall_s, leader, leading = 0.0, 0.0, 1.0
    while len(outcomes) < trials:
        begin = time.perf_counter()
        config = searcher.ask()
        asked_s.append(time.perf_counter() - begin)
        if config is None:
            break
        trial = problem.run(config, seed=seed)
        searcher.tell(trial)
        outcomes.append(trial.outcome)
        wall_s += trial.wall_s
        if trial.value is not None and trial.value > leader:
            leader = trial.value
            leading = 1.0 - (problem.true_value(config) or 0.0) / best
        regrets.append(round(leading, 6))
    return SearchRow(
        problem=problem.name,
        method=method,
        seed=seed,
        configs=report.total,
        feasible=report.feasible,
        best=best,
        regrets=tuple(regrets),
        outcomes=tuple(outcomes),
        ask_s=statistics.median(asked_s),
        wall_s=wall_s,
        measured=measured,
    )


def _with_base(problem: Problem, seed: int) -> SpaceReport:
    """Return the space as a user would hand it over, whose own config runs: drawn by the seed."""
    report = problem.report
    base = _running(problem, report, random.Random(f"{problem.name}:{seed}"))
    return replace(report, space=replace(report.space, base=base))


def _running(problem: Problem, report: SpaceReport, draw: random.Random) -> Config:
    while True:
        config = draw.choice(report.configs).config
        if problem.true_value(config) is not None:
            return config
