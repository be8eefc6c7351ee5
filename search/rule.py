"""What a rule is: a name, its words, the knobs that decide it, and a check that says why.

A hard rule rejects. A soft rule speaks against a config, which only orders, until the study
file's `constraints` set its limit: then the same check, with the user's number, rejects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mindtune.search.cost_model import CostModel
from mindtune.search.knobs import Config

__all__ = ["Check", "Rule", "SoftRule"]

Check = Callable[[Config, CostModel], str | None]
"""Complete config, cost model -> why it cannot work, in words and numbers; None: it can."""


@dataclass(frozen=True)
class Rule:
    """A hard rule."""

    name: str
    summary: str
    """The rule in words, for a report in which it never fired."""
    reads: tuple[str, ...]
    """Knobs that decide it; the rule is asked as soon as they are known."""
    check: Check


@dataclass(frozen=True)
class SoftRule:
    """Experience, with the number from which on it speaks."""

    name: str
    summary: str
    reads: tuple[str, ...]
    limit: str
    """Key of `constraints`, and field of `Limits`, that makes it hard."""
    default: float
    """Number that the advice uses where the user sets none; its source stands in `advice.py`."""
    check: Callable[[Config, CostModel, float], str | None]
    """Complete config, cost model, number -> what speaks against the config; None: nothing."""

    def set_limit(self, cost: CostModel) -> float | None:
        """Return the user's own number; None: not set, the rule is advice."""
        limit: float | None = getattr(cost.facts.limits, self.limit)
        return None if limit is None or limit is False else limit

    def advise(self, config: Config, cost: CostModel) -> str | None:
        """Return what speaks against a config; None: nothing, or it is a hard rule here."""
        if self.set_limit(cost) is not None:
            return None
        return self.check(config, cost, self.default)

    @property
    def hard(self) -> Rule:
        """The rule that rejects where the user has set the limit."""

        def check(config: Config, cost: CostModel) -> str | None:
            limit = self.set_limit(cost)
            if limit is None:
                return None
            reason = self.check(config, cost, limit)
            return None if reason is None else f"{reason} (constraints.{self.limit})"

        return Rule(
            self.name, f"{self.summary}, if constraints.{self.limit} is set", self.reads, check
        )
