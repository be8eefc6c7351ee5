"""A small Gaussian process over configs, in NumPy alone.

Model of log(value): minus the log of the cost model's prediction, with a slope that data may
correct, plus one smooth function per knob (main effects), plus an interaction of all knobs. The
variance of every part and of the noise is estimated by expectation maximisation under a weak
prior, since a handful of trials cannot carry more: a knob that does nothing soon stops being
explored. Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapter 2;
additive kernels: Duvenaud et al., NIPS 2011; variance components: Dempster, Laird and Rubin,
JRSS B 39, 1977.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindtune.search.encoding import Encoding, Flags, Floats, Indices, Places
from mindtune.search.noise import LaunchNoise
from mindtune.search.normal import log_mean_excess, normal_cdf, truncation

__all__ = [
    "MAX_TRIED",
    "Beliefs",
    "Posterior",
    "Surrogate",
    "believe_below",
    "fit",
    "informative",
    "log_expected_improvement",
    "probability_ok",
]

_LENGTH = 0.4
"""Distance, of an axis 0..1, over which an ordered knob's effect stays alike."""
_LIKENESS = 0.3
"""Correlation of the effects of two values of an unordered knob."""
_OFFSET_VARIANCE = 2.0**2
"""Of the unknown level of all values."""
_SLOPE_VARIANCE = 0.4**2
"""Of the slope over the log of the predicted cost, whose mean is -1."""
_FLOOR = 1e-6
_SAYS_NOTHING = 1e-9
"""Share of the variance below which what a bound takes away is nothing."""
MAX_TRIED = 120
"""Trials that a model should look at: the time that it takes grows with their cube."""


@dataclass(frozen=True)
class _Prior:
    """Variances expected before any trial, and how many observations each is worth."""

    knob: tuple[float, float]
    interaction: tuple[float, float]
    noise: tuple[float, float]


_VALUES = _Prior(knob=(0.15**2, 0.5), interaction=(0.07**2, 2.0), noise=(0.03**2, 4.0))
"""Of log(value): the calibrated cost model is off by 9 % of the step time in the median published
table, by more where a knob is what it knows least of; repeats of one config differ by 1 - 10 %.
With a knob's deviation of 0.25 searches take a trial more; 0.08 to 0.16 differ by chance alone."""
_LABELS = _Prior(knob=(0.5**2, 0.5), interaction=(0.5**2, 2.0), noise=(0.3**2, 4.0))
"""Of labels 1 (runs) and -1 (fails)."""
_RUNS = 0.7
"""Label expected of a config that nothing is known about."""


@dataclass(frozen=True)
class Posterior:
    """Belief about log(value) of each asked config."""

    mean: Floats
    deviation: Floats
    """Of the value itself, without a trial's noise."""
    best: float
    """Largest belief among the configs that were tried, those known by a bound left out."""
    noise: float
    """Variance of a trial's noise."""


@dataclass(frozen=True)
class Beliefs:
    """What is believed of configs that no trial has measured to its end.

    It counts beside the trials, but teaches no variance.
    """

    places: Places
    log_cost: Floats
    """log of the cost model's prediction, 0 where nothing is predicted."""
    log_values: Floats
    variances: Floats
    """Of their errors, beyond a trial's noise."""


@dataclass(frozen=True)
class Surrogate:
    """What trials have taught: see `fit`."""

    encoding: Encoding
    tried: Places
    log_values: Floats
    log_cost: Floats
    variances: Floats
    """Of each knob's effect, and of the interaction."""
    noise: float
    """Variance of a trial's noise."""

    def posterior(
        self, asked: Places, log_cost: Floats, believed: Sequence[Beliefs] = ()
    ) -> Posterior:
        """Return the belief about configs.

        Args:
            asked: Their places.
            log_cost: log of the cost model's prediction, 0 where nothing is predicted.
            believed: Counts beside the trials.
        """
        center, level = _origin(self.log_values, self.log_cost)
        places = np.concatenate([self.tried, *(own.places for own in believed)])
        values = np.concatenate([self.log_values, *(own.log_values for own in believed)])
        cost = np.concatenate([self.log_cost, *(own.log_cost for own in believed)]) - center
        errors = np.concatenate([np.zeros(len(self.tried)), *(own.variances for own in believed)])
        asked_cost = log_cost - center

        signal = np.tensordot(self.variances, _parts(self.encoding, places), axes=1)
        signal += _basis(cost)
        root = _inverse_root(signal + np.diag(self.noise + errors))
        weights = root.T @ (root @ (values + cost - level))
        cross = _covariance(self.encoding, self.variances, asked, places)
        cross += _OFFSET_VARIANCE + _SLOPE_VARIANCE * np.outer(asked_cost, cost)
        projected = root @ cross.T
        prior = self.variances.sum() + _OFFSET_VARIANCE + _SLOPE_VARIANCE * asked_cost**2
        variance = np.maximum(prior - (projected**2).sum(axis=0), 1e-12)
        beliefs = signal @ weights + level - cost
        return Posterior(
            mean=cross @ weights + level - asked_cost,
            deviation=np.sqrt(variance),
            best=float(beliefs[errors == 0].max()),
            noise=self.noise,
        )


