"""The ways to search that are compared: ours, Optuna's own, and two orders that need no model.

All of them see the same rules, whose rejections cost nothing, and begin with the same base
config.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import TrialState

from mindtune.experiments.search_quality.problem import SimulatedTrial
from mindtune.search.attributes import MEMORY, STEP_TIME
from mindtune.search.baseline import choose_baseline
from mindtune.search.constraints import SpaceReport
from mindtune.search.knobs import Config, KnobValue
from mindtune.search.layout import DEGREES
from mindtune.search.ranking import choices
from mindtune.search.sampler import make_sampler
from mindtune.search.stopping import StopRule
from mindtune.search.study import Proposer

__all__ = ["METHODS", "Searcher"]


class Searcher(Protocol):
    """One search."""

    def ask(self) -> Config | None:
        """Return the next config; None: there is no other."""
        ...

    def tell(self, trial: SimulatedTrial) -> None:
        """Say what came of the config that was asked last."""
        ...


class _Proposed:
    """A study as a user runs it, with one of the samplers of the study file."""

    def __init__(
        self,
        sampler: str,
        report: SpaceReport,
        trials: int,
        seed: int,
        stop: StopRule | None = None,
    ) -> None:
        study = optuna.create_study(
            direction="maximize", sampler=make_sampler(sampler, report, seed=seed)
        )
        self._proposer = Proposer(study, report, trials=trials, stop=stop, seed=seed)
        self._number = 0

    def ask(self) -> Config | None:
        proposal = self._proposer.ask()
        if proposal is None:
            return None
        self._number = proposal.number
        return proposal.config

    def tell(self, trial: SimulatedTrial) -> None:
        measured = {MEMORY: trial.memory_bytes, STEP_TIME: trial.step_time_s}
        known = {name: value for name, value in measured.items() if value is not None}
        self._proposer.tell(self._number, trial.outcome, trial.value, known)


class _PerKnob:
    """One of Optuna's samplers with one parameter per knob, asked again until the rules agree.

    A rejection costs nothing and is closed as failed, which Optuna's samplers pass over. Knobs of
    a list of candidates that follow from others are no parameters: whoever turned the list into a
    search by hand would leave them out.
    """

    def __init__(
        self, sampler: optuna.samplers.BaseSampler, report: SpaceReport, seed: int
    ) -> None:
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._names = _independent(report)
        self._parameters: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(values)
            for name, values in choices(report).items()
            if name in self._names
        }
        base = choose_baseline(report).config
        self._left = {self._key(base): base}
        self._left |= {self._key(entry.config): entry.config for entry in report.configs}
        self._draw = random.Random(seed)
        self._enqueue(base)
        self._open: optuna.Trial | None = None

    def ask(self) -> Config | None:
        rejections = 0
        while self._left:
            if rejections == _MAX_REJECTIONS:
                self._enqueue(self._draw.choice(list(self._left.values())))
            trial = self._study.ask(self._parameters)
            config = self._left.pop(self._key(trial.params), None)
            if config is not None:
                self._open = trial
                return config
            self._study.tell(trial, state=TrialState.FAIL)
            rejections += 1
        return None

    def tell(self, trial: SimulatedTrial) -> None:
        if trial.value is None:
            # As a program does that raises TrialPruned: TPE learns that it was no good.
            self._study.tell(self._open, state=TrialState.PRUNED)
        else:
            self._study.tell(self._open, trial.value)

    def _enqueue(self, config: Config) -> None:
        self._study.enqueue_trial({name: config[name] for name in self._names})

    def _key(self, config: Mapping[str, KnobValue]) -> tuple[KnobValue, ...]:
        return tuple(config[name] for name in self._names)


_MAX_REJECTIONS = 100
"""Proposals in a row after which any untried feasible config is taken, as in the study's own loop:
TPE can come to propose for ever what it knows."""


def _independent(report: SpaceReport) -> tuple[str, ...]:
    """Return the knobs that tell the configs of a list apart; all of a product's."""
    kept = list(report.space.searched)
    candidates = report.space.candidates
    if candidates is None:
        return tuple(kept)
    # Knobs with few values are kept last, degrees apart from what follows from them.
    for name in sorted(kept, key=lambda knob: (knob in DEGREES, knob == "micro_batch_size")):
        others = [other for other in kept if other != name]
        if len({tuple(config[other] for other in others) for config in candidates}) == len(
            candidates
        ):
            kept = others
    return tuple(kept)


class _InOrder:
    """Configs in an order that no trial changes."""

    def __init__(self, base: Config, others: Iterator[Config]) -> None:
        self._left = _base_first(base, others)

    def ask(self) -> Config | None:
        return next(self._left, None)

    def tell(self, trial: SimulatedTrial) -> None:
        """Learn nothing."""


def _base_first(base: Config, others: Iterator[Config]) -> Iterator[Config]:
    yield base
    yield from (config for config in others if config != base)


def _grid_order(report: SpaceReport) -> Iterator[Config]:
    """Yield the feasible configs as a nested loop over the user's lists would."""
    space = report.space
    places = {name: {v: i for i, v in enumerate(vs)} for name, vs in space.choices.items()}

    def place(config: Config) -> tuple[int, ...]:
        return tuple(places[name][config[name]] for name in space.choices)

    yield from sorted((entry.config for entry in report.configs), key=place)


_STAGES = ("none", "optimizer", "gradient", "parameter")


def _largest_micro_batch(report: SpaceReport) -> Iterator[Config]:
    """Yield what DeepSpeed's autotuner tries: stage by stage, the largest micro-batch first.

    Other knobs stay as the base has them as long as there are configs of that kind; DeepSpeed
    does not search them. Then those follow that differ in fewest of the others.
    """
    base = choose_baseline(report).config
    own = ("optimizer_sharding", "micro_batch_size")

    def turn(config: Config) -> tuple[int, int, int]:
        others = sum(config[name] != value for name, value in base.items() if name not in own)
        stage: KnobValue = config.get("optimizer_sharding", "none")
        return others, _STAGES.index(str(stage)), -int(config.get("micro_batch_size", 1))

    yield from sorted((entry.config for entry in report.configs), key=turn)


def _proposed(sampler: str) -> Callable[[SpaceReport, int, int], Searcher]:
    return lambda report, trials, seed: _Proposed(sampler, report, trials, seed)


def _ordered(
    order: Callable[[SpaceReport], Iterator[Config]],
) -> Callable[[SpaceReport, int, int], Searcher]:
    return lambda report, _trials, _seed: _InOrder(choose_baseline(report).config, order(report))


METHODS: dict[str, Callable[[SpaceReport, int, int], Searcher]] = {
    "guided": _proposed("guided"),
    "guided_with_stop": lambda report, trials, seed: _Proposed(
        "guided", report, trials, seed, StopRule()
    ),
    "staged": _proposed("staged"),
    "tpe": lambda report, _trials, seed: _PerKnob(TPESampler(seed=seed), report, seed),
    "random": lambda report, _trials, seed: _PerKnob(RandomSampler(seed=seed), report, seed),
    "grid": _ordered(_grid_order),
    "largest_micro_batch": _ordered(_largest_micro_batch),
}
"""Name -> the search of a space, for so many trials, with a seed."""
