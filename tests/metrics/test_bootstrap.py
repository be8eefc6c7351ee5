"""Intervals: wide enough for series that remember, the same twice, none for a few values."""

import numpy as np
import pytest

from mindtune.controller.metrics.bootstrap import (
    block_interval,
    block_length,
    count_interval,
    mean_interval,
    quantile_interval,
    rate_interval,
    slope_interval,
)


def remembering(rho, n, seed):
    noise = np.random.default_rng(seed).normal(size=n)
    series = np.empty(n)
    series[0] = noise[0]
    for index in range(1, n):
        series[index] = rho * series[index - 1] + noise[index] * np.sqrt(1 - rho**2)
    return series


def test_blocks_are_as_long_as_the_memory():
    lengths = [
        np.median([block_length(remembering(rho, 512, seed)) for seed in range(20)])
        for rho in (0.0, 0.5, 0.9)
    ]
    assert lengths[0] <= 2
    # Politis and White: (1.5 (2 rho / (1 - rho^2))^2 n)^(1/3) = 11 and 41 for 0.5 and 0.9.
    assert 5 <= lengths[1] <= 20
    assert 20 <= lengths[2] <= 70


@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_intervals_hold_the_true_mean_about_as_often_as_they_say(rho):
    held = 0
    for seed in range(50):
        low, high = mean_interval(remembering(rho, 400, seed))
        held += low <= 0 <= high
    # 47.5 of 50 on paper; percentile intervals of remembering series fall a little short.
    assert held >= 43
    if rho:
        naive = 0
        for seed in range(50):
            series = remembering(rho, 400, seed)
            naive += abs(series.mean()) <= 1.96 * series.std() / 20
        assert naive < 35


def test_intervals_are_the_same_twice_and_none_of_few_values():
    series = remembering(0.5, 100, 1)
    assert mean_interval(series) == mean_interval(series)
    assert mean_interval([1.0] * 7) is None
    assert mean_interval([2.0] * 8) == (2.0, 2.0)
    assert quantile_interval([2.0] * 8, 0.5) == (2.0, 2.0)
    assert quantile_interval([], 0.5) is None


def test_long_series_keep_their_interval():
    series = remembering(0.9, 40_000, 3)
    low, high = mean_interval(series)
    # Standard error of the mean: sqrt((1 + rho) / (1 - rho) / n) = 0.0218.
    assert 0.06 < high - low < 0.12


@pytest.mark.parametrize("share", [0.5, 0.95])
@pytest.mark.parametrize("n", [400, 20_000])
def test_quantiles_of_skewed_series_lie_within_their_intervals(share, n):
    held = 0
    true = float(np.exp({0.5: 0.0, 0.95: 1.6449}[share]))
    for seed in range(40):
        series = np.exp(remembering(0.5, n, seed))
        low, high = quantile_interval(series, share)
        assert low < np.percentile(series, 100 * share) < high
        held += low <= true <= high
    assert held >= 34


def test_few_values_tell_no_interval_of_a_quantile_at_their_end():
    series = remembering(0.0, 50, 2)
    assert quantile_interval(series, 0.95) is None
    assert quantile_interval(series, 0.5) is not None


def test_a_quantile_of_rounded_values_is_uncertain_by_half_a_unit():
    # Two logs that print 1.2349 and 1.2351 with two digits.
    low, high = quantile_interval(([1.23] * 9 + [1.24]) * 10, 0.5)
    assert (low, high) == pytest.approx((1.225, 1.235))


def test_what_has_not_happened_in_a_few_steps_may_still_happen():
    low, high = rate_interval([0.0] * 20)
    # Wilson's: z^2 / (n + z^2).
    assert (low, high) == pytest.approx((0.0, 3.8416 / 23.8416))
    low, high = rate_interval([0.0] * 100_000)
    assert high == pytest.approx(3.84e-5, rel=0.01)
    low, high = rate_interval(np.random.default_rng(3).random(400) < 0.1)
    assert low < 0.1 < high < 0.16
    assert rate_interval([0.0] * 7) is None


def test_a_statistic_of_a_long_series_is_taken_of_all_its_values():
    series = np.exp(remembering(0.0, 30_000, 4))

    def spreads(rows):
        low, high = np.percentile(rows, [25, 75], axis=1)
        return high - low

    low, high = block_interval(series, spreads)
    assert low < spreads(series[None, :])[0] < high
    # Of means of neighbours it would be a third of this.
    assert 1.2 < low < high < 1.6


def test_the_slope_and_its_interval():
    steps = np.arange(300.0)
    noise = remembering(0.7, 300, 5) * 0.1
    slope, (low, high) = slope_interval(steps, 3.0 - 0.002 * steps + noise)
    assert low < -0.002 < high
    assert low < slope < high
    assert slope_interval([1.0, 2.0, 4.0], [1.0, 2.0, 4.0]) == (pytest.approx(1.0), None)


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(0, 0.0, 3.69), (1, 0.025, 5.57), (10, 4.80, 18.4), (100, 81.4, 122)],
)
def test_counted_events_have_poisson_s_limits(count, low, high):
    # The exact limits, from tables of the chi-square distribution.
    assert count_interval(count) == pytest.approx((low, high), rel=0.01, abs=0.02)
