"""What the arbiter holds a policy to on each knob that the policy may turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BUDGET_WINDOW", "KnobLimits"]

BUDGET_WINDOW = 1000
"""Steps over which a budget counts."""


@dataclass(frozen=True, kw_only=True)
class KnobLimits:
    """Bounds of one knob, and how the outcome of turning it is judged."""

    low: float
    """Smallest value that is ever granted."""
    high: float
    """Largest value that is ever granted."""
    max_factor: float
    """Largest ratio between a granted value and the one before it, in either direction."""
    cooldown: int
    """Steps between two grants, at least 1."""
    budget: int
    """Most grants in `BUDGET_WINDOW` steps; an undo is always possible and does not count."""
    check: Literal["loss", "throughput", "overflow", "skipped", "memory"]
    """loss: median loss after against before; throughput: median tokens per second; overflow:
    share of steps that overflowed; skipped: share of steps whose update was skipped for another
    reason; memory: median share of the device memory in use."""
    check_after: int
    """Steps after the grant over which the outcome is taken."""
    settle: int = 2
    """Steps that may pass until the step reports the granted value; then it is ineffective."""
    off: float | None = None
    """Value that switches the knob off, granted besides the bounds; None: it has none."""
    min_gain: float = 1.05
    """throughput only: the gain below which the move is undone (AdaptDL's and KungFu's gate)."""
