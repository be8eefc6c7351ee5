"""One search of one problem, from the base config to the last trial."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace

from mindtune.controller.trials.confirm import num_leaders
from mindtune.experiments.provenance import Provenance
from mindtune.experiments.search_quality.methods import METHODS
from mindtune.experiments.search_quality.problem import Problem
from mindtune.experiments.search_quality.rows import SearchRow
from mindtune.search.constraints import SpaceReport
from mindtune.search.knobs import Config
from mindtune.search.ranking import passing_without_memory

__all__ = ["Answers", "answers", "search"]


@dataclass(frozen=True)
class Answers:
    """What is true of a problem, whoever searches it."""

    best: float
    """Largest true value, configs that the rules reject included."""
    accepted_failures: int
    """Configs that the rules let pass, before any trial, and that cannot run."""
    rejected_runnable: int
    """Configs that could run and that the rules reject."""


def answers(problem: Problem) -> Answers:
    """Return what is true of a problem; what breaks the layout's own rules cannot run."""
    report = problem.report
    accepted = [problem.true_value(entry.config) for entry in report.configs]
    possible = (
        passing_without_memory(report.space, report.cost)
        if report.space.candidates is None
        else report.space.configs()
    )
    keys = report.keys
    rejected = [
        problem.true_value(config) for config in possible if report.space.key(config) not in keys
    ]
    running = [value for value in (*accepted, *rejected) if value is not None]
    return Answers(
        best=max(running),
        accepted_failures=sum(value is None for value in accepted),
        rejected_runnable=sum(value is not None for value in rejected),
    )


def search(
    problem: Problem,
    name: str,
    method: str,
    *,
    seed: int,
    trials: int,
    known: Answers,
    measured: Provenance,
) -> SearchRow:
    """Return what a search came to.

    Args:
        problem: What to search.
        name: Of the problem in the rows, the same for all its clusters.
        method: Key of `METHODS`.
        seed: Of the base config, of the method and of every trial.
        trials: The most that it may take.
        known: `answers` of the problem.
        measured: Where and when.
    """
    report = _with_base(problem, seed)
    searcher = METHODS[method](report, trials, seed)
    regrets: list[float] = []
    outcomes: list[str] = []
    asked_s: list[float] = []
    wall_s = 0.0
    leaders: list[tuple[float, float]] = []  # measured and true value
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
        if trial.value is not None:
            leaders.append((trial.value, problem.true_value(config) or 0.0))
            leaders.sort(reverse=True)
        confirmed = leaders[: num_leaders(len(outcomes))]
        found = max((true for _, true in confirmed), default=0.0)
        regrets.append(round(1.0 - found / known.best, 6))
    return SearchRow(
        problem=name,
        method=method,
        seed=seed,
        trials=trials,
        configs=report.total,
        feasible=report.feasible,
        accepted_failures=known.accepted_failures,
        rejected_runnable=known.rejected_runnable,
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
