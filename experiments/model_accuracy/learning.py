"""What other tables teach about the rates: mean and spread of each, over groups of rows.

An empirical Bayes estimate: every group is fitted with the current prior, and the prior moves to
what the groups say, each group voting on a rate as far as its rows determine it (one minus
posterior over prior variance), until a few rounds have passed. Neutral values, which come from the
formulas and the literature alone, keep a weight of their own, so that a rate about which no table
says anything stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from mindtune.search.calibration import Prior, fit
from mindtune.search.cost_model import MEMORY_MISFIT, TIME_MISFIT
from mindtune.search.memory_model import MemoryRates
from mindtune.search.time_model import TimeRates

__all__ = ["NEUTRAL_MEMORY", "NEUTRAL_TIME", "Lesson", "learn"]

_ROUNDS = 4


def _prior(means: Any, spreads: Any, misfit: float) -> Prior:
    return Prior(tuple(np.log(astuple(means)).tolist()), tuple(astuple(spreads)), misfit)


NEUTRAL_TIME = _prior(
    TimeRates(
        compute=2.0, attention=3.0, traffic=3.0, near_exchange=1.5, far_exchange=2.0, context=1.5,
        pipeline=1.5, expert=2.0, launch=1.0, synchronization=1.0, pipelined_synchronization=1.0,
        message=1.0, stall=0.02, sharded_stall=0.02,
        near_gradients=1.5, far_gradients=1.5, optimizer=2.0, step=1.0,
    ),
    TimeRates(
        compute=0.3, attention=0.4, traffic=0.5, near_exchange=0.7, far_exchange=0.8, context=0.8,
        pipeline=0.8, expert=0.8, launch=0.8, synchronization=0.8, pipelined_synchronization=1.2,
        message=1.2, stall=2.5, sharded_stall=2.5,
        near_gradients=1.0, far_gradients=1.0, optimizer=0.8, step=0.8,
    ),
    TIME_MISFIT,
)  # fmt: skip
"""Round numbers: half the peak, links at two thirds of their speed."""

NEUTRAL_MEMORY = _prior(
    MemoryRates(
        states=1.0, buffers=1.0, activations=1.0, gathered=0.3, logits=1.0, fixed=1.0,
    ),
    MemoryRates(
        states=0.02, buffers=0.5, activations=0.2, gathered=0.7, logits=0.4, fixed=0.8,
    ),
    MEMORY_MISFIT,
)  # fmt: skip
"""What the tensors take, and that tensors of states are what they are."""


@dataclass(frozen=True)
class Lesson:
    """The rows of one group."""

    forecast: Any
    log_measured: Any


def learn(lessons: Sequence[Lesson], start: Prior, noise: float, *, weight: float = 3.0) -> Prior:
    """Return the prior that the lessons teach.

    Args:
        lessons: Groups of other tables.
        start: Where the rates stand before.
        noise: Scale of the measurements' relative error.
        weight: Groups that the start counts as, for rates of a spread of 0.3 and more; rates
            that are known better count for more.
    """
    first = np.array(start.means)
    widest = np.array(start.spreads)
    kept = weight * (0.3 / np.minimum(widest, 0.3)) ** 2
    prior = start
    for _ in range(_ROUNDS if lessons else 0):
        fits = [fit(one.forecast, one.log_measured, prior, noise) for one in lessons]
        rates = np.array([one.log_rates for one in fits])
        variances = np.array([one.variances for one in fits])
        votes = np.clip(1.0 - variances / np.array(prior.spreads) ** 2, 1e-9, 1.0)
        total = votes.sum(axis=0)
        means = ((votes * rates).sum(axis=0) + kept * first) / (total + kept)
        spread = votes * ((rates - means) ** 2 + variances)
        squares = (spread.sum(axis=0) + weight * widest**2) / (total + weight)
        spreads = np.minimum(np.sqrt(squares), 2 * widest)
        prior = Prior(tuple(means.tolist()), tuple(spreads.tolist()), start.misfit)
    return prior
