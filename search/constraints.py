"""Which configs of a space can work, and under which rule each other one falls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple, TypeVar

from mindtune.search.advice import ADVICE, advice
from mindtune.search.conflict import Conflict, smallest_conflict
from mindtune.search.cost_model import COST_KNOBS, CostModel, Prediction
from mindtune.search.knobs import Config, knob_text
from mindtune.search.memory_model import moment_bytes
from mindtune.search.rule import Check
from mindtune.search.rules import RULES
from mindtune.search.space import Space
from mindtune.search.walk import walk

__all__ = [
    "NOT_LISTED",
    "Explanation",
    "FeasibleConfig",
    "RuleCount",
    "SpaceReport",
    "check",
    "explain",
    "first_failure",
]

_ALLOWED = "allowed_values"
NOT_LISTED = "the space does not list this config"


@dataclass(frozen=True)
class RuleCount:
    """How many configs a rule rejects, or advice speaks against, with the reason of one."""

    rule: str
    count: int
    reason: str
    """Of the example, in words and numbers; the rule itself where it never fired."""
    example: Config | None


class FeasibleConfig(NamedTuple):
    """A config that no rule rejects."""

    config: Config
    prediction: Prediction
    num_advice: int = 0
    """How many pieces of advice speak against it."""


@dataclass(frozen=True)
class SpaceReport:
    """A space under the rules: total = len(configs) + the sum of the counts."""

    space: Space
    cost: CostModel
    total: int
    rejected: tuple[RuleCount, ...]
    """One entry per rule, in the order in which they are asked."""
    configs: tuple[FeasibleConfig, ...]
    """Best predicted first; among equals, least advice first."""
    advice: tuple[RuleCount, ...] = ()
    """How many of the feasible configs each piece of advice speaks against."""

    @property
    def feasible(self) -> int:
        """Number of feasible configs."""
        return len(self.configs)

    @property
    def keys(self) -> frozenset[str]:
        """Hashes of the feasible configs."""
        return frozenset(self.space.key(entry.config) for entry in self.configs)

    @property
    def notes(self) -> tuple[str, ...]:
        """Which of the user's limits judge nothing, and for want of what."""
        facts, limits = self.space.facts, self.space.facts.limits
        of_memory = ("memory_utilization", "max_memory", "min_memory_utilization",
                     "min_overlap_headroom")  # fmt: skip
        missing = {
            "cluster.device_memory": facts.cluster.device_memory is None
            and ("memory_utilization", "min_memory_utilization", "min_overlap_headroom"),
            "model": facts.model is None
            and (*of_memory, "max_recompute_share", "vocab_divisible"),
            # The formulas do not know what it keeps per parameter.
            f"training.optimizer = {facts.training.optimizer}": facts.model is not None
            and moment_bytes(facts) is None
            and of_memory,
        }
        return tuple(
            f"constraints.{name} judges nothing: {what} is not known"
            for what, names in missing.items()
            for name in names or ()
            if getattr(limits, name) not in (None, False)
        )

    @cached_property
    def conflict(self) -> Conflict | None:
        """The smallest set of rules that emptied the space; None where something is left."""
        return None if self.configs else smallest_conflict(self.space, self.cost)

    @property
    def emptied_by(self) -> str | None:
        """Why nothing is left, naming the rules; None where something is."""
        return None if self.conflict is None else self.conflict.text(self.total)


@dataclass(frozen=True)
class Explanation:
    """One config under every rule."""

    config: Config
    """Complete."""
    rejected: tuple[RuleCount, ...]
    """Every rule that rejects it, in order; empty: feasible."""
    advice: tuple[str, ...]
    prediction: Prediction


