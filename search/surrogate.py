"""A small Gaussian process over configs, in NumPy alone.

Model of log(value): prior mean from the cost model with a slope that data may correct, plus an
additive part (one smooth function per knob: main effects) and an interaction part (all knobs
together). Scale, share and noise are chosen by marginal likelihood from a grid, since a handful
of trials cannot carry more. Rasmussen and Williams, Gaussian Processes for Machine Learning,
2006, chapters 2 and 5; additive kernels: Duvenaud et al., NIPS 2011.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from mindtune.search.encoding import Encoding, Flags, Floats, Points

__all__ = ["Posterior", "expected_improvement", "fit_posterior", "normal_cdf", "probability_ok"]

_LENGTH = 0.6
"""Distance, of an axis 0..1, over which an ordered knob's effect stays alike."""
_LIKENESS = 0.2
"""Correlation of the effects of two values of an unordered knob."""
_SCALES = (0.1, 0.2, 0.4, 0.8)
"""Standard deviations of the residual, in log units."""
_ADDITIVE = (0.5, 0.9)
_NOISES = (0.01, 0.03, 0.1)
"""Standard deviations of one trial, in log units: repeats differ by 1 - 10 %."""
_OFFSET = 2.0
"""Standard deviation of the unknown level of all values."""
_SLOPE = 0.4
"""Standard deviation of the slope over the cost model's prediction, whose mean is -1."""


@dataclass(frozen=True)
class Posterior:
    """Belief about log(value) of each asked config."""

    mean: Floats
    deviation: Floats
    """Of the value itself, without a trial's noise."""
    best: float
    """Largest belief among the configs that were tried."""


def _kernel(gaps: Floats, ordered: Flags, additive: float) -> Floats:
    if not len(gaps):
        return np.ones(gaps.shape[1:])
    alike = np.empty_like(gaps)
    alike[ordered] = np.exp(-0.5 * (gaps[ordered] / _LENGTH) ** 2)
    alike[~ordered] = np.where(gaps[~ordered] > 0, _LIKENESS, 1.0)
    return np.asarray(additive * alike.mean(axis=0) + (1 - additive) * alike.prod(axis=0))


def fit_posterior(
    encoding: Encoding,
    tried: Points,
    log_values: Floats,
    asked: Points,
    *,
    tried_log_cost: Floats,
    asked_log_cost: Floats,
) -> Posterior:
    """Return the belief about `asked` after the trials.

    Args:
        encoding: Of the space.
        tried: Points with a measured value, at least one.
        log_values: Their log(value).
        asked: Points to judge.
        tried_log_cost: log of the cost model's prediction, 0 where nothing is predicted.
        asked_log_cost: The same for `asked`.
    """
    center = float(tried_log_cost.mean())
    cost_tried, cost_asked = tried_log_cost - center, asked_log_cost - center
    level = float(np.median(log_values + cost_tried))
    residual = log_values + cost_tried - level
    gaps_tried, gaps_asked = encoding.distances(tried, tried), encoding.distances(asked, tried)
    ordered = encoding.is_ordered
    basis = _OFFSET**2 + _SLOPE**2 * np.outer(cost_tried, cost_tried)
    best_fit: tuple[float, float, float, Floats, Floats] | None = None
    for additive in _ADDITIVE:
        shape = _kernel(gaps_tried, ordered, additive)
        for scale, noise in itertools.product(_SCALES, _NOISES):
            covariance = scale**2 * shape + basis + noise**2 * np.eye(len(residual))
            factor = np.linalg.cholesky(covariance)
            half = np.linalg.solve(factor, residual)
            likelihood = -0.5 * float(half @ half) - float(np.log(np.diag(factor)).sum())
            # A weak preference for the middle of the grid: few trials say little about it.
            likelihood -= 0.5 * (math.log(scale / 0.25) ** 2 + math.log(noise / 0.03) ** 2) / 2
            if best_fit is None or likelihood > best_fit[0]:
                best_fit = (likelihood, additive, scale, factor, half)
    assert best_fit is not None  # noqa: S101 - the grid is not empty
    _, additive, scale, factor, half = best_fit
    cross = scale**2 * _kernel(gaps_asked, ordered, additive)
    cross += _OFFSET**2 + _SLOPE**2 * np.outer(cost_asked, cost_tried)
    weights = np.linalg.solve(factor.T, half)
    projected = np.linalg.solve(factor, cross.T)
    prior = scale**2 + _OFFSET**2 + _SLOPE**2 * cost_asked**2
    variance = np.maximum(prior - (projected**2).sum(axis=0), 1e-12)
    at_tried = scale**2 * _kernel(gaps_tried, ordered, additive) + basis
    believed = at_tried @ weights + level - cost_tried
    return Posterior(
        mean=cross @ weights + level - cost_asked,
        deviation=np.sqrt(variance),
        best=float(believed.max()),
    )


def probability_ok(encoding: Encoding, tried: Points, succeeded: Flags, asked: Points) -> Floats:
    """Return the probability that each asked config runs at all, from which ones did.

    Least-squares classification with the additive kernel and a prior of mostly running.
    """
    if not len(tried) or bool(np.all(succeeded)):
        return np.ones(len(asked))
    prior, noise, additive = 0.7, 0.3, 0.7
    ordered = encoding.is_ordered
    labels = np.where(succeeded, 1.0, -1.0) - prior
    own = _kernel(encoding.distances(tried, tried), ordered, additive)
    cross = _kernel(encoding.distances(asked, tried), ordered, additive)
    factor = np.linalg.cholesky(own + noise**2 * np.eye(len(labels)))
    projected = np.linalg.solve(factor, cross.T)
    mean = prior + projected.T @ np.linalg.solve(factor, labels)
    variance = np.maximum(1.0 - (projected**2).sum(axis=0), 0.0)
    return normal_cdf(mean / np.sqrt(noise**2 + variance))


def expected_improvement(posterior: Posterior) -> Floats:
    """Return by how much (log units) each config is expected to beat the best one tried."""
    gain = posterior.mean - posterior.best
    score = gain / posterior.deviation
    density = np.exp(-0.5 * score**2) / math.sqrt(2 * math.pi)
    return np.asarray(gain * normal_cdf(score) + posterior.deviation * density)


def normal_cdf(score: Floats) -> Floats:
    """Return the standard normal distribution function, to 1e-7.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17.
    """
    size = np.abs(score)
    t = 1.0 / (1.0 + 0.2316419 * size)
    series = t * (
        0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    )
    tail = np.exp(-0.5 * size**2) / math.sqrt(2 * math.pi) * series
    return np.where(score >= 0, 1.0 - tail, tail)
