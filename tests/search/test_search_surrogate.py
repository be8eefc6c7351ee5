"""The model's formulas against closed forms, far into the tails."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import integrate, stats

from mindtune.search.constraints import check
from mindtune.search.encoding import Encoding, following
from mindtune.search.facts import Cluster, StudyFacts, Training
from mindtune.search.history import Attempt
from mindtune.search.normal import log_mean_excess, normal_cdf
from mindtune.search.sampler import GuidedSampler
from mindtune.search.space import Space
from mindtune.search.surrogate import (
    _VALUES,
    Beliefs,
    Posterior,
    _variances,
    believe_below,
    fit,
    log_expected_improvement,
)

SIZES = Encoding({"micro_batch_size": (1, 2, 4, 8, 16), "env.A": ("x", "y")})


def places(*configs):
    return SIZES.places([{"micro_batch_size": size, "env.A": mode} for size, mode in configs])


def posterior(mean, deviation, *, best=0.0, noise=0.0):
    return Posterior(np.array(mean, float), np.array(deviation, float), best, noise)


def test_the_normal_distribution_function_is_exact_far_into_the_tail():
    scores = np.linspace(-37.0, 9.0, 93)
    assert normal_cdf(scores) == pytest.approx(stats.norm.cdf(scores), rel=1e-12)


@pytest.mark.parametrize(
    "score", [6.0, 0.5, 0.0, -0.99, -1.01, -3.0, -6.0, -15.0, -29.9, -30.1, -100.0, -1e4]
)
def test_the_expected_excess_has_a_logarithm_however_small_it_is(score):
    # E[max(score + x, 0)] = density(score) * integral of u exp(score u - u^2 / 2).
    end = 12.0 + 2.0 * max(score, 0.0) if score > -1 else 60.0 / -score
    found, _ = integrate.quad(
        lambda u: u * math.exp(score * u - u * u / 2), 0.0, end, epsabs=0.0, epsrel=1e-11
    )
    expected = math.log(found) - score**2 / 2 - 0.5 * math.log(2 * math.pi)
    assert log_mean_excess(np.array([score]))[0] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_expected_improvement_is_that_of_the_normal_distribution():
    mean, deviation, best = [0.0, 0.3, -0.4], [0.1, 0.2, 0.1], 0.1
    found = np.exp(log_expected_improvement(posterior(mean, deviation, best=best)))
    for own, m, d in zip(found, mean, deviation, strict=True):
        z = (m - best) / d
        assert own == pytest.approx((m - best) * stats.norm.cdf(z) + d * stats.norm.pdf(z))
    at_best = log_expected_improvement(posterior([0.1], [0.2], best=0.1))
    assert math.exp(at_best[0]) == pytest.approx(0.2 / math.sqrt(2 * math.pi))


def test_expected_improvement_tells_hopeless_configs_apart():
    means = -0.01 * np.arange(1, 200)
    found = log_expected_improvement(posterior(means, np.full(199, 0.01)))
    assert np.isfinite(found).all()
    assert (np.diff(found) < 0).all()


@pytest.mark.parametrize("score", [5.0, 2.0, 0.0, -1.5, -4.0, -12.0, -29.0])
def test_a_bound_beside_the_posterior_gives_the_truncated_normal_distribution(score):
    mean, deviation, noise = 0.7, 0.3, 0.04
    total = math.sqrt(deviation**2 + noise)
    belief = believe_below(
        posterior([mean], [deviation], noise=noise), places((1, "x")), np.zeros(1),
        np.array([mean + score * total]),
    )  # fmt: skip
    weights = np.array([total**-2, 1.0 / belief.variances[0]])
    expected = stats.truncnorm(-np.inf, score, loc=mean, scale=total)
    assert 1.0 / weights.sum() == pytest.approx(expected.var(), rel=1e-5)
    found = weights @ [mean, belief.log_values[0]] / weights.sum()
    assert found == pytest.approx(expected.mean(), rel=1e-6)


def test_a_bound_below_everything_expected_is_nearly_a_measurement():
    belief = believe_below(
        posterior([0.0], [0.01]), places((1, "x")), np.zeros(1), np.array([-5.0])
    )
    assert belief.variances[0] < 1e-3 * 0.01**2 * 2
    assert -0.31 < belief.log_values[0] < -0.29, "as far as the series goes"


def fitted(believed=(), asked=((8, "x"), (16, "y"))):
    tried = places((1, "x"), (2, "x"), (4, "y"))
    model = fit(SIZES, tried, np.array([0.0, 0.2, 0.35]), np.zeros(3))
    return model.posterior(places(*asked), np.zeros(len(asked)), believed)


def test_what_is_believed_counts_as_far_as_it_is_certain():
    own, cost = places((8, "x")), np.zeros(1)
    plain = fitted()
    far = believe_below(fitted(asked=((8, "x"),)), own, cost, np.array([9.0]))
    near = believe_below(fitted(asked=((8, "x"),)), own, cost, np.array([-0.5]))
    sure = Beliefs(own, cost, near.log_values, np.zeros(1))
    nothing, bounded, measured = (fitted([belief]) for belief in (far, near, sure))
    assert nothing.mean == pytest.approx(plain.mean, abs=1e-6)
    assert nothing.deviation == pytest.approx(plain.deviation, rel=1e-6)
    assert bounded.mean[0] < plain.mean[0] - 0.1
    # A bound leaves more open than a measurement.
    assert measured.deviation[0] < 0.9 * bounded.deviation[0] < 0.9 * plain.deviation[0]


def test_variances_follow_the_steps_of_expectation_maximisation():
    values = np.array([0.3, -0.2, 0.1, 0.4, -0.5])
    count, squares = len(values), float(values @ values)
    (prior, weight), (noise_prior, noise_weight) = _VALUES.interaction, _VALUES.noise
    variance, noise = prior, noise_prior
    for _ in range(15):
        # Every trial has an effect of its own: posterior mean share * value, variance share * noise.
        share = variance / (variance + noise)
        effects = share**2 * squares + count * share * noise
        errors = (1 - share) ** 2 * squares + count * share * noise
        variance = (weight * prior + effects) / (weight + count)
        noise = (noise_weight * noise_prior + errors) / (noise_weight + count)
    found, found_noise = _variances(
        _VALUES, np.eye(count)[None], np.array([float(count)]), np.zeros((count, count)), values
    )
    assert found[0] == pytest.approx(variance)
    assert found_noise == pytest.approx(noise)


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        # Sequence parallelism stands wherever tensor parallelism does.
        ([(tp, tp > 1, size) for tp in (1, 2, 4) for size in (1, 2)], {"use_seq_parallel"}),
        ([(tp, sp, size) for tp in (1, 2, 4) for sp in (False, True) for size in (1, 2)], set()),
        # In one config it does not.
        ([(1, False, 1), (2, True, 1), (4, True, 2), (4, False, 2), (1, False, 2)], set()),
    ],
)
def test_knobs_that_follow_from_another_one_are_found(configs, expected):
    names = ("model_parallel", "use_seq_parallel", "micro_batch_size")
    encoding = Encoding(dict(zip(names, ((1, 2, 4), (False, True), (1, 2)), strict=True)))
    rows = encoding.places([dict(zip(names, config, strict=True)) for config in configs])
    assert following(encoding, rows) == expected


def test_of_two_knobs_that_follow_from_each_other_one_stays():
    encoding = Encoding({"env.A": ("x", "y", "z"), "env.B": ("p", "q", "r")})
    rows = encoding.places([{"env.A": a, "env.B": b} for a, b in zip("xyz", "pqr", strict=True)])
    assert len(following(encoding, rows)) == 1


def test_of_a_large_space_the_best_a_draw_and_the_neighbours_of_the_best_are_judged():
    facts = StudyFacts(cluster=Cluster(num_devices=1), training=Training(global_batch_size=4))
    spec = {"micro_batch_size": [1], **{f"env.{name}": list(range(16)) for name in "ABC"}}
    report = check(Space.from_spec(spec, facts))
    sampler = GuidedSampler(report, seed=0)
    best = report.configs[-1].config
    measured = [Attempt(0, best, "ok", 1.0)]
    open_indices = sampler.ranking.untried(measured)
    assert len(open_indices) == 16**3 - 1
    at = sampler._asked(open_indices, measured, 1)
    assert len(at) <= 2048
    assert at.tolist() == sorted(set(at.tolist())), "in the order of the ranking"
    assert set(range(1024)) <= set(at.tolist())
    near = [
        place for place, index in enumerate(open_indices)
        if sum(sampler.ranking.configs[index][name] != best[name] for name in best) <= 2
    ]  # fmt: skip
    assert set(near[:102]) <= set(at.tolist())
    assert len([place for place in at if place >= 1024]) > 300, "a draw of the rest"
    assert sampler._asked(open_indices, measured, 1).tolist() == at.tolist()
    assert sampler._asked(open_indices, measured, 2).tolist() != at.tolist()
    other_seed = GuidedSampler(report, seed=1, ranking=sampler.ranking)
    assert other_seed._asked(open_indices, measured, 1).tolist() != at.tolist()
    few = dataclasses.replace(measured[0], config=report.configs[0].config)
    assert sampler._asked(open_indices[:2048], [few], 1).tolist() == list(range(2048))
