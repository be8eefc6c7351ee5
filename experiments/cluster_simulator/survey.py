"""What the problems are like: sizes, what the cost model knows of them, how noisy they are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindtune.experiments.cluster_simulator.problem import STRUCTURE, SimulatedProblem
from mindtune.experiments.cluster_simulator.problems import problem
from mindtune.experiments.model_accuracy.metrics import regret, tie_aware_spearman
from mindtune.experiments.provenance import provenance
from mindtune.search.walk import walk

__all__ = ["ProblemFigures", "figures", "survey"]

_REPEATS = 30


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
    regret: float
    """Of the best of the predicted top 3."""
    memory_error: float
    """Median, of the uncalibrated formula."""
    noise: float
    """Standard deviation of the logarithm of the best config's value over trials."""
    failures: float
    """Share of its trials that crash."""
    milliseconds: float
    """Per config, the first time."""


def figures(known: SimulatedProblem) -> ProblemFigures:
    """Return the figures of a problem."""
    configs = known.report.configs
    started = time.perf_counter()
    values = [known.true_value(entry.config) for entry in configs]
    took = time.perf_counter() - started
    predicted, real, worth, errors = [], [], [], []
    for entry, value in zip(configs, values, strict=True):
        truth, guess = known.truth(entry.config), entry.prediction
        if truth is None or value is None:
            continue
        predicted.append(guess.step_time_s)
        real.append(truth.step_time_s)
        worth.append(value)
        errors.append(abs((guess.memory_bytes or 0.0) / truth.memory_bytes - 1.0))
    best = max(worth)
    champion = next(e.config for e, v in zip(configs, values, strict=True) if v == best)
    runs = [known.run(champion, seed=seed) for seed in range(_REPEATS)]
    seen = [run.value for run in runs if run.value is not None]
    # Every config that a program would start, whatever its memory is predicted to be.
    startable = walk(known.space, known.report.cost, STRUCTURE)
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
        regret=regret(predicted, real),
        memory_error=statistics.median(errors),
        noise=statistics.stdev(map(float, np.log(seen))),
        failures=1.0 - len(seen) / len(runs),
        milliseconds=1e3 * took / len(configs),
    )


def _spearman(one: Sequence[float | None], other: Sequence[float]) -> float:
    from scipy.stats import spearmanr  # noqa: PLC0415 - slow to import

    return float(spearmanr(one, other)[0])


def survey(kinds: Sequence[str], seeds: int) -> None:
    """Print a Markdown table: median [lowest, highest] over clusters."""
    print(
        "| problem | configs | feasible | out of memory | within 3 % | best / median | Spearman | "
        "tie-aware | regret of top 3 | memory error | lost by rejection | noise | ms a config |\n"
        f"|{' --- |' * 13}"
    )
    for kind in kinds:
        found = [figures(problem(kind, seed)) for seed in range(seeds)]

        def row(name: str, form: str, own: list[ProblemFigures] = found) -> str:
            numbers = sorted(getattr(one, name) for one in own)
            middle = statistics.median(numbers)
            return f"{middle:{form}} [{numbers[0]:{form}}, {numbers[-1]:{form}}]"

        print(
            f"| {kind} | {found[0].total:,} | {row('feasible', ',.0f')} | {row('failing', '.1%')} "
            f"| {row('within', '.0f')} | {row('spread', '.2f')} | {row('correlation', '.2f')} | "
            f"{row('tie_aware', '.2f')} | {row('regret', '.1%')} | {row('memory_error', '.1%')} | "
            f"{row('lost', '.1%')} | {row('noise', '.1%')} | {row('milliseconds', '.2f')} |",
            flush=True,
        )
    print(f"\n{provenance().sentence()} {seeds} clusters each.")
