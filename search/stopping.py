"""When a search has found enough: a function of what is believed and of what a trial costs.

The belief is that of the sampler's model: how much each untried config is expected to improve on
the best one tried, weighted by the chance that it runs at all. It looks one trial ahead. What
that trial teaches may show a way to more, so that a small gain bounds nothing for certain: the
model can be wrong about a knob that it has hardly seen turned. Therefore the rule asks for
evidence twice: for so many trials that every knob may have been turned once, and for several
results in a row none of which has changed the verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindtune.search.errors import SearchError

__all__ = ["Outlook", "StopRule", "reason_to_stop"]

_FEWEST = 8
"""The model's variances rest on a few trials, however few knobs there are."""


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """When a further trial no longer pays."""

    min_gain: float = 0.02
    """Stop when no config is expected to gain more than this share: 1 - best value so far / value
    expected. Where the value is a speed, that is the share of the training's time that the better
    config saves. Below 2 to 5 % two measurements of a training are a tie: see
    experiments/search_quality."""
    min_trials: int | None = None
    """Never stop before. None: the base and one trial per knob that is searched, at least 8."""
    patience: int = 3
    """After so many results in a row no further trial must have paid."""
    training_s: float | None = None
    """How long the training that is tuned will take with the best config so far; a trial has to
    save more of it than it takes itself. None: not said, `min_gain` alone decides."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_gain <= 1.0:
            raise SearchError(f"stop.min_gain must be in [0, 1], but got {self.min_gain:g}.")
        if self.min_trials is not None and self.min_trials < 1:
            raise SearchError(f"stop.min_trials must be at least 1, but got {self.min_trials}.")
        if self.patience < 1:
            raise SearchError(f"stop.patience must be at least 1, but got {self.patience}.")
        if self.training_s is not None and not self.training_s > 0:
            raise SearchError(f"stop.training_time must be above 0, but got {self.training_s:g}.")


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is expected of the next trial."""

    gains: tuple[float, ...]
    """Largest expected improvement of an untried config over the best one, as the logarithm of
    the value: one per result that it was asked after, the newest last."""
    num_trials: int
    """Finished so far."""
    num_knobs: int
    """Searched, those that follow from others not counted."""
    trial_s: float | None
    """What a trial takes; None: unknown."""


def reason_to_stop(rule: StopRule, outlook: Outlook) -> str | None:
    """Return why no further trial pays, in words and numbers; None: one does."""
    least = rule.min_trials
    if least is None:
        least = max(_FEWEST, 1 + outlook.num_knobs)
    latest = outlook.gains[-rule.patience :]
    if outlook.num_trials < least or len(latest) < rule.patience:
        return None
    reasons = [_reason(rule, gain, outlook.trial_s) for gain in latest]
    if None in reasons:
        return None
    if rule.patience == 1:
        return reasons[-1]
    return f"{reasons[-1]}; none paid after any of the last {rule.patience} results"


def _reason(rule: StopRule, gain: float, trial_s: float | None) -> str | None:
    share = -math.expm1(-max(gain, 0.0))
    if share < rule.min_gain:
        return (
            f"a further trial is expected to gain {share:.1%}, less than stop.min_gain = "
            f"{rule.min_gain:.1%}"
        )
    if rule.training_s is None or trial_s is None:
        return None
    saved = share * rule.training_s
    if saved >= trial_s:
        return None
    return (
        f"a further trial is expected to gain {share:.1%}, {saved:.0f} s of stop.training_time = "
        f"{rule.training_s:.0f} s, but takes {trial_s:.0f} s"
    )
