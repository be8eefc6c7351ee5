"""The configs of a space that a list of rules lets pass, found without visiting every other.

Theory of operation: rules are asked in their order, and a config counts under the first that
fails. The walk fixes one knob after the other and asks a rule as soon as all knobs that it reads
are fixed, but never before the rules in front of it have passed. A failure then holds for every
config below that point, which are counted and not visited: that is what makes 10^6 configs a
matter of seconds. The order in which knobs are fixed therefore follows the rules, not the user;
counts do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from mindtune.search.cost_model import CostModel
from mindtune.search.knobs import Config
from mindtune.search.rule import Rule
from mindtune.search.space import Space

__all__ = ["Reject", "walk"]

Reject = Callable[[int, int, Config], None]
"""Told for what a rule rejects: its index, how many configs at once, and one of them."""


def walk(
    space: Space, cost: CostModel, rules: Sequence[Rule], reject: Reject | None = None
) -> Iterator[Config]:
    """Yield every config of a space that all rules let pass.

    Args:
        space: What may vary; a list of candidates is asked one by one.
        cost: For the rules that predict.
        rules: In the order in which they are asked.
        reject: Told of every other config; may be called for many at once.
    """
    told = reject or _nobody
    if space.candidates is not None:
        return _listed(space, cost, rules, told)
    return _Walk(space, cost, rules, told).visit(0, 0)


def _nobody(_rule: int, _count: int, _example: Config) -> None:
    """Tell nobody."""


def _listed(
    space: Space, cost: CostModel, rules: Sequence[Rule], reject: Reject
) -> Iterator[Config]:
    for config in space.configs():
        complete = space.complete(config)
        for index, rule in enumerate(rules):
            if rule.check(complete, cost) is not None:
                reject(index, 1, config)
                break
        else:
            yield config


class _Walk:
    """Depth-first walk over the product of the choices."""

    def __init__(
        self, space: Space, cost: CostModel, rules: Sequence[Rule], reject: Reject
    ) -> None:
        self._space, self._cost, self._rules, self._reject = space, cost, rules, reject
        read_order = [name for rule in rules for name in rule.reads if name in space.choices]
        self._names = tuple(dict.fromkeys([*read_order, *space.choices]))
        depth = {name: index for index, name in enumerate(self._names, 1)}
        self._known_at = [max((depth.get(n, 0) for n in rule.reads), default=0) for rule in rules]
        sizes = [len(space.choices[name]) for name in self._names]
        self._below = [math.prod(sizes[index:]) for index in range(len(sizes) + 1)]
        self._config: Config = space.complete(
            {name: values[0] for name, values in space.choices.items()}
        )

    def visit(self, depth: int, rule: int) -> Iterator[Config]:
        """Yield the configs below a point; the rules in front of `rule` have passed there."""
        while rule < len(self._rules) and self._known_at[rule] <= depth:
            if self._rules[rule].check(self._config, self._cost) is not None:
                self._reject(rule, self._below[depth], self._space.named(self._config))
                return
            rule += 1
        if depth == len(self._names):
            yield self._space.named(self._config)
            return
        name = self._names[depth]
        for value in self._space.choices[name]:
            self._config[name] = value
            yield from self.visit(depth + 1, rule)
        # Knobs that are not fixed yet show their first choice, so that examples are real configs.
        self._config[name] = self._space.choices[name][0]
