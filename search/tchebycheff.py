"""Several objectives as one, by other weights in every trial, so that trials spread over a front.

The augmented Tchebycheff function of ParEGO (Knowles, IEEE Transactions on Evolutionary
Computation 10(1), 2006): what is lost on the best known value of the objective that is furthest
from it, plus a little of all losses, so that no dominated config is as good as the one that
dominates it. Its maximum for some weights is any point of the front, in its hollows too, which no
weighted mean would reach. Weights are drawn anew for every trial, by its number.

Losses are those of logarithms, like everything that the sampler's model sees, in units of what the
front spans: a stability between 0.90 and 0.99 counts as much as a speed between 100 and 200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindtune.search.confirming import TIE
from mindtune.search.encoding import Flags, Floats
from mindtune.search.history import Attempt

__all__ = ["Scalarized", "draw_weights", "scalarize"]

_AUGMENTED = 0.05
"""Weight of the sum of all losses, as in the source."""


@dataclass(frozen=True)
class Scalarized:
    """Attempts with one value each, to be maximized."""

    tried: tuple[Attempt, ...]
    speed_share: float
    """How far the value follows the first objective where that is what it loses by: factor of the
    predicted log cost that its logarithm falls with."""


def draw_weights(seed: int, number: int, count: int) -> Floats:
    """Return the weights of a trial: positive, their sum is 1, every such choice as likely.

    Args:
        seed: Of the sampler.
        number: Of the trial.
        count: Of the objectives.
    """
    return np.random.default_rng([seed, number, count]).dirichlet(np.ones(count))


def scalarize(tried: Sequence[Attempt], signs: Sequence[float], weights: Floats) -> Scalarized:
    """Return attempts of a study of several objectives with the one value that they have here.

    Without a positive value of every objective, an attempt that ended ok has failed.

    Args:
        tried: In any order.
        signs: By objective: 1 to be maximized, -1 to be minimized. The first one is what the cost
            model predicts, up to a factor.
        weights: By objective.
    """
    logs = [_logs(attempt, signs) for attempt in tried]
    measured = np.array([own for own in logs if own is not None])
    if not len(measured):
        return Scalarized(tuple(replace(a, value=None) for a in tried), 1.0)
    front = measured[_is_undominated(measured)]
    best = front.max(axis=0)
    # What differs by less is a tie, which must not be blown up to a whole front.
    span = np.maximum(best - front.min(axis=0), TIE)
    scale = weights / weights.max() * span[0] / span

    def value(attempt: Attempt, own: Floats | None) -> float | None:
        if own is None:
            return 0.0 if attempt.outcome == "ok" else None
        losses = scale * (best - own)
        return float(np.exp(-losses.max() - _AUGMENTED * losses.sum()))

    values = [value(attempt, own) for attempt, own in zip(tried, logs, strict=True)]
    return Scalarized(
        tuple(replace(a, value=v) for a, v in zip(tried, values, strict=True)), float(scale[0])
    )


def _logs(attempt: Attempt, signs: Sequence[float]) -> Floats | None:
    """Return the logarithms of an attempt's objectives, larger is better; None: it has none."""
    own = np.array(attempt.objectives if attempt.outcome == "ok" else (), dtype=float)
    if len(own) != len(signs) or not (np.isfinite(own) & (own > 0)).all():
        return None
    return np.asarray(np.array(signs) * np.log(own))


def _is_undominated(points: Floats) -> Flags:
    """Return which points no other is as good as everywhere, and better somewhere."""
    as_good = (points[:, None] >= points[None]).all(axis=2)
    better = (points[:, None] > points[None]).any(axis=2)
    return np.asarray(~(as_good & better).any(axis=0))