def fit(
    encoding: Encoding,
    tried: Places,
    log_values: Floats,
    log_cost: Floats,
    repeated: LaunchNoise | None = None,
) -> Surrogate:
    """Return what trials teach: how much each knob does, and how much trials vary by themselves.

    Args:
        encoding: Of the space.
        tried: Places with a measured value, at least one, in the order of the trials.
        log_values: Their log(value).
        log_cost: log of the cost model's prediction, 0 where nothing is predicted.
        repeated: How much launches of one config differ, where that was measured.
    """
    center, level = _origin(log_values, log_cost)
    cost = log_cost - center
    expected = replace(_VALUES, noise=_expected_noise(repeated))
    variances, noise = _variances(
        expected, _parts(encoding, tried), _ranks(tried), _basis(cost), log_values + cost - level
    )
    return Surrogate(encoding, tried, log_values, log_cost, variances, noise)


def _expected_noise(repeated: LaunchNoise | None) -> tuple[float, float]:
    """Return the variance of noise expected, and how many observations that is worth.

    Repeats measure it, whatever made trials of other configs differ; the others' experience is
    left beside them as a single observation, since between trainings noise spans a factor of ten.
    """
    usual, weight = _VALUES.noise
    if repeated is None:
        return usual, weight
    freedom = repeated.freedom
    return (usual + freedom * repeated.total**2) / (1.0 + freedom), weight + freedom


def _origin(log_values: Floats, log_cost: Floats) -> tuple[float, float]:
    """Return the log cost and the residual that count as 0."""
    center = float(log_cost.mean())
    return center, float(np.median(log_values + log_cost - center))


def _basis(cost: Floats) -> Floats:
    """Return the covariance that level and slope over the predicted cost bring."""
    return np.asarray(_OFFSET_VARIANCE + _SLOPE_VARIANCE * np.outer(cost, cost))


def informative(log_values: Floats) -> Indices:
    """Return the indices of the trials that `fit` should look at, in order.

    All of them up to `MAX_TRIED`; of more the best half and the newest half.
    """
    if len(log_values) <= MAX_TRIED:
        return np.arange(len(log_values))
    half = MAX_TRIED // 2
    newest = np.arange(len(log_values) - half, len(log_values))
    best = np.argsort(-log_values, kind="stable")
    best = best[best < newest[0]][:half]
    return np.sort(np.concatenate([best, newest]))


def _likeness(encoding: Encoding) -> list[Floats]:
    """Return the likeness of any two values of each knob."""
    return [
        np.exp(-0.5 * (gaps / _LENGTH) ** 2) if ordered else np.where(gaps > 0, _LIKENESS, 1.0)
        for gaps, ordered in zip(encoding.gaps, encoding.is_ordered, strict=True)
    ]


def _parts(encoding: Encoding, tried: Places) -> Floats:
    """Return one likeness per knob and one of all knobs together, of shape (knobs + 1, n, n)."""
    alike = np.ones((len(encoding.names) + 1, len(tried), len(tried)))
    for column, table in enumerate(_likeness(encoding)):
        places = tried[:, column]
        alike[column] = table[places[:, None], places[None, :]]
        alike[-1] *= alike[column]
    return alike


def _covariance(encoding: Encoding, variances: Floats, asked: Places, tried: Places) -> Floats:
    """Return the sum of the parts between two sets of points, of shape (asked, tried)."""
    shape = len(asked), len(tried)
    total, product, alike = np.zeros(shape), np.full(shape, variances[-1]), np.empty(shape)
    for column, table in enumerate(_likeness(encoding)):
        by_value, values = table[:, tried[:, column]], asked[:, column]
        product *= np.take(by_value, values, axis=0, out=alike, mode="clip")
        total += np.take(variances[column] * by_value, values, axis=0, out=alike, mode="clip")
    total += product
    return total


