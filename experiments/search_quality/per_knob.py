"""Optuna's own samplers, with the parameters that one who knows Optuna would give them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from mindtune.experiments.search_quality.problem import SimulatedTrial
from mindtune.search.baseline import choose_baseline
from mindtune.search.constraints import SpaceReport
from mindtune.search.encoding import Encoding
from mindtune.search.knobs import Config, KnobValue
from mindtune.search.layout import DEGREES, num_ranks
from mindtune.search.ranking import choices
from mindtune.search.rules import RULES
from mindtune.search.space import Space

__all__ = ["PerKnob"]

_DATA = "data_parallel"
_MAX_REJECTIONS = 30
"""Proposals in a row after which any untried feasible config is taken: a sampler can come to
propose for ever what it knows."""
_Values = tuple[KnobValue, ...]


class PerKnob:
    """A sampler with one parameter per knob, asked again until the rules agree.

    Whatever follows from other knobs is no parameter: data parallelism, where all devices are
    used, and in a list of candidates what the others tell. Values that have an order, the same
    that our own sampler knows, are whole numbers, their places in it; the others are categories.
    What the rules reject costs nothing and is told by Optuna's constraints, one for each rule; a
    trial that fails is told so, too.
    """

    def __init__(
        self,
        sampler: optuna.samplers.BaseSampler,
        report: SpaceReport,
        seed: int,
        *,
        max_rejections: int = _MAX_REJECTIONS,
    ) -> None:
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._report = report
        self._names = _independent(report)
        self._values = _in_order({name: choices(report)[name] for name in self._names})
        self.parameters: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(values) - 1)
            if is_ordered
            else CategoricalDistribution(values)
            for name, (values, is_ordered) in self._values.items()
        }
        base = choose_baseline(report).config
        self._known = {self._key(base): base}
        self._known |= {self._key(entry.config): entry.config for entry in report.configs}
        self._left = dict(self._known)
        self._max_rejections = max_rejections
        self._failing = _failing(report)
        self._draw = random.Random(seed)
        self._open: dict[int, optuna.Trial] = {}
        self._enqueue(base)

    def ask(self) -> tuple[int, Config] | None:
        """Return the next config and its trial's number; None: every one was tried."""
        rejections = 0
        while self._left:
            if rejections == self._max_rejections:
                self._enqueue(self._draw.choice(list(self._left.values())))
            trial = self._study.ask(self.parameters)
            chosen = self._chosen(trial.params)
            key = self._key(chosen)
            config = self._left.pop(key, None)
            if config is not None:
                self._open[trial.number] = trial
                return trial.number, config
            rejections += 1
            if key in self._known:  # a repeat says nothing new
                self._study.tell(trial, state=TrialState.FAIL)
                continue
            for rule in self._failing(chosen):
                trial.set_constraint(rule, 1.0)
            self._study.tell(trial, state=TrialState.PRUNED)
        return None

    def tell(self, number: int, trial: SimulatedTrial) -> None:
        """Tell Optuna a value, or that the config violates a constraint."""
        own = self._open.pop(number)
        if trial.outcome == "ok" and trial.value is not None:
            self._study.tell(own, trial.value)
            return
        own.set_constraint(trial.outcome, 1.0)
        self._study.tell(own, state=TrialState.PRUNED)

    def _enqueue(self, config: Config) -> None:
        places = {
            name: values.index(config[name]) if is_ordered else config[name]
            for name, (values, is_ordered) in self._values.items()
        }
        self._study.enqueue_trial(places)

    def _chosen(self, params: Mapping[str, Any]) -> Config:
        return {
            name: values[params[name]] if is_ordered else params[name]
            for name, (values, is_ordered) in self._values.items()
        }

    def _key(self, config: Mapping[str, KnobValue]) -> _Values:
        return tuple(config[name] for name in self._names)


def _in_order(found: Mapping[str, _Values]) -> dict[str, tuple[_Values, bool]]:
    """Return the values of each knob, and whether they are in an order that means something."""
    encoding = Encoding(found)
    ordered = {}
    for name, is_ordered, gaps in zip(
        encoding.names, encoding.is_ordered, encoding.gaps, strict=True
    ):
        values = found[name]
        if is_ordered:
            # From one end of the axis: the value that is farthest from any.
            end = gaps.max(axis=1).argmax()
            values = tuple(values[index] for index in gaps[end].argsort(kind="stable"))
        ordered[name] = (values, is_ordered)
    return ordered


def _independent(report: SpaceReport) -> tuple[str, ...]:
    """Return the searched knobs that tell the configs apart."""
    space = report.space
    kept = [name for name, values in choices(report).items() if len(values) > 1]
    if space.candidates is None:
        follows = not space.facts.cluster.allow_idle
        return tuple(name for name in kept if name != _DATA or not follows)
    # Knobs with few values are kept last, degrees apart from what follows from them.
    for name in sorted(kept, key=lambda knob: (knob in DEGREES, knob == "micro_batch_size")):
        others = [other for other in kept if other != name]
        told = {tuple(config[other] for other in others) for config in space.candidates}
        if len(told) == len(space.candidates):
            kept = others
    return tuple(kept)


def _failing(report: SpaceReport) -> Callable[[Config], list[str]]:
    """Return what names the rules that a rejected choice of the independent knobs breaks."""
    space, cost = report.space, report.cost
    if space.candidates is not None:
        return lambda _: ["listed"]

    def failing(chosen: Config) -> list[str]:
        config = _filled(chosen, space)
        if config is None:
            return ["degrees_fill_cluster"]
        complete = space.complete(config)
        return [rule.name for rule in RULES if rule.check(complete, cost) is not None]

    return failing


def _filled(chosen: Config, space: Space) -> Config | None:
    """Return a choice with all that follows from it; None: no listed data parallelism does."""
    first = {name: values[0] for name, values in space.choices.items()}
    config = {**first, **chosen}
    cluster = space.facts.cluster
    if cluster.allow_idle or _DATA in chosen or _DATA not in space.choices:
        return config
    others = num_ranks({**space.complete(config), _DATA: 1})
    data, rest = divmod(cluster.num_devices, others)
    return None if rest or data not in space.choices[_DATA] else {**config, _DATA: data}
