"""Intervals: wide enough for series that remember, the same twice, none for a few values."""

import numpy as np
import pytest

from mindtune.controller.metrics.bootstrap import (
    block_interval,
    block_length,
    count_interval,
    slope_interval,
)


def means(rows):
    return rows.mean(axis=1)


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
        low, high = block_interval(remembering(rho, 400, seed), means)
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
    assert block_interval(series, means) == block_interval(series, means)
    assert block_interval([1.0] * 7, means) is None
    assert block_interval([2.0] * 8, means) == (2.0, 2.0)


def test_long_series_keep_their_interval():
    series = remembering(0.9, 40_000, 3)
    low, high = block_interval(series, means)
    # Standard error of the mean: sqrt((1 + rho) / (1 - rho) / n) = 0.0218.
    assert 0.06 < high - low < 0.12


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
