"""Limits, thresholds and state of the policy `gradient_norm`."""

from __future__ import annotations

from dataclasses import dataclass

from mindtune.policies.settings import bounded
from mindtune.policies.state_class import state_class

__all__ = ["GradientNormLimits", "GradientNormState", "GradientNormThresholds"]


@dataclass(frozen=True, kw_only=True)
class GradientNormLimits:
    """Hard bounds."""

    min_scale: float = bounded(1 / 64, 1e-6, 1.0)
    """Smallest scale: room for a rate that is 30 times too high."""
    cooldown: int = bounded(4, 1, 10_000)
    """Steps between two moves."""
    budget: int = bounded(16, 1, 1000)
    """Moves in 1000 steps: one descent to the floor and back, twice."""


@dataclass(frozen=True, kw_only=True)
class GradientNormThresholds:
    """When it acts, and how strongly."""

    factor: float = bounded(0.5, 0.1, 0.95)
    """Cut on trouble; its inverse is the raise (ReduceLROnPlateau's usual range is 0.1 - 0.5)."""
    patience: int = bounded(3, 1, 100)
    """Flags in a row that make trouble (MindFormers' skip rule: 2; Foundry's monitor: 5)."""
    rate: int = bounded(8, 2, 52)
    """Flags within the detectors' window of 48 that make trouble."""
    norm_ratio: float = bounded(5.0, 1.0, 1000.0)
    """Norm over its median that counts where no loss is measured: a level that shifts threefold
    (another batch size) is none."""
    patience_after_cut: int = bounded(8, 1, 1000)
    """Steps in which a cut may show its effect before the next one."""
    cold_factor: float = bounded(0.0625, 0.01, 0.95)
    """Cut on an explosion in the cold start."""
    cold_patience: int = bounded(6, 1, 1000)
    """Steps in which such a cut may show its effect."""
    recover_after: int = bounded(64, 4, 100_000)
    """Steps without trouble before a raise."""
    recover_after_cold: int = bounded(128, 4, 100_000)
    """The same after an explosion in the cold start."""
    relapse_factor: float = bounded(4.0, 1.0, 100.0)
    """Growth of that stretch with every raise that did not hold."""
    stop_after: int = bounded(10, 2, 10_000)
    """Non-finite values in a row that end the run (MindFormers' skip gate: 10)."""


@state_class(frozen=True, slots=True)
class GradientNormState:
    """What has been done, and how the run has been since."""

    losses: tuple[float, ...] = ()
    """Newest finite losses."""
    since_move: int | None = None
    """Steps since the last move; None: never moved."""
    healthy: int = 0
    """Steps in a row without trouble."""
    stretch: int = 0
    """Healthy steps that the next raise needs; 0: the default."""
    rescuing: int = 0
    """Steps for which an explosion in the cold start is still being answered."""
    cold: bool = False
    """Whether any trouble so far was one."""
    level: float = 0.0
    """Median loss at the last cut of the rescue."""
    lowest: float = 0.0
    """Loss that the rescue wants back."""
    first_flagged: float | None = None
    """First loss of the present row of flagged ones."""
    raised: bool = False
    """Whether the last move was a raise."""
    undone_step: int = 0
    """Step of the last undo that was taken in."""
    rewound_step: int | None = None
    """Step of the last return to an earlier state that was taken in."""
    bad_from: int = 0
    """Step of the first of the present row of non-finite values; 0: there is none."""
