"""Which rules emptied a space: the smallest set of them that rejects every config together.

Found exactly, as a smallest hitting set: each config that the rules chosen so far let pass names
the rules that reject it, one of which must be in any answer (implicit hitting sets, Moreno-Centeno
and Karp, Operations Research 61, 2013).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from mindtune.search.cost_model import COST_KNOBS, CostModel
from mindtune.search.knobs import Config, knob_text
from mindtune.search.rule import Rule
from mindtune.search.rules import RULES
from mindtune.search.space import Space
from mindtune.search.walk import walk

__all__ = ["Conflict", "smallest_conflict"]

_IDENTITIES = ("degrees_fill_cluster", "micro_batch_identity")
"""What a config must fulfil before anything can be predicted of it."""


_MOST_LOOKED_AT = 20_000
"""Configs, and rejections, after which the count of what a rule alone rejects is given up."""


class _GivenUpError(Exception):
    """The count would take too long."""


@dataclass(frozen=True)
class Conflict:
    """The rules that emptied a space; without any one of them, others would reject less."""

    rules: tuple[Rule, ...]
    reasons: tuple[str, ...]
    """What each of them says about a config that it rejects."""
    left_without: tuple[int, ...]
    """How many configs would be feasible if that rule alone were not asked, as far as counted."""
    counted: tuple[bool, ...]
    """Whether that number is whole; in large spaces the count is given up."""
    values: str
    """The values of the knobs that they read, as the space has them."""
    among: str
    """Which configs they reject all of."""

    def text(self, total: int) -> str:
        """Return it for a user."""
        names = [rule.name for rule in self.rules]
        who = (
            f"{names[0]} alone rejects"
            if len(names) == 1
            else f"{', '.join(names[:-1])} and {names[-1]} together reject"
        )
        several = len(names) > 1
        why = "; ".join(
            f"{name}: {reason}" if several else reason
            for name, reason in zip(names, self.reasons, strict=True)
        )
        text = f"no config of {total} is feasible: {who} {self.among}; e.g. {why}."
        if self.values:
            text += f" Values here: {self.values}."
        freed = [
            f"{count if is_whole else f'at least {count}'} without {name}"
            for name, count, is_whole in zip(names, self.left_without, self.counted, strict=True)
            if count
        ]
        return f"{text} Left would be {', '.join(freed)}." if freed else text


def smallest_conflict(space: Space, cost: CostModel) -> Conflict:
    """Return why no config of a space is feasible.

    Rules that predict a cost are asked about configs that fill the cluster with whole
    micro-batches only: of any other, no prediction means anything.
    """
    seen: list[frozenset[int]] = []
    while True:
        chosen = _smallest_hitting_set(seen)
        survivor = next(walk(space, cost, _asked(chosen)), None)
        if survivor is None:
            rules = [RULES[index] for index in chosen]
            if _predicts(rules):  # the identities are asked before it anyway
                rules = [rule for rule in rules if rule.name not in _IDENTITIES]
            return _conflict(space, cost, rules)
        complete = space.complete(survivor)
        failing = (i for i, rule in enumerate(RULES) if rule.check(complete, cost) is not None)
        seen.append(frozenset(failing))


def _asked(chosen: Iterable[int]) -> list[Rule]:
    rules = [RULES[index] for index in sorted(chosen)]
    if not _predicts(rules):
        return rules
    first = [rule for rule in RULES if rule.name in _IDENTITIES and rule not in rules]
    return [*first, *rules]


def _predicts(rules: Iterable[Rule]) -> bool:
    return any(rule.reads == COST_KNOBS for rule in rules)


def _smallest_hitting_set(sets: list[frozenset[int]]) -> tuple[int, ...]:
    """Return the smallest set of indices, the first in order, that meets every set."""
    names = sorted(frozenset().union(*sets))
    for size in range(len(names) + 1):
        for candidate in combinations(names, size):
            if all(entry.intersection(candidate) for entry in sets):
                return candidate
    raise AssertionError("every config of an empty space is rejected by some rule")


def _conflict(space: Space, cost: CostModel, rules: list[Rule]) -> Conflict:
    reasons, left, counted = [], [], []
    for rule in rules:
        freed, is_whole = _freed(space, cost, rule)
        example = _nearest(space, cost, rule, freed) if freed else _rejected(space, cost, rule)
        reasons.append(rule.check(space.complete(example), cost) or rule.summary)
        left.append(len(freed))
        counted.append(is_whole)
    read = dict.fromkeys(name for rule in rules for name in rule.reads if rule.reads != COST_KNOBS)
    values = "; ".join(
        f"{name} {', '.join(map(knob_text, space.choices[name]))}"
        if name in space.choices
        else f"{name} {knob_text(space.background[name])} (not in the space)"
        for name in read
    )
    fitting = "all that fill the cluster with whole micro-batches"
    return Conflict(
        rules=tuple(rules),
        reasons=tuple(reasons),
        left_without=tuple(left),
        counted=tuple(counted),
        values=values,
        among=fitting if _predicts(rules) else "all of them",
    )


def _freed(space: Space, cost: CostModel, rule: Rule) -> tuple[list[Config], bool]:
    """Return the configs that this rule alone rejects, and whether these are all of them."""
    freed: list[Config] = []
    rejections = 0

    def enough(_rule: int, _count: int, _example: Config) -> None:
        nonlocal rejections
        rejections += 1
        if rejections > _MOST_LOOKED_AT:
            raise _GivenUpError

    try:
        for config in walk(space, cost, [other for other in RULES if other is not rule], enough):
            freed.append(config)
            if len(freed) >= _MOST_LOOKED_AT:
                return freed, False
    except _GivenUpError:
        return freed, False
    return freed, True


def _nearest(space: Space, cost: CostModel, rule: Rule, freed: list[Config]) -> Config:
    """Return the config to tell of: the one that needs the least memory, where that is asked."""
    if rule.reads != COST_KNOBS:
        return freed[0]
    return min(freed, key=lambda config: cost.memory_bytes(space.complete(config)) or 0.0)


def _rejected(space: Space, cost: CostModel, rule: Rule) -> Config:
    """Return a config that a rule rejects."""
    found: list[Config] = []

    def keep(_rule: int, _count: int, example: Config) -> None:
        if not found:
            found.append(example)

    for _ in walk(space, cost, [rule], keep):
        if found:
            break
    return found[0]