def _inverse_root(covariance: Floats) -> Floats:
    """Return the inverse of the lower root: applied to many columns at the price of a product."""
    return np.asarray(np.linalg.inv(np.linalg.cholesky(covariance)))


def _ranks(tried: Places) -> Floats:
    """Return how many effects each part has: one per level of a knob, one per trial."""
    return np.array([*(len(np.unique(places)) for places in tried.T), len(tried)], dtype=float)


def _variances(
    expected: _Prior, parts: Floats, ranks: Floats, basis: Floats, residual: Floats
) -> tuple[Floats, float]:
    """Return the variance of every part and of the noise (EM, with a prior on each)."""
    count = len(residual)
    prior, weight = np.full(len(parts), expected.knob[0]), np.full(len(parts), expected.knob[1])
    prior[-1], weight[-1] = expected.interaction
    noise_prior, noise_weight = expected.noise
    variances, noise = prior.copy(), noise_prior
    for _ in range(15 if count <= 100 else 5):
        covariance = np.tensordot(variances, parts, axes=1) + basis + noise * np.eye(count)
        inverse = np.linalg.inv(covariance)
        solved = inverse @ residual
        explained = np.einsum("kij,ij->k", parts, inverse) - np.einsum(
            "i,kij,j->k", solved, parts, solved, optimize=True
        )
        left = float(np.trace(inverse) - solved @ solved)
        variances = np.maximum(
            (weight * prior + ranks * variances - variances**2 * explained) / (weight + ranks),
            _FLOOR,
        )
        noise = max(
            (noise_weight * noise_prior + count * noise - noise**2 * left)
            / (noise_weight + count),
            _FLOOR,
        )
    return variances, noise


def probability_ok(encoding: Encoding, tried: Places, succeeded: Flags, asked: Places) -> Floats:
    """Return the probability that each asked config runs, from which ones did.

    Least-squares classification over the same parts: it learns which knob makes them fail.
    """
    if not len(tried) or bool(np.all(succeeded)):
        return np.ones(len(asked))
    labels = np.where(succeeded, 1.0, -1.0) - _RUNS
    parts = _parts(encoding, tried)
    variances, noise = _variances(_LABELS, parts, _ranks(tried), np.zeros(parts.shape[1:]), labels)
    root = _inverse_root(np.tensordot(variances, parts, axes=1) + noise * np.eye(len(labels)))
    cross = _covariance(encoding, variances, asked, tried)
    projected = root @ cross.T
    mean = _RUNS + projected.T @ (root @ labels)
    variance = np.maximum(variances.sum() - (projected**2).sum(axis=0), 0.0)
    return normal_cdf(mean / np.sqrt(noise + variance))


def believe_below(
    posterior: Posterior, places: Places, log_cost: Floats, log_bounds: Floats
) -> Beliefs:
    """Return what is known of configs whose trial would have come to no more than a bound.

    Beside the posterior, each alone, it gives mean and variance of the truncated normal
    distribution: as censored runs count in Hutter et al., Bayesian optimization with censored
    response data, arXiv 1310.1947, with their uncertainty kept (expectation propagation, one
    pass: Rasmussen and Williams, chapter 3.6). A bound that was expected anyway says next to
    nothing and has a variance without end.

    Args:
        posterior: Of the configs, without these bounds.
        places: Theirs.
        log_cost: log of their predicted costs.
        log_bounds: log(value) that a trial of each cannot have exceeded.
    """
    deviation = np.sqrt(posterior.deviation**2 + posterior.noise)
    falls, narrows = truncation((log_bounds - posterior.mean) / deviation)
    narrows = np.maximum(narrows, _SAYS_NOTHING)
    return Beliefs(
        places=places,
        log_cost=log_cost,
        log_values=posterior.mean - deviation * falls / narrows,
        variances=deviation**2 * (1.0 - narrows) / narrows,
    )


def log_expected_improvement(posterior: Posterior) -> Floats:
    """Return log of by how much (log units) each config is expected to beat the best one tried."""
    score = (posterior.mean - posterior.best) / posterior.deviation
    return np.asarray(np.log(posterior.deviation) + log_mean_excess(score))
