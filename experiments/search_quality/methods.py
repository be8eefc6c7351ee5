"""The ways to search that are compared: ours whole and in parts, Optuna's, and plain orders.

All of them see the same rules, whose rejections cost nothing, and begin with the same base
config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Protocol

from optuna.samplers import GPSampler, RandomSampler, TPESampler

from mindtune.experiments.search_quality.orders import (
    InOrder,
    grid_order,
    largest_micro_batch,
    predicted_order,
)
from mindtune.experiments.search_quality.per_knob import PerKnob
from mindtune.experiments.search_quality.problem import SimulatedTrial
from mindtune.experiments.search_quality.proposed import CalibratedOrder, Proposed, without_model
from mindtune.search.baseline import choose_baseline
from mindtune.search.constraints import SpaceReport
from mindtune.search.knobs import Config
from mindtune.search.sampler import make_sampler
from mindtune.search.stopping import StopRule

__all__ = ["METHODS", "Method", "Searcher", "missing"]


class Searcher(Protocol):
    """One search."""

    def ask(self) -> tuple[int, Config] | None:
        """Return the next config and a number for it; None: there is none now."""
        ...

    def tell(self, number: int, trial: SimulatedTrial) -> None:
        """Say what came of a config that was asked."""
        ...


_Open = Callable[[SpaceReport, int, int], Searcher]
"""Space, number of trials, seed -> a search."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to search."""

    open: _Open
    workers: int = 1
    """Trials in flight at the same time."""
    stops_early: bool = False
    """Whether trials that cannot catch up with the best are stopped, where steps are known."""
    needs: str = ""
    """Package that it cannot do without; empty: none."""


def missing(name: str) -> str:
    """Return the package that a method needs and that is not installed; empty: none."""
    needed = METHODS[name].needs
    return needed if needed and find_spec(needed) is None else ""


def _guided(
    report: SpaceReport, trials: int, seed: int, *, sampler: str = "guided",
    stop: StopRule | None = None,
) -> Searcher:  # fmt: skip
    return Proposed(make_sampler(sampler, report, seed=seed), report, trials, seed, stop)


def _unpredicted(report: SpaceReport, trials: int, seed: int) -> Searcher:
    return Proposed(without_model(report, seed), report, trials, seed)


def _calibrated(report: SpaceReport, _trials: int, _seed: int) -> Searcher:
    return CalibratedOrder(report)


def _tpe(report: SpaceReport, _trials: int, seed: int) -> Searcher:
    # Every trial has every parameter, so that Optuna's `group` would change nothing.
    sampler = TPESampler(seed=seed, multivariate=True, n_startup_trials=_RANDOM_TRIALS)
    return PerKnob(sampler, report, seed)


def _gp(report: SpaceReport, _trials: int, seed: int) -> Searcher:
    sampler = GPSampler(seed=seed, n_startup_trials=_RANDOM_TRIALS)
    return PerKnob(sampler, report, seed, max_rejections=_GP_REJECTIONS)


def _random(report: SpaceReport, _trials: int, seed: int) -> Searcher:
    return PerKnob(RandomSampler(seed=seed), report, seed)


_RANDOM_TRIALS = 5
"""Proposals before Optuna's models take over, those that the rules reject included; half of its
default, as a search has a few dozen trials."""

_GP_REJECTIONS = 10
"""Each one costs a fit, 0.1 s and more, and its model hardly moves from what it has proposed."""


def _ordered(order: Callable[[SpaceReport], Iterator[Config]]) -> _Open:
    return lambda report, _trials, _seed: InOrder(choose_baseline(report).config, order(report))


METHODS: dict[str, Method] = {
    "guided": Method(open=_guided),
    "guided_with_stop": Method(open=partial(_guided, stop=StopRule())),
    "guided_4_workers": Method(open=_guided, workers=4),
    "guided_early_stops": Method(open=_guided, stops_early=True),
    "staged": Method(open=partial(_guided, sampler="staged")),
    "guided_without_model": Method(open=_unpredicted),
    "calibrated_order": Method(open=_calibrated),
    "cost_order": Method(open=_ordered(predicted_order)),
    "tpe": Method(open=_tpe),
    "tpe_of_a_study": Method(open=partial(_guided, sampler="tpe")),
    "gp": Method(open=_gp, needs="torch"),
    "random": Method(open=_random),
    "grid": Method(open=_ordered(grid_order)),
    "largest_micro_batch": Method(open=_ordered(largest_micro_batch)),
}
"""Name -> the search of a space."""
