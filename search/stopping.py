"""When a search has found enough: a function of what is believed and of what a trial costs.

The belief is that of the sampler's model: how much each untried config is expected to improve on
the best one tried, weighted by the chance that it runs at all. With the belief as it stands, the
largest of these gains bounds what any number of further trials brings per trial, so that it alone
decides: k trials gain at most k times as much, and cost k times as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindtune.search.errors import SearchError

__all__ = ["Outlook", "StopRule", "reason_to_stop"]


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """When a further trial no longer pays."""

    min_gain: float = 0.02
    """Stop when no config is expected to gain more than this share of the best value. Below 2 to
    5 % two measurements of a training are a tie: see experiments/search_quality."""
    min_trials: int = 8
    """Never stop before: the model needs a few trials to know where it may be wrong."""
    training_s: float | None = None
    """How long the training that is tuned will take with the best config so far; a trial has to
    save more of it than it takes itself. None: not said, `min_gain` alone decides."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_gain <= 1.0:
            raise SearchError(f"stop.min_gain must be in [0, 1], but got {self.min_gain:g}.")
        if self.min_trials < 1:
            raise SearchError(f"stop.min_trials must be at least 1, but got {self.min_trials}.")
        if self.training_s is not None and not self.training_s > 0:
            raise SearchError(f"stop.training_time must be above 0, but got {self.training_s:g}.")


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is expected of the next trial."""

    gain: float
    """Largest expected improvement of an untried config over the best one, as the logarithm of
    the value."""
    num_trials: int
    """Finished so far."""
    trial_s: float | None
    """What a trial takes; None: unknown."""


def reason_to_stop(rule: StopRule, outlook: Outlook) -> str | None:
    """Return why no further trial pays, in words and numbers; None: one does."""
    if outlook.num_trials < rule.min_trials:
        return None
    share = -math.expm1(-max(outlook.gain, 0.0))
    if share < rule.min_gain:
        return (
            f"a further trial is expected to gain {share:.1%}, less than stop.min_gain = "
            f"{rule.min_gain:.1%}"
        )
    if rule.training_s is None or outlook.trial_s is None:
        return None
    saved = share * rule.training_s
    if saved >= outlook.trial_s:
        return None
    return (
        f"a further trial is expected to gain {share:.1%}, {saved:.0f} s of stop.training_time = "
        f"{rule.training_s:.0f} s, but takes {outlook.trial_s:.0f} s"
    )
