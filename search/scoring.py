"""From what a trial measured to its value: mfu^a x stability^b.

stability = (1 - share of measured steps that were non-finite, skipped or loss-spiking)
            x min(1, median / mean step time).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from mindtune.search.efficiency import flops_utilization, steadiness
from mindtune.search.errors import SearchError
from mindtune.search.facts import StudyFacts

__all__ = [
    "METRICS",
    "Exponents",
    "MeasuredTrial",
    "Score",
    "best_by",
    "is_better",
    "score",
    "stability",
]

Direction = Literal["maximize", "minimize"]

METRICS: dict[str, Direction] = {
    "value": "maximize",
    "mfu": "maximize",
    "stability": "maximize",
    "tokens_per_s": "maximize",
    "samples_per_s": "maximize",
    "step_time_s": "minimize",
    "latency_s": "minimize",
    "peak_memory_bytes": "minimize",
    "loss": "minimize",
    "eval_loss": "minimize",
}
"""Which way is better belongs to the metric, not to whoever sorts."""

_Row = TypeVar("_Row", bound=Mapping[str, object])


def _direction(metric: str) -> Direction:
    if metric not in METRICS:
        raise SearchError(f"metric must be one of {', '.join(METRICS)}, but got {metric!r}.")
    return METRICS[metric]


def is_better(metric: str, a: float, b: float) -> bool:
    """Return whether `a` is strictly better than `b`; NaN is never better.

    Raises:
        SearchError: if the metric's direction is not known.
    """
    return a > b if _direction(metric) == "maximize" else a < b


def best_by(metric: str, rows: Iterable[_Row]) -> _Row | None:
    """Return the row that is best by its own field `metric`; rows without it are left out.

    The first of equals wins; None: no row has a finite value.
    """
    best: _Row | None = None
    best_number = 0.0
    _direction(metric)
    for row in rows:
        number = row.get(metric)
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        if not math.isfinite(number):
            continue
        if best is None or is_better(metric, number, best_number):
            best, best_number = row, number
    return best


@dataclass(frozen=True)
class Exponents:
    """How much each part counts in the value."""

    mfu: float = 1.0
    stability: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MeasuredTrial:
    """What one repeat of a trial measured; None: not measured."""

    step_time_s: tuple[float, ...]
    """Seconds per optimizer step end to end, slowest rank, warm-up excluded."""
    bad_steps: int = 0
    """Measured steps that were non-finite, skipped or loss-spiking."""
    tokens_per_step: float | None = None
    """Over all ranks."""
    samples_per_step: float | None = None
    """Over all ranks."""
    peak_memory_bytes: float | None = None
    """Of the worst rank."""
    mfu: float | None = None
    """What the trial says itself; used where the shape of the model is unknown."""

    def __post_init__(self) -> None:
        times = self.step_time_s
        if not times or not all(math.isfinite(time) and time > 0 for time in times):
            raise SearchError(f"step_time_s must hold positive finite seconds, but got {times!r}.")
        if not 0 <= self.bad_steps <= len(times):
            raise SearchError(
                f"bad_steps must lie between 0 and the {len(times)} measured steps, but got "
                f"{self.bad_steps}."
            )

    @property
    def median_s(self) -> float:
        """Median step time in seconds."""
        return statistics.median(self.step_time_s)

    def throughput(self, field: Literal["tokens_per_step", "samples_per_step"]) -> float | None:
        """Return tokens or samples per second at the median step time."""
        amount = getattr(self, field)
        return None if amount is None else amount / self.median_s


@dataclass(frozen=True)
class Score:
    """A trial's value and what it is made of."""

    value: float | None
    """None: invalid, see `problem`."""
    mfu: float | None
    """Model FLOPs utilisation, or the throughput over the baseline's: see `kind`."""
    kind: Literal["mfu", "relative", "unknown"]
    stability: float
    median_step_time_s: float
    problem: str = ""


def stability(trial: MeasuredTrial) -> float:
    """Return the stability of a trial, 0..1."""
    times = trial.step_time_s
    return steadiness(
        bad_share=trial.bad_steps / len(times),
        median_s=trial.median_s,
        mean_s=statistics.fmean(times),
    )


def score(
    trial: MeasuredTrial,
    facts: StudyFacts,
    *,
    exponents: Exponents = Exponents(),
    baseline: MeasuredTrial | None = None,
) -> Score:
    """Return the value of a trial.

    Args:
        trial: What was measured.
        facts: Peak, devices and model; idle devices count.
        exponents: Weights of the two parts.
        baseline: The base config's trial. Only needed where no MFU is to be had: then the
            throughput over the baseline's stands for it and the score is `relative`. The
            baseline scores 1 against itself.
    """
    steady = stability(trial)
    mfu, kind = _mfu(trial, facts, baseline), "mfu"
    if mfu is None:
        mfu, kind = _relative(trial, baseline), "relative"
    if mfu is None:
        problem = "no MFU: peak or model is unknown, and there is no baseline to compare with"
        return Score(None, None, "unknown", steady, trial.median_s, problem)
    if kind == "mfu" and not 0.0 < mfu <= 1.0:
        problem = (
            f"MFU must lie above 0 and at most at 1, but is {mfu:.3f}: the peak, the model's "
            "shape or the step time is wrong"
        )
        return Score(None, mfu, "mfu", steady, trial.median_s, problem)
    value = mfu**exponents.mfu * steady**exponents.stability
    return Score(value, mfu, "mfu" if kind == "mfu" else "relative", steady, trial.median_s)


def _mfu(trial: MeasuredTrial, facts: StudyFacts, baseline: MeasuredTrial | None) -> float | None:
    cluster, model = facts.cluster, facts.model
    if model is None or cluster.peak_flops is None:
        # One kind per study: what the baseline did not state is of no use in one other trial.
        return None if baseline is not None and baseline.mfu is None else trial.mfu
    tokens = trial.tokens_per_step
    if tokens is None:
        samples = trial.samples_per_step or facts.training.global_batch_size
        tokens = samples * model.seq_length
    flops_per_s = model.step_flops(tokens) / trial.median_s
    return flops_utilization(flops_per_s, cluster.peak_flops, cluster.num_devices)


def _relative(trial: MeasuredTrial, baseline: MeasuredTrial | None) -> float | None:
    if baseline is None:
        return None
    fields: tuple[Literal["tokens_per_step", "samples_per_step"], ...]
    fields = ("tokens_per_step", "samples_per_step")
    for field in fields:
        own, reference = trial.throughput(field), baseline.throughput(field)
        if own is not None and reference:
            return own / reference
    # Every config of a study has the same global batch.
    return baseline.median_s / trial.median_s
