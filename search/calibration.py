"""Fits the rates of a formula to a few measurements, starting from what is usual.

Theory of operation: a prediction is a sum of parts, each an amount times its rate. The logarithms
of the rates have a normal prior (what other trainings showed, and how widely it varied), those of
measured over predicted are Student's t with 4 degrees of freedom, so that an outlier counts
little. The most probable rates are found by damped Gauss-Newton steps. A rate about which the
measurements say nothing stays at its prior; with three measurements most do, and still the fit is
defined. Where the median measurement is further from the prior's prediction than the prior is
trusted with, the machine or the counting is another than the formula's, and all means first move
there. Equal inputs give equal outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Forecast = Callable[[Floats], tuple[Floats, Floats]]

__all__ = ["Fit", "Prior", "fit"]

_FREEDOM = 4.0
_MAX_STEPS = 25
_LONGEST_STEP = 1.5
"""Largest change of a rate's logarithm in one step."""


@dataclass(frozen=True)
class Prior:
    """What is usual: mean and standard deviation of the logarithm of each rate."""

    means: tuple[float, ...]
    spreads: tuple[float, ...]


@dataclass(frozen=True)
class Fit:
    """The most probable rates."""

    log_rates: tuple[float, ...]
    variances: tuple[float, ...]
    """Of the logarithms, by the curvature at the optimum; the prior's where nothing was learnt."""


def fit(
    forecast: Forecast,
    log_measured: Floats,
    prior: Prior,
    noise: float,
    *,
    trusted: float = math.inf,
) -> Fit:
    """Return the most probable rates.

    Args:
        forecast: From the logarithms of the rates to those of the predictions, shape (n,), and
            their derivatives, shape (n, rates).
        log_measured: Logarithms of what was measured, shape (n,).
        prior: What is usual.
        noise: Scale of the measurements' relative error.
        trusted: Factor by which the prior's predictions may be off as they are.
    """
    import numpy as np  # noqa: PLC0415 - `space` must start without it

    means = np.array(prior.means)
    away = float(np.median(log_measured - forecast(means)[0]))
    if abs(away) > math.log(trusted):
        means = means + away
    precision = np.diag(np.array(prior.spreads) ** -2.0)

    def loss(rates: Floats, errors: Floats) -> float:
        misfit = 0.5 * (_FREEDOM + 1) * np.log1p((errors / noise) ** 2 / _FREEDOM).sum()
        return float(misfit + 0.5 * (rates - means) @ precision @ (rates - means))

    rates, damping = means, 1e-3
    predicted, slopes = forecast(rates)
    best = loss(rates, log_measured - predicted)
    for _ in range(_MAX_STEPS):
        errors = log_measured - predicted
        weights = (_FREEDOM + 1) / (_FREEDOM + (errors / noise) ** 2) / noise**2
        curvature = (slopes.T * weights) @ slopes + precision
        downhill = (slopes.T * weights) @ errors - precision @ (rates - means)
        gain = 0.0
        while damping < 1e6:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
            tried = rates + np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)
            predicted_there, slopes_there = forecast(tried)
            there = loss(tried, log_measured - predicted_there)
            if there <= best:
                gain = best - there
                rates, predicted, slopes, best = tried, predicted_there, slopes_there, there
                break
            damping *= 4
        damping = max(damping / 4, 1e-6)
        if gain < 1e-7:
            break
    weights = (_FREEDOM + 1) / (_FREEDOM + ((log_measured - predicted) / noise) ** 2) / noise**2
    covariance = np.linalg.inv((slopes.T * weights) @ slopes + precision)
    return Fit(tuple(rates.tolist()), tuple(np.diag(covariance).tolist()))
