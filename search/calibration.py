"""Fits the rates of a formula to a few measurements, starting from what is usual.

Theory of operation: a prediction is a sum of parts, each an amount times its rate. The logarithms
of the rates have a normal prior (what other trainings showed, and how widely it varied), those of
measured over predicted are Student's t with 4 degrees of freedom, so that an outlier counts
little. Of some trials it is only known that they exceeded a size, as those that ran out of memory:
they count with the probability of that, the distribution function in place of the density (a
censored observation: Tobin, Econometrica 26, 1958). Its logarithm falls no faster than that of a
power, so that one trial that failed for want of memory by a fault of its own cannot spoil the
rates. The most probable rates are found by damped Gauss-Newton steps. A rate about which the
measurements say nothing stays at its prior; with three measurements most do, and still the fit is
defined. Where the median measurement is further from the prior's prediction than the prior is
trusted with, the machine or the counting is another than the formula's, and all means first move
there; what was only exceeded is not trusted with that. How far off predictions still are, follows
from what the measurements leave open about the rates, and from their own errors. Equal inputs give
equal outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Flags = NDArray[np.bool_]
    Floats = NDArray[np.float64]
    Forecast = Callable[[Floats], tuple[Floats, Floats]]

__all__ = ["Covariance", "Doubt", "Fit", "Prior", "fit"]

Covariance = tuple[tuple[float, ...], ...]
"""Of the logarithms of the rates, row by row."""

_FREEDOM = 4.0
_MISFIT_COUNT = 4.0
"""Measurements that the usual misfit counts as, beside the study's own."""
_FURTHEST = 3.0
"""Usual misfits from which on an error counts no more: a reading may be of something else."""
_MAX_STEPS = 25
_LONGEST_STEP = 1.5
"""Largest change of a rate's logarithm in one step."""


@dataclass(frozen=True)
class Doubt:
    """What is open about predictions."""

    covariance: Covariance
    """Of the logarithms of the rates."""
    misfit: float
    """Standard deviation of log(measured / predicted) that is left with the best of rates."""

    def spreads(self, slopes: Floats) -> Floats:
        """Return the standard deviation of log(measured / predicted) of configs, shape (n,).

        Args:
            slopes: Derivatives of the log predictions by the log rates, shape (n, rates).
        """
        import numpy as np  # noqa: PLC0415 - `space` must start without it

        variances = ((slopes @ np.array(self.covariance)) * slopes).sum(axis=1)
        return np.asarray(np.sqrt(np.maximum(variances, 0.0) + self.misfit**2))


@dataclass(frozen=True)
class Prior:
    """What is usual: mean and standard deviation of the logarithm of each rate."""

    means: tuple[float, ...]
    spreads: tuple[float, ...]
    misfit: float
    """Standard deviation of log(measured / predicted) that is left with the best of rates."""

    @property
    def doubt(self) -> Doubt:
        """What is open before any measurement."""
        rows = range(len(self.spreads))
        covariance = tuple(
            tuple(self.spreads[row] ** 2 if row == column else 0.0 for column in rows)
            for row in rows
        )
        return Doubt(covariance, self.misfit)


@dataclass(frozen=True)
class Fit:
    """The most probable rates."""

    log_rates: tuple[float, ...]
    doubt: Doubt
    """By the curvature at the optimum; the prior's where nothing was learnt."""

    @property
    def variances(self) -> tuple[float, ...]:
        """Of the logarithms of the rates, each alone."""
        return tuple(row[index] for index, row in enumerate(self.doubt.covariance))