def check(space: Space, cost: CostModel | None = None) -> SpaceReport:
    """Return the space under the rules.

    Args:
        space: What may vary.
        cost: Cost model; None: the formulas without corrections.
    """
    model = cost or CostModel(space.facts)
    rejected = _Tally(len(RULES))
    judge = _Judge(space, model)
    feasible = [judge(config) for config in walk(space, model, RULES, rejected.add)]
    feasible.sort(key=lambda judged: judged[0])

    def spoken(ask: Check, summary: str, example: Config | None) -> str:
        return summary if example is None else ask(space.complete(example), model) or summary

    return SpaceReport(
        space=space,
        cost=model,
        total=space.total,
        rejected=tuple(
            RuleCount(rule.name, count, spoken(rule.check, rule.summary, example), example)
            for rule, count, example in rejected.rows(RULES)
        ),
        configs=tuple(entry for _, entry in feasible),
        advice=tuple(
            RuleCount(soft.name, count, spoken(soft.advise, soft.summary, example), example)
            for soft, count, example in judge.spoken.rows(ADVICE)
        ),
    )


def explain(
    space: Space, given: Mapping[str, object], cost: CostModel | None = None
) -> Explanation:
    """Return what every rule says about one config, with all that is unnamed filled in.

    Raises:
        SearchError: if a knob or value is not allowed.
    """
    model = cost or CostModel(space.facts)
    config = space.fill(given)
    failed = []
    for name, values in space.choices.items():
        if config[name] not in values:
            allowed = ", ".join(map(knob_text, values))
            reason = (
                f"{name} = {knob_text(config[name])} is not among the space's values: {allowed}"
            )
            failed.append(RuleCount(_ALLOWED, 1, reason, config))
    if not failed and space.named(config) not in space:
        failed.append(RuleCount(_ALLOWED, 1, NOT_LISTED, config))
    for rule in RULES:
        reason_found = rule.check(config, model)
        if reason_found is not None:
            failed.append(RuleCount(rule.name, 1, reason_found, config))
    return Explanation(config, tuple(failed), advice(config, model), model.predict(config))


def first_failure(config: Config, cost: CostModel) -> str | None:
    """Return rule and reason of the first rule that rejects a complete config; None: none."""
    for rule in RULES:
        reason = rule.check(config, cost)
        if reason is not None:
            return f"{rule.name}: {reason}"
    return None


_Row = TypeVar("_Row")


class _Tally:
    """Counts and the first example, by the index of a rule."""

    def __init__(self, size: int) -> None:
        self._counts = [0] * size
        self._examples: list[Config | None] = [None] * size

    def add(self, rule: int, count: int, example: Config) -> None:
        self._counts[rule] += count
        if self._examples[rule] is None:
            self._examples[rule] = dict(example)

    def rows(self, rules: Sequence[_Row]) -> Iterator[tuple[_Row, int, Config | None]]:
        """Yield every rule with its count and example."""
        return zip(rules, self._counts, self._examples, strict=True)


_CHEAP = tuple(i for i, soft in enumerate(ADVICE) if soft.reads != COST_KNOBS)
"""Advice that few knobs decide: asked once for each combination of theirs."""
_COSTLY = tuple(i for i, soft in enumerate(ADVICE) if soft.reads == COST_KNOBS)
_cheap_key = itemgetter(*dict.fromkeys(name for i in _CHEAP for name in ADVICE[i].reads))


class _Judge:
    """Predicts feasible configs and asks advice about them."""

    def __init__(self, space: Space, cost: CostModel) -> None:
        self.spoken = _Tally(len(ADVICE))
        self._space, self._cost = space, cost
        self._is_timed = space.facts.cluster.is_timed
        self._known: dict[object, tuple[int, ...]] = {}

    def __call__(self, config: Config) -> tuple[tuple[float, int], FeasibleConfig]:
        complete = self._space.complete(config)
        key = _cheap_key(complete)
        speaking = self._known.get(key)
        if speaking is None:
            speaking = self._known[key] = self._speaking(_CHEAP, complete)
        speaking += self._speaking(_COSTLY, complete)
        for index in speaking:
            self.spoken.add(index, 1, config)
        prediction = self._cost.predict(complete)
        cost = prediction.step_time_s if self._is_timed else self._cost.relative_cost(complete)
        # Costs that differ by rounding are equal: advice decides.
        level = round(math.log(cost), 9) if cost else math.inf
        return (level, len(speaking)), FeasibleConfig(config, prediction, len(speaking))

    def _speaking(self, indices: Sequence[int], complete: Config) -> tuple[int, ...]:
        return tuple(i for i in indices if ADVICE[i].advise(complete, self._cost) is not None)
