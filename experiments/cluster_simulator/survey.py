"""What the problems are like: sizes, what the cost model knows of them, how noisy they are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from mindtune.controller.errors import ConfigError
from mindtune.experiments.cluster_simulator.problem import SimulatedProblem
from mindtune.experiments.cluster_simulator.problems import KINDS, problem
from mindtune.experiments.model_accuracy.metrics import regret, tie_aware_spearman
from mindtune.experiments.provenance import provenance
from mindtune.search.cost_model import Measurement, calibrate
from mindtune.search.knobs import Config
from mindtune.search.ranking import passing_without_memory

__all__ = ["ProblemFigures", "figures", "survey"]

_REPEATS = 30
_TRIALS = 10


@dataclass(frozen=True)
class ProblemFigures:
    """One problem."""

    total: int
    feasible: int
    failing: float
    """Share of the feasible configs that run out of memory: false accepts of the bare formulas."""
    lost: float
    """By how much the best config that is rejected for its predicted memory, though it runs, is
    better than the best feasible one; 0: it is not."""
    within: int
    """Feasible configs whose true value is within 3 % of the best."""
    spread: float
    """Best true value over the median one."""
    correlation: float
    """Spearman's, of predicted and true step time of the feasible configs that run."""
    tie_aware: float
    """The same without judging the order within 10 %."""
    calibrated: float
    """Spearman's after ten trials, drawn among the feasible configs."""
    regret: float
    """Of the best of the predicted top 3."""
    memory_error: float
    """Median, of the uncalibrated formula."""
    noise: float
    """Standard deviation of the logarithm of the best config's value over trials."""
    failures: float
    """Share of its trials that crash."""
    milliseconds: float
    """Of one core per config, the first time."""


def figures(known: SimulatedProblem) -> ProblemFigures:
    """Return the figures of a problem."""
    configs = known.report.configs
    started = time.process_time()
    values = [known.true_value(entry.config) for entry in configs]
    took = time.process_time() - started
    kept, predicted, real, worth, errors = [], [], [], [], []
    for entry, value in zip(configs, values, strict=True):
        truth, guess = known.truth(entry.config), entry.prediction
        if truth is None or value is None:
            continue
        kept.append(entry.config)
        predicted.append(guess.step_time_s)
        real.append(truth.step_time_s)
        worth.append(value)
        errors.append(abs((guess.memory_bytes or 0.0) / truth.memory_bytes - 1.0))
    best = max(worth)
    champion = next(e.config for e, v in zip(configs, values, strict=True) if v == best)
    runs = [known.run(champion, seed=seed) for seed in range(_REPEATS)]
    seen = [run.value for run in runs if run.value is not None]
    # Every config that the other rules let pass, whatever its memory is predicted to be.
    startable = passing_without_memory(known.space, known.report.cost)
    most = max(known.true_value(config) or 0.0 for config in startable)
    return ProblemFigures(
        total=known.report.total,
        feasible=len(configs),
        failing=1.0 - len(worth) / len(configs),
        lost=most / best - 1.0,
        within=sum(value >= 0.97 * best for value in worth),
        spread=best / statistics.median(worth),
        correlation=_spearman(predicted, real),
        tie_aware=tie_aware_spearman(predicted, real) or 0.0,
        calibrated=_spearman(_calibrated(known, kept), real),
        regret=regret(predicted, real),
        memory_error=statistics.median(errors),
        noise=statistics.stdev(map(float, np.log(seen))),
        failures=1.0 - len(seen) / len(runs),
        milliseconds=1e3 * took / len(configs),
    )


def _calibrated(known: SimulatedProblem, configs: list[Config]) -> list[float | None]:
    """Return what the cost model predicts after ten trials."""
    complete = list(map(known.space.complete, configs))
    drawn = Random(known.name).sample(range(len(configs)), min(_TRIALS, len(configs)))
    trials = [(complete[index], known.run(configs[index], seed=0)) for index in drawn]
    seen = [Measurement(config, run.memory_bytes, run.step_time_s) for config, run in trials]
    cost = calibrate(known.report.cost, seen)
    return [cost.step_time_s(config) for config in complete]


def _spearman(one: Sequence[float | None], other: Sequence[float]) -> float:
    from scipy.stats import spearmanr  # noqa: PLC0415 - slow to import

    return float(spearmanr(one, other)[0])


_COLUMNS = (
    ("feasible", "feasible", ",.0f"),
    ("out of memory", "failing", ".1%"),
    ("within 3 %", "within", ".0f"),
    ("best / median", "spread", ".2f"),
    ("Spearman", "correlation", ".2f"),
    ("tie-aware", "tie_aware", ".2f"),
    ("after 10 trials", "calibrated", ".2f"),
    ("regret of top 3", "regret", ".1%"),
    ("memory error", "memory_error", ".1%"),
    ("lost by rejection", "lost", ".1%"),
    ("noise", "noise", ".1%"),
    ("CPU ms a config", "milliseconds", ".2f"),
)
"""Heading, field and format."""


def survey(kinds: Sequence[str], seeds: int) -> None:
    """Print a Markdown table: median [lowest, highest] over clusters.

    Raises:
        ConfigError: if a problem is unknown, or there is no cluster to look at.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ConfigError(
            f"problems must be some of {', '.join(KINDS)}, but got {', '.join(unknown)}."
        )
    if seeds < 1:
        raise ConfigError(f"--seeds must be 1 or more, but got {seeds}.")
    print(f"| problem | configs | {' | '.join(heading for heading, _, _ in _COLUMNS)} |")
    print(f"|{' --- |' * (2 + len(_COLUMNS))}")
    for kind in kinds:
        found = [figures(problem(kind, seed)) for seed in range(seeds)]
        cells = [kind, f"{found[0].total:,}"]
        for _, name, form in _COLUMNS:
            numbers = sorted(getattr(one, name) for one in found)
            middle = statistics.median(numbers)
            cells.append(f"{middle:{form}} [{numbers[0]:{form}}, {numbers[-1]:{form}}]")
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{provenance().sentence()} {seeds} clusters each.")
