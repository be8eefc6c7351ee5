"""The normal distribution, accurate far into its lower tail."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["log_mean_excess", "normal_cdf", "truncation"]

Floats = NDArray[np.float64]

_FAR = 30.0
"""Deviations below the mean from which on series replace differences of nearly equal numbers."""
_LOG_ROOT = 0.5 * math.log(2.0 * math.pi)
_erfc = np.vectorize(math.erfc, otypes=[float])


def normal_cdf(score: Floats) -> Floats:
    """Return the standard normal distribution function."""
    return np.asarray(0.5 * _erfc(-score / math.sqrt(2.0)))


def log_mean_excess(score: Floats) -> Floats:
    """Return log E[max(score + x, 0)] of a standard normal x.

    Ament et al., Unexpected improvements to expected improvement, NeurIPS 2023: the expectation
    itself is 0 in floating point where its logarithm still tells two scores apart.
    """
    near = np.maximum(score, -1.0)
    plain = np.log(_density(near) + near * normal_cdf(near))
    # The density's logarithm apart, 1 - size * P(x > size) / density(size) is left.
    size = np.clip(-score, 1.0, _FAR)
    tail = np.log1p(-size * normal_cdf(-size) / _density(size))
    beyond = np.maximum(-score, _FAR)
    series = np.log1p(-3.0 * beyond**-2 + 15.0 * beyond**-4) - 2.0 * np.log(beyond)
    rest = np.where(score < -_FAR, series, tail)
    return np.where(score > -1.0, plain, rest - 0.5 * score**2 - _LOG_ROOT)


def truncation(score: Floats) -> tuple[Floats, Floats]:
    """Return how a bound moves and narrows a standard normal x, given x <= score.

    Returns:
        How far the mean falls, and how far the variance falls below 1.
    """
    near = np.maximum(score, -_FAR)
    falls = _density(near) / normal_cdf(near)
    return falls, falls * (falls + near)


def _density(score: Floats) -> Floats:
    return np.asarray(np.exp(-0.5 * score**2 - _LOG_ROOT))
