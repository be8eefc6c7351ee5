"""How good an order and a choice are, where differences within the noise do not count."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["TIE", "ceiling", "regret", "tie_aware_spearman"]

TIE = 0.1
"""Times within 10 % are a tie: repeats of one config differ by 3 to 22 % in the tables."""
_CHOICES = 3
_DRAWS = 200


def tie_aware_spearman(predicted: Any, measured: Any) -> float | None:
    """Return Spearman's rank correlation that does not judge the order inside ties.

    From the fastest on, configs within 10 % of the first of their band are tied, and are taken in
    the predicted order. None for fewer than three configs.
    """
    predicted, measured = np.asarray(predicted), np.asarray(measured)
    if len(measured) < 3:
        return None
    by_time = np.argsort(measured, kind="stable")
    order: list[int] = []
    while len(order) < len(measured):
        first = measured[by_time[len(order)]]
        band = [i for i in by_time[len(order) :] if measured[i] <= first * (1 + TIE)]
        order += sorted(band, key=lambda index: predicted[index])
    ranks = np.empty(len(order))
    ranks[order] = np.arange(len(order))
    own = np.argsort(np.argsort(predicted, kind="stable"), kind="stable")
    return float(np.corrcoef(ranks, own)[0, 1])


def regret(predicted: Any, measured: Any) -> float:
    """Return how much slower the best of the predicted top 3 is than the best of all."""
    predicted, measured = np.asarray(predicted), np.asarray(measured)
    chosen = np.argsort(predicted, kind="stable")[:_CHOICES]
    return float(measured[chosen].min() / measured.min() - 1.0)


def ceiling(measured: Any, noise: float) -> tuple[float | None, float]:
    """Return correlation and regret of a predictor of the true means, under log-normal noise.

    What was measured stands for the true means; 200 draws with a fixed seed, their means.
    """
    measured = np.asarray(measured)
    generator = np.random.default_rng(0)
    seen = [measured * np.exp(generator.normal(0.0, noise, len(measured))) for _ in range(_DRAWS)]
    orders = [tie_aware_spearman(measured, one) for one in seen]
    known = [order for order in orders if order is not None]
    return (
        float(np.mean(known)) if known else None,
        float(np.mean([regret(measured, one) for one in seen])),
    )
