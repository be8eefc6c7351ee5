"""Lines for decisions.jsonl: what was asked, what became of it, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mindtune.policies.policy import Verdict

__all__ = ["ActionRecord"]


@dataclass(frozen=True, kw_only=True)
class ActionRecord:
    """One decision; the fields are those of a line of decisions.jsonl.

    A record is given out when it is decided and again, with the same step, policy, action and
    requested value, once `acted` or `outcome` is known: the last one holds.
    """

    step: int
    """Step whose signals led to it."""
    policy: str
    """Who asked: a policy, or `arbiter` for what the arbiter does on its own account."""
    action: str
    """Class name of the action."""
    requested: float | str | None
    """Value of the set-point, or id of the event."""
    before: float | None = None
    """Value that acted before; None if no step reported one."""
    acted: float | None = None
    """Value that a later step reported; None until then."""
    verdict: Verdict
    reason: str
    evidence: Mapping[str, float | int | str | None] = field(default_factory=dict)
    outcome: str | None = None
    """Result of the check; None until it is known."""
    budget_left: int | None = None
    """Grants left in the current 1000 steps; None for events."""
