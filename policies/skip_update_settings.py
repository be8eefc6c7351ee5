"""Limits, thresholds and state of the policy `skip_update`."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindtune.policies.settings import bounded
from mindtune.policies.state import ADDED
from mindtune.policies.state_class import state_class

__all__ = ["SkipUpdateLimits", "SkipUpdateState", "SkipUpdateThresholds"]


@dataclass(frozen=True, kw_only=True)
class SkipUpdateLimits:
    """Hard bounds."""

    max_skips: int = bounded(16, 1, 48)
    """Skipped updates within 48 steps after which the guard opens: half of the 32 steps that the
    detectors take to declare a shift, so that a burst of 10 bad batches is skipped whole."""
    max_often: int = bounded(24, 2, 1000)
    """Skipped updates in 1000 steps that are a part of the data: PaLM met about 20 bad spots in a
    whole run."""
    budget: int = bounded(64, 1, 1000)
    """Moves of the threshold in 1000 steps: 64 raises by a quarter are 6 decades."""


@dataclass(frozen=True, kw_only=True)
class SkipUpdateThresholds:
    """When an update is poisoned."""

    ratio: float = bounded(8.0, 2.0, 1e6)
    """Norm over its median that is skipped at least; a legal shift of the level (another batch
    size) is threefold."""
    deviations: float = bounded(4.5, 2.0, 100.0)
    """Deviations of the logarithm above that of the median that are skipped at least: independent
    log-normal norms exceed them in 1 step of 300,000, and at 5.5 a thirtyfold gradient passed on
    our reference workload, whose norms scatter by 50 %. 6 linear deviations (OLMo-core) they
    exceed, with a scatter of 35 %, in 1 of 1500, and a public healthy run (TrOCR, 700 records)
    reaches 22."""
    raise_ratio: float = bounded(1.25, 1.01, 10.0)
    """Target over threshold that moves the threshold up."""
    lower_ratio: float = bounded(2.0, 1.01, 100.0)
    """Threshold over target that moves it down."""
    lower_after: int = bounded(8, 1, 100_000)
    """Steps after a move, and from there on, at which a lower level is looked for: our reference
    workload's norms fall fourfold in the 20 steps after the guard is armed."""
    stop_after: int = bounded(20, 2, 48)
    """Updates in a row that a threshold of the user's may skip (MindFormers' gate skips for ever,
    or stops at 10)."""
    rest: int = bounded(128, 8, 100_000)
    """Steps for which an opened guard stays open: the detectors take over a disordered level
    within 128."""


@state_class(frozen=True, slots=True)
class SkipUpdateState:
    """Where the guard stands."""

    threshold: float | None = None
    """What it stands at, as asked for last; None: not armed."""
    since_move: int = 0
    """Steps since then."""
    skips: int = 0
    """One bit per step, the newest lowest: updates skipped by the threshold."""
    open_for: int = 0
    """Steps for which it still stays open."""
    openings: int = 0
    """How often it has opened."""
    moved: bool = False
    """Whether it was ever asked for: before that, a finite threshold is the user's."""
    recent: tuple[float, ...] = ()
    """Newest finite norms, flagged ones included."""
    rose: bool = field(default=False, metadata={ADDED: True})
    """Whether the last move was a raise."""
    often: float = field(default=0.0, metadata={ADDED: True})
    """Updates skipped by the guard, forgotten over 1000 steps."""
    skipped: tuple[float, ...] = field(default=(), metadata={ADDED: True})
    """Norms of the newest ones over the usual norm."""
    passes: float = field(default=0.0, metadata={ADDED: True})
    """Norm over the usual one up to which updates belong to the data of this run."""
