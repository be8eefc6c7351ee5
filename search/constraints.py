"""Which configs of a space can work, and under which rule each other one falls.

Theory of operation: rules are asked in the order of `RULES`, and a config counts under the first
that fails. The walk fixes one knob after the other and asks a rule as soon as all knobs that it
reads are fixed, but never before the rules in front of it have passed. A failure then holds for
every config below that point, which are counted and not visited: that is what makes 10^6 configs
a matter of seconds. The order in which knobs are fixed therefore follows the rules, not the user;
counts do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mindtune.search.advice import advice
from mindtune.search.cost_model import CostModel, Prediction
from mindtune.search.knobs import Config, knob_text
from mindtune.search.rules import RULES, Rule
from mindtune.search.space import Space

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
    """How many configs a rule rejected, with the reason of the first."""

    rule: str
    count: int
    reason: str
    """Of the example, in words and numbers; the rule itself where it never fired."""
    example: Config | None


@dataclass(frozen=True)
class FeasibleConfig:
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
    """Best predicted first; where nothing is predicted, least advice first."""

    @property
    def feasible(self) -> int:
        """Number of feasible configs."""
        return len(self.configs)

    @property
    def keys(self) -> frozenset[str]:
        """Hashes of the feasible configs."""
        return frozenset(self.space.key(entry.config) for entry in self.configs)

    @property
    def emptied_by(self) -> str | None:
        """Why nothing is left, naming the rule that took the last; None where something is."""
        if self.configs:
            return None
        fired = [entry for entry in self.rejected if entry.count]
        last = fired[-1]
        before = ", ".join(f"{entry.rule} {entry.count}" for entry in fired[:-1])
        return (
            f"no config of {self.total} is feasible: {last.rule} rejects the last {last.count}"
            f"{f' (before it: {before})' if before else ''}; e.g. {last.reason}."
        )


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
    tally = _Tally([0] * len(RULES), [None] * len(RULES))
    walk = _listed(space, model, tally) if space.candidates is not None else None
    feasible = [
        _judged(config, space, model) for config in walk or _Walk(space, model, tally).run()
    ]
    feasible.sort(key=_order)
    return SpaceReport(
        space=space,
        cost=model,
        total=space.total,
        rejected=tally.counts(space, model),
        configs=tuple(feasible),
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


def _order(entry: FeasibleConfig) -> tuple[float, int]:
    time = entry.prediction.step_time_s
    return (math.inf if time is None else time, entry.num_advice)


def _judged(config: Config, space: Space, model: CostModel) -> FeasibleConfig:
    complete = space.complete(config)
    prediction = model.predict(complete)
    count = 0 if prediction.step_time_s is not None else len(advice(complete, model))
    return FeasibleConfig(config, prediction, count)


@dataclass
class _Tally:
    counts_by_rule: list[int]
    examples: list[Config | None]

    def add(self, rule: int, count: int, example: Config) -> None:
        self.counts_by_rule[rule] += count
        if self.examples[rule] is None:
            self.examples[rule] = dict(example)

    def counts(self, space: Space, model: CostModel) -> tuple[RuleCount, ...]:
        return tuple(
            RuleCount(
                rule.name,
                count,
                rule.summary
                if example is None
                else rule.check(space.complete(example), model) or rule.summary,
                example,
            )
            for rule, count, example in zip(RULES, self.counts_by_rule, self.examples, strict=True)
        )


def _listed(space: Space, model: CostModel, tally: _Tally) -> Iterator[Config]:
    """Yield the feasible ones of an explicit list."""
    for config in space.configs():
        complete = space.complete(config)
        for index, rule in enumerate(RULES):
            if rule.check(complete, model) is not None:
                tally.add(index, 1, config)
                break
        else:
            yield config


class _Walk:
    """Depth-first walk over the product of the choices; see the theory of operation above."""

    def __init__(self, space: Space, model: CostModel, tally: _Tally) -> None:
        self._model = model
        self._tally = tally
        self._space = space
        read_order = [name for rule in RULES for name in rule.reads if name in space.choices]
        self._names = tuple(dict.fromkeys([*read_order, *space.choices]))
        depth = {name: index for index, name in enumerate(self._names, 1)}
        self._known_at = [max((depth.get(n, 0) for n in rule.reads), default=0) for rule in RULES]
        sizes = [len(space.choices[name]) for name in self._names]
        self._below = [math.prod(sizes[index:]) for index in range(len(sizes) + 1)]
        self._config: Config = space.complete(
            {name: values[0] for name, values in space.choices.items()}
        )

    def run(self) -> Iterator[Config]:
        """Yield the feasible configs."""
        yield from self._visit(0, 0)

    def _visit(self, depth: int, rule: int) -> Iterator[Config]:
        while rule < len(RULES) and self._known_at[rule] <= depth:
            if self._asked(RULES[rule]) is not None:
                self._tally.add(rule, self._below[depth], self._space.named(self._config))
                return
            rule += 1
        if depth == len(self._names):
            yield self._space.named(self._config)
            return
        name = self._names[depth]
        for value in self._space.choices[name]:
            self._config[name] = value
            yield from self._visit(depth + 1, rule)
        # Knobs that are not fixed yet show their first choice, so that examples are real configs.
        self._config[name] = self._space.choices[name][0]

    def _asked(self, rule: Rule) -> str | None:
        return rule.check(self._config, self._model)
