"""When a running trial is stopped: on known numbers, and how often wrongly on simulated ones."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindtune.search.halving import MARGIN, Bar, Ceiling, ceiling, hopeless, rungs
from mindtune.search.noise import part_noise

BAR = Bar(step_time_s=0.1, stability=1.0, mfu_exponent=1.0, stability_exponent=1.0)


def flags(times, bad=0):
    return [index < bad for index in range(len(times))]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(100, (12, 34)), (30, (5, 10)), (12, (5,)), (6, (5,)), (5, ()), (1, ())],
)
def test_rungs_are_a_ninth_and_a_third_of_the_steps_and_at_least_five(steps, expected):
    assert rungs(steps) == expected


@pytest.mark.parametrize(
    ("times", "bad", "stopped_at"),  # the first so many are bad
    [
        ([0.2] * 12, 0, 12),
        ([0.2] * 11, 0, None),  # a rung must be reached
        ([0.12] * 33, 0, None),  # the first rung asks for twice the margin
        ([0.12] * 34, 0, 34),
        ([0.11] * 99, 0, None),  # within the margin
        ([0.12] * 12 + [0.11] * 22, 0, None),  # the fastest tenth shows what may come
        ([0.3] * 17 + [0.2] * 17, 0, 12),
        ([0.122] * 17 + [0.115] * 17, 0, None),  # who gets faster may do so once more
        ([1.0] + [0.2] * 33, 0, 12),
        ([0.001] + [0.2] * 11, 0, 12),  # a clock that slipped once is no speed
        ([0.1] * 34, 25, 34),  # can be 75 % stable at best
        ([0.1] * 34, 9, None),
        ([], 0, None),
    ],
)
def test_trial_is_stopped_at_a_rung_when_it_cannot_catch_up(times, bad, stopped_at):
    found = hopeless(times, flags(times, bad), BAR, measure_steps=100)
    assert (None if found is None else found.steps) == stopped_at


def test_steps_after_a_rung_change_no_judgement_of_it():
    slow, fast = [0.2] * 12, [0.1] * 34
    judged = hopeless(slow, flags(slow), BAR, measure_steps=100)
    for later_is_bad in (False, True):
        later = flags(slow) + [later_is_bad] * 20
        assert hopeless(slow + [0.01] * 20, later, BAR, measure_steps=100) == judged
    # Bad steps behind the last rung change no judgement either, however many they are.
    late = flags(fast) + [True] * 40
    assert hopeless(fast + [0.1] * 40, late, BAR, measure_steps=100) is None


def test_the_best_that_may_come_is_that_of_the_last_rung():
    times = [0.2] * 12 + [0.1] * 22 + [0.01] * 10
    assert ceiling(times[:11], flags(times), measure_steps=100) is None
    assert ceiling(times[:33], flags(times, 20), measure_steps=100) == Ceiling(0.2, 12)
    # The second half of the first 34 was as fast again, and may become so once more.
    assert ceiling(times, flags(times, 20), measure_steps=100) == Ceiling(0.05, 20)


def test_noise_widens_the_margin_but_half_of_the_best_is_always_out():
    loud = Bar(step_time_s=0.1, stability=1.0, mfu_exponent=1.0, stability_exponent=1.0, noise=0.1)
    for times, bar, is_out in [
        ([0.13] * 34, BAR, True),
        ([0.13] * 34, loud, False),
        ([0.21] * 34, loud, True),
    ]:
        found = hopeless(times, flags(times), bar, measure_steps=100)
        assert (found is not None) == is_out


def test_exponent_of_zero_takes_speed_out_of_the_judgement():
    bar = Bar(step_time_s=0.1, stability=1.0, mfu_exponent=0.0, stability_exponent=1.0)
    assert hopeless([0.9] * 50, flags([0.9] * 50), bar, measure_steps=100) is None


@given(st.lists(st.floats(0.01, 1.0), min_size=34, max_size=60), st.integers(0, 20))
def test_no_trial_is_stopped_that_is_as_fast_as_the_best_in_a_tenth_of_its_steps(times, bad):
    times = [0.1] * 4 + times
    found = hopeless(times, flags(times, bad), BAR, measure_steps=100)
    if found is not None:
        assert 1 - bad / 100 < 1 - MARGIN


def _series(draw, steps, ratio, kind):
    """Return step times with a median of about `ratio`, noisy in one way or in all."""
    position = np.arange(steps)
    noise = np.exp(0.01 * draw.normal(size=steps))
    if kind in ("launch", "all"):
        noise *= np.exp(0.05 * draw.normal())
    if kind in ("drift", "launch", "all"):
        sigma, memory = {"drift": (0.08, 0.9), "launch": (0.05, 0.8), "all": (0.06, 0.8)}[kind]
        level = sigma * draw.normal()
        levels = []
        for _ in range(steps):
            level = memory * level + math.sqrt(1 - memory**2) * sigma * draw.normal()
            levels.append(level)
        noise *= np.exp(levels)
    if kind in ("tails", "all"):
        late = draw.random(steps) < 0.06
        noise[late] *= draw.pareto(1.5, late.sum()) + 1.5
    if kind in ("slow start", "all"):
        length = draw.uniform(2, steps / 3)
        noise *= 1 + draw.uniform(0.2, 1.0) * np.exp(-position / length)
    if kind == "bursts":
        begin, length = draw.integers(0, steps), draw.integers(1, steps // 3 + 1)
        noise[begin : begin + length] *= draw.uniform(1.3, 2.0)
    return (ratio * noise).tolist()


def _value(times):
    stability = min(1.0, statistics.median(times) / statistics.fmean(times))
    return stability / statistics.median(times)


KINDS = ("quiet", "drift", "tails", "slow start", "launch", "bursts", "all")


@pytest.mark.parametrize("kind", KINDS)
def test_false_stops_are_rare_and_slow_trials_are_short(kind):
    """The numbers of `halving`'s docstring: 12 and 30 steps, 150 trials per ratio of speeds."""
    draw = np.random.default_rng(KINDS.index(kind))
    good = wrongly = steps_of_slow = steps_saved = 0
    for steps in (12, 30):
        for ratio in (0.9, 0.95, 1.0, 2.0):
            for _ in range(150):
                known = [_series(draw, steps, speed, kind) for speed in (1.0, 1.2, 1.5)]
                best, times = known[0], _series(draw, steps, ratio, kind)
                bar = Bar(
                    step_time_s=statistics.median(best),
                    stability=min(1.0, statistics.median(best) / statistics.fmean(best)),
                    mfu_exponent=1.0, stability_exponent=1.0, noise=part_noise(known),
                )  # fmt: skip
                found = hopeless(times, flags(times), bar, measure_steps=steps)
                if _value(times) >= _value(best):
                    good += 1
                    wrongly += found is not None
                elif ratio == 2.0:
                    steps_of_slow += steps
                    steps_saved += 0 if found is None else steps - found.steps
    assert good > 250
    assert wrongly <= 0.005 * good
    assert steps_saved >= (0.3 if kind == "bursts" else 0.6) * steps_of_slow
