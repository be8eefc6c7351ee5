"""Limits, thresholds and state of the policy `rewind`."""

from __future__ import annotations

from dataclasses import dataclass

from mindtune.policies.settings import bounded
from mindtune.policies.state_class import state_class

__all__ = ["LONG", "RewindLimits", "RewindState", "RewindThresholds"]

LONG = 1_000_000
"""At this number of steps counting ends."""


@dataclass(frozen=True, kw_only=True)
class RewindLimits:
    """Hard bounds."""

    budget: int = bounded(3, 0, 100)
    """Rewinds in 1000 steps; Megatron's and TREError's loops around one bad state show why there
    must be an end. 0: never."""
    cooldown: int = bounded(4, 1, 10_000)
    """Steps between two rewinds."""


@dataclass(frozen=True, kw_only=True)
class RewindThresholds:
    """When a state counts as lost."""

    patience: int = bounded(5, 2, 1000)
    """Skipped non-finite steps, or overflows at the floor, in a row: half of what ends the run."""
    rate: int = bounded(12, 2, 48)
    """Non-finite steps within 48 that make a lost state."""
    stop_rate: int = bounded(24, 2, 48)
    """The same in a run that cannot go back, which then ends."""
    never_finite: int = bounded(3, 2, 1000)
    """First losses of a run that are not finite, and end it: one may be a bad batch."""
    soft_patience: int = bounded(16, 2, 10_000)
    """Steps that a lower learning rate has to end a divergence: two of its moves."""
    calm: int = bounded(8, 1, 1000)
    """Steps without a flag of the loss after which a divergence is over."""
    give_up_after: int = bounded(64, 4, 100_000)
    """Steps after which a divergence that cannot be rewound ends the run: the learning rate is at
    its floor by then (6 cuts, 8 steps apart)."""


@state_class(frozen=True, slots=True)
class RewindState:
    """What is being waited for, and what was done."""

    clock: int = 0
    """Steps lived through."""
    rewinds: tuple[int, ...] = ()
    """Clocks of the rewinds that count against the budget."""
    total: int = 0
    """Rewinds asked for in all."""
    since: int = LONG
    """Steps since the last one."""
    bad: int = 0
    """Steps in a row with a non-finite loss, or norm that no loss scale explains."""
    applied: int = 0
    """Of these in a row, the newest whose updates were applied."""
    bad_bits: int = 0
    """One bit per step, the newest lowest: non-finite ones since the last rewind."""
    was_finite: bool = False
    """Whether any loss was."""
    asked_step: int | None = None
    """Step at which a rewind was asked for last; None: what became of it was taken in."""
    refused: int = 0
    """Steps for which no rewind is asked for, since the last one was not carried out."""
    age: int = 0
    """Steps since a divergence was found; 0: there is none."""
    calm: int = 0
    """Steps since the loss was flagged last."""
    base: float = 0.0
    """Loss before the divergence."""
    opened_at: float = 0.0
    """Loss at which it was found."""
    peak: float = 0.0
    """Highest median of the newest losses since then."""
    losses: tuple[float, ...] = ()
    """Newest losses of the divergence."""
    deadline: int = 0
    """Age at which it counts as lost."""