def fit(
    forecast: Forecast,
    log_measured: Floats,
    prior: Prior,
    noise: float,
    *,
    exceeds: Flags | None = None,
    trusted: float = math.inf,
) -> Fit:
    """Return the most probable rates.

    Args:
        forecast: From the logarithms of the rates to those of the predictions, shape (n,), and
            their derivatives, shape (n, rates).
        log_measured: Logarithms of what was measured, shape (n,).
        prior: What is usual.
        noise: Scale of the measurements' relative error.
        exceeds: Which of them are only known to exceed that, shape (n,); None: none.
        trusted: Factor by which the prior's predictions may be off as they are.
    """
    import numpy as np  # noqa: PLC0415 - `space` must start without it

    known = np.ones(len(log_measured), dtype=bool) if exceeds is None else ~exceeds
    means = np.array(prior.means)
    if known.any():
        away = float(np.median((log_measured - forecast(means)[0])[known]))
        if abs(away) > math.log(trusted):
            means = means + away
    precision = np.diag(np.array(prior.spreads) ** -2.0)

    def loss(rates: Floats, errors: Floats) -> float:
        misfit = 0.5 * (_FREEDOM + 1) * np.log1p(errors[known] ** 2 / _FREEDOM).sum()
        misfit -= _log_below(-errors[~known])[0].sum()
        return float(misfit + 0.5 * (rates - means) @ precision @ (rates - means))

    def pull(errors: Floats) -> tuple[Floats, Floats]:
        """Return by how much each measurement pulls its prediction up, and how firmly."""
        weights = (_FREEDOM + 1) / (_FREEDOM + errors**2)
        forces = weights * errors
        _, forces[~known], weights[~known] = _log_below(-errors[~known])
        return forces / noise, weights / noise**2

    rates, damping = means, 1e-3
    predicted, slopes = forecast(rates)
    errors = (log_measured - predicted) / noise
    best = loss(rates, errors)
    for _ in range(_MAX_STEPS):
        forces, weights = pull(errors)
        curvature = (slopes.T * weights) @ slopes + precision
        downhill = slopes.T @ forces - precision @ (rates - means)
        gain = 0.0
        while damping < 1e6:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
            tried = rates + np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)
            predicted, slopes_there = forecast(tried)
            errors_there = (log_measured - predicted) / noise
            there = loss(tried, errors_there)
            if there <= best:
                gain = best - there
                rates, slopes, errors, best = tried, slopes_there, errors_there, there
                break
            damping *= 4
        damping = max(damping / 4, 1e-6)
        if gain < 1e-7:
            break
    weights = pull(errors)[1]
    covariance = np.linalg.inv((slopes.T * weights) @ slopes + precision)
    # What the measurements say of the misfit: their errors, but for what the rates made of them.
    explained = ((slopes @ covariance) * slopes).sum(axis=1) * weights
    squares = np.minimum(np.abs(noise * errors), _FURTHEST * prior.misfit) ** 2
    freedom = _MISFIT_COUNT + (1.0 - explained)[known].sum()
    misfit = math.sqrt((_MISFIT_COUNT * prior.misfit**2 + squares[known].sum()) / freedom)
    doubt = Doubt(tuple(map(tuple, covariance.tolist())), misfit)
    return Fit(tuple(rates.tolist()), doubt)


def _log_below(score: Floats) -> tuple[Floats, Floats, Floats]:
    """Return log P(x <= score) of Student's t with 4 degrees of freedom, slope, and curvature.

    With u = score / sqrt(4 + score^2) the probability is (1 + u)^2 (2 - u) / 4, exact far into
    the lower tail if 1 + u is taken as (1 - u^2) / (1 - u). There the logarithm bends the other
    way; a curvature below 0 counts as 0, since a fit must not become less certain by it.
    """
    import numpy as np  # noqa: PLC0415 - `space` must start without it

    size = 4.0 + score**2
    share = score / np.sqrt(size)
    rest = np.where(share < 0, 4.0 / size / (1.0 - np.minimum(share, 0.0)), 1.0 + share)
    log_probability = 2.0 * np.log(rest) + np.log(2.0 - share) - math.log(4.0)
    slope = np.exp(math.log(12.0) - 2.5 * np.log(size) - log_probability)
    curvature = slope * np.maximum(slope + 5.0 * score / size, 0.0)
    return log_probability, slope, curvature
