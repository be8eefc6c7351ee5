"""The value of a trial, its ranking among noisy others, and convergence at equal samples."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_ind

from mindtune.search.confirming import Confirmed, compare, rank, spread
from mindtune.search.convergence import LossCurve, baseline_band, judge, never_finite
from mindtune.search.errors import SearchError
from mindtune.search.facts import Cluster, StudyFacts, Training
from mindtune.search.model_shape import ModelShape
from mindtune.search.scoring import (
    METRICS,
    Exponents,
    MeasuredTrial,
    best_by,
    is_better,
    score,
    stability,
)

MODEL = ModelShape(
    num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, intermediate_size=16,
    gated_mlp=True, vocab_size=10, seq_length=4,
)  # fmt: skip
"""8160 model FLOPs per token (counted in test_search_model_shape)."""


def facts(*, peak=1e6, devices=2, model=MODEL):
    return StudyFacts(
        cluster=Cluster(num_devices=devices, peak_flops=peak, allow_idle=True),
        training=Training(global_batch_size=3),
        model=model,
    )


def trial(*times, **fields):
    return MeasuredTrial(step_time_s=times, **fields)


def test_mfu_counts_all_devices_at_the_median_step_time():
    found = score(trial(0.1, 0.1, 0.4), facts())
    mfu = 8160 * 12 / (0.1 * 1e6 * 2)
    assert (found.mfu, found.kind) == (pytest.approx(mfu), "mfu")
    assert found.stability == pytest.approx(0.1 / 0.2)
    assert found.value == pytest.approx(mfu * 0.5)
    assert score(trial(0.1, tokens_per_step=6), facts()).mfu == pytest.approx(mfu / 2)
    assert score(trial(0.1, samples_per_step=1.5), facts()).mfu == pytest.approx(mfu / 2)


def test_bad_steps_lower_stability_and_fast_outliers_do_not_raise_it():
    assert stability(trial(1.0, 1.0, 1.0, 1.0, bad_steps=1)) == 0.75
    assert stability(trial(1.0, 1.0, 0.1)) == 1.0
    assert stability(trial(1.0, bad_steps=1)) == 0.0


def test_exponents_weigh_the_parts():
    found = score(trial(0.1, 0.1, 0.4), facts(), exponents=Exponents(mfu=0.5, stability=2.0))
    assert found.value == pytest.approx(found.mfu**0.5 * found.stability**2)


def test_mfu_above_one_is_invalid_and_says_so():
    found = score(trial(0.001), facts())
    assert found.value is None
    assert found.mfu > 1
    assert "MFU must lie above 0 and at most at 1, but is 48.960" in found.problem


@pytest.mark.parametrize("broken", [math.nan, -0.5, 0.0])
def test_a_nonsense_mfu_of_the_trial_itself_is_invalid(broken):
    assert score(trial(1.0, mfu=broken), facts(model=None)).value is None


def test_without_a_peak_throughput_over_the_baseline_stands_for_mfu():
    unknown = facts(peak=None)
    base = trial(0.2, tokens_per_step=12)
    found = score(trial(0.1, tokens_per_step=12), unknown, baseline=base)
    assert (found.mfu, found.kind) == (pytest.approx(2.0), "relative")
    assert found.value == pytest.approx(2.0)
    assert score(base, unknown, baseline=base).value == pytest.approx(1.0)
    assert score(trial(0.1), unknown, baseline=base).mfu == pytest.approx(2.0)  # same batch
    alone = score(trial(0.1), unknown)
    assert (alone.value, alone.kind) == (None, "unknown")
    assert "no baseline" in alone.problem


def test_a_trial_may_know_its_mfu_itself_but_only_if_the_baseline_did():
    without = facts(model=None)
    assert score(trial(0.1, mfu=0.4), without).value == pytest.approx(0.4)
    mixed = score(trial(0.1, mfu=0.4), without, baseline=trial(0.2))
    assert (mixed.kind, mixed.value) == ("relative", pytest.approx(2.0))


@pytest.mark.parametrize("times", [(), (0.0,), (math.nan,), (1.0, math.inf), (-1.0,)])
def test_step_times_are_positive_finite_seconds(times):
    with pytest.raises(SearchError, match="positive finite seconds"):
        MeasuredTrial(step_time_s=times)


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=20), st.data())
def test_stability_lies_between_0_and_1(times, data):
    bad = data.draw(st.integers(0, len(times)))
    assert 0.0 <= stability(MeasuredTrial(step_time_s=tuple(times), bad_steps=bad)) <= 1.0 + 1e-12


def test_direction_belongs_to_the_metric_and_the_field_is_named():
    rows = [
        {"nodes": 8, "step_time_s": 3.1, "value": 0.2},
        {"nodes": 8, "step_time_s": 2.2, "value": 0.1},
        {"nodes": 8, "step_time_s": 4.0, "value": None},
    ]
    draw = random.Random(0)
    for _ in range(6):
        draw.shuffle(rows)
        assert best_by("step_time_s", rows)["step_time_s"] == 2.2
        assert best_by("value", rows)["value"] == 0.2
    assert best_by("latency_s", [{"latency_s": 0.1}, {"latency_s": 0.2}]) == {"latency_s": 0.1}
    assert best_by("mfu", rows) is None
    assert best_by("value", [{"value": math.nan}, {"value": math.inf}, {"value": True}]) is None
    assert not is_better("mfu", math.nan, 0.1)
    with pytest.raises(SearchError, match="metric must be one of value, mfu"):
        best_by("nodes", rows)
    assert set(METRICS.values()) == {"maximize", "minimize"}


def test_a_tie_goes_to_more_headroom():
    fast = Confirmed(3, (1.00, 1.02, 0.98), headroom_bytes=1e9)
    roomy = Confirmed(5, (0.99, 1.01, 0.97), headroom_bytes=9e9)
    slow = Confirmed(1, (0.60, 0.61, 0.59), headroom_bytes=99e9)
    assert [c.number for c in rank([slow, fast, roomy])] == [5, 3, 1]
    assert [c.number for c in rank([roomy, slow, fast])] == [5, 3, 1]


def test_a_clear_win_is_no_tie_and_unknown_headroom_comes_last():
    best = Confirmed(1, (1.0, 1.0, 1.0), headroom_bytes=None)
    worse = Confirmed(2, (0.9, 0.9, 0.9), headroom_bytes=1e12)
    near = Confirmed(3, (0.99, 0.99, 0.99), headroom_bytes=1.0)
    assert [c.number for c in rank([best, worse, near])] == [3, 1, 2]
    assert rank([]) == ()


def test_noise_does_not_widen_the_tie():
    def values(level, noise):
        return (level * (1 - noise), level, level * (1 + noise))

    for noise in (0.001, 0.08):
        a = Confirmed(1, values(1.0, noise), headroom_bytes=1.0)
        b = Confirmed(2, values(0.95, noise), headroom_bytes=2.0)
        assert [leader.number for leader in rank([b, a])] == [1, 2]


def test_comparison_sees_a_difference_only_outside_the_noise():
    apart = compare([1.5, 1.52, 1.48], [1.0, 1.01, 0.99])
    assert apart.different is True
    assert apart.low > 1.4
    assert apart.ratio == pytest.approx(1.5, rel=1e-3)
    assert compare([1.0, 1.3, 0.8], [1.0, 0.9, 1.2]).different is False
    assert compare([1.01, 1.01, 1.01], [1.0, 1.0, 1.0]).different is False  # within 2 %
    assert compare([2.0], [1.0]).different is None


def test_comparison_is_students_t_on_logarithms():
    values, reference = [0.1872, 0.2104], [0.1155, 0.1222, 0.1242]
    found = compare(values, reference)
    expected = ttest_ind(np.log(values), np.log(reference)).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx(
        (math.exp(expected.low), math.exp(expected.high))
    )
    assert (found.low, found.ratio, found.high) == pytest.approx((1.395, 1.646, 1.942), abs=1e-3)
    lone = compare([1.5], [1.0, 1.01, 0.99])  # the noise of one side serves both
    assert lone.low < 1.5 < lone.high
    assert lone.different is True


@pytest.mark.parametrize(("count", "reference_count"), [(2, 2), (2, 3), (3, 3)])
def test_interval_of_few_launches_holds_what_it_says(count, reference_count):
    draw = random.Random(1)
    held = 0
    for _ in range(2000):
        values = [1.6 * math.exp(draw.gauss(0, 0.08)) for _ in range(count)]
        reference = [math.exp(draw.gauss(0, 0.08)) for _ in range(reference_count)]
        found = compare(values, reference)
        held += found.low <= 1.6 <= found.high
    assert held / 2000 == pytest.approx(0.95, abs=0.015)


def test_spread_is_quartiles_from_four_repeats_on():
    assert spread([3.0, 1.0, 2.0]) == spread((1.0, 2.0, 3.0))
    assert (spread([1.0, 3.0]).low, spread([1.0, 3.0]).high) == (1.0, 3.0)
    five = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (five.low, five.median, five.high, five.count) == (2.0, 3.0, 4.0, 5)
    with pytest.raises(SearchError, match="at least one value"):
        spread([])


def curve(final, *, step=8, end=800, seed=0):
    """Return a loss curve that falls to `final`, with a little noise."""
    draw = random.Random(seed)
    samples = tuple(float(s) for s in range(step, end + 1, step))
    return LossCurve(
        samples, tuple(final + 3 * math.exp(-s / 150) + draw.gauss(0, 0.01) for s in samples)
    )


BAND = baseline_band([curve(1.0, seed=1), curve(1.02, seed=2), curve(0.98, seed=3)])


def test_a_run_inside_the_baselines_own_noise_converges():
    assert BAND.samples == 800
    assert BAND.upper(1) == pytest.approx(BAND.mean + 2.920 * 0.02 * math.sqrt(4 / 3), rel=0.05)
    assert BAND.upper(3) == pytest.approx(BAND.mean + 2.920 * 0.02 * math.sqrt(2 / 3), rel=0.05)
    assert judge([curve(1.03, seed=4)], BAND).ok is True
    assert judge([curve(0.5, seed=4)], BAND).ok is True, "better by far is no fault"


def test_a_run_above_it_does_not_and_is_told_at_which_samples():
    found = judge([curve(1.3, seed=4)], BAND)
    assert found.ok is False
    assert "(1 seeds) at 800 samples is above" in found.reason
    # One seed of 1.055 may be chance; three are not.
    three = [curve(1.055, seed=seed) for seed in (4, 5, 6)]
    assert judge(three[:1], BAND).ok is True
    assert judge(three, BAND).ok is False


def test_equal_configs_are_turned_down_in_5_percent_of_cases():
    draw = random.Random(1)
    turned_down = 0
    for _ in range(2000):
        base, own = (
            [LossCurve((1.0,), (1 + 0.02 * draw.gauss(0, 1),)) for _ in range(3)] for _ in range(2)
        )
        turned_down += judge(own, baseline_band(base)).ok is False
    assert turned_down / 2000 == pytest.approx(0.05, abs=0.015)


def pairs(draw, shift, *, count=3, common=0.02, own=0.004):
    """Return runs of base and config from the same seeds, which move both of them alike."""
    moved = [1 + common * draw.gauss(0, 1) for _ in range(count)]
    return tuple(
        [LossCurve((1.0,), (value + off + own * draw.gauss(0, 1),), seed)
         for seed, value in enumerate(moved)]
        for off in (0.0, shift)
    )  # fmt: skip


@pytest.mark.parametrize("count", [2, 3, 5])
def test_equal_configs_of_the_same_seeds_are_turned_down_in_5_percent_of_cases(count):
    draw = random.Random(2)
    turned_down = 0
    for _ in range(2000):
        base, own = pairs(draw, 0.0, count=count, common=0.2, own=0.05)
        turned_down += judge(own, baseline_band(base)).ok is False
    assert turned_down / 2000 == pytest.approx(0.05, abs=0.015)


def test_what_seeds_share_hides_no_worse_config():
    draw = random.Random(3)
    seen = unpaired = 0
    for _ in range(200):
        base, own = pairs(draw, 0.03)
        seen += judge(own, baseline_band(base)).ok is False
        nameless = [[LossCurve(c.samples, c.losses) for c in side] for side in (own, base)]
        unpaired += judge(nameless[0], baseline_band(nameless[1])).ok is False
    assert seen > 180
    assert unpaired < 100


def test_runs_are_paired_only_where_enough_seeds_are_shared():
    base = [curve(1.0 + 0.1 * seed, seed=seed) for seed in range(3)]
    named = [LossCurve(c.samples, c.losses, seed) for seed, c in enumerate(base)]
    band = baseline_band(named)
    assert "seed by seed" in judge(named, band).reason
    assert "seed by seed" not in judge(named[:2], band).reason, "two of three tell less"
    assert "seed by seed" in judge(named[:2], baseline_band(named[:2])).reason
    # Of six seeds of the base, three are enough; of a seed with two runs nobody knows which.
    more = [LossCurve(c.samples, c.losses, 5 + i) for i, c in enumerate(base)]
    assert "seed by seed" in judge(named, baseline_band([*named, *more])).reason
    twice = [LossCurve(c.samples, c.losses, 1) for c in base]
    assert "seed by seed" not in judge(named, baseline_band(twice)).reason
    # A run that ended not finite has no pair, and its config is out.
    broken = LossCurve(base[0].samples, (math.nan,) * len(base[0].samples), 2)
    assert judge([*named[:2], broken], band).ok is False
    assert "seed by seed" in judge(named, baseline_band([*named[:2], broken])).reason


def test_fewer_than_three_seeds_show_no_convergence():
    base = [curve(1.0, seed=1), curve(1.02, seed=2)]
    few = judge([curve(1.05, seed=3)], baseline_band(base))
    assert few.ok is True
    assert "is not shown to be worse than the baseline's" in few.reason
    assert "is not shown" in judge([curve(1.0, seed=4)], BAND).reason
    assert "is within" in judge([curve(1.0, seed=seed) for seed in (4, 5, 6)], BAND).reason


def test_runs_compare_at_equal_samples_not_at_equal_steps():
    assert judge([curve(1.0, step=32, seed=5)], BAND).ok is True
    early = judge([curve(1.0, end=500, seed=5)], BAND)
    assert early.samples == 496
    assert early.ok is True
    assert early.loss > BAND.upper(1)  # it would have failed against the end of the baseline
    # Seeds of different lengths are compared where all of them are.
    assert judge([curve(1.0, end=500, seed=5), curve(1.0, seed=6)], BAND).samples == 496


def test_the_first_steps_of_a_run_prove_nothing():
    found = judge([curve(1.0, end=300, seed=5)], BAND)
    assert found.ok is None
    assert found.reason == "losses were recorded of 296 of 800 samples only"


def broken_at(*indices, value=math.nan):
    losses = list(curve(1.0, seed=9).losses)
    for index in indices:
        losses[index] = value
    return LossCurve(curve(1.0).samples, tuple(losses))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_run_that_ends_not_finite_never_converges(value):
    assert judge([broken_at(-1, value=value)], BAND).ok is False
    assert judge([curve(1.0), broken_at(-3, -2, value=value)], BAND).ok is False
    # An overflow on the way that was passed over is the stability's to count.
    assert judge([broken_at(5, value=value)], BAND).ok is True
    # Whatever becomes of the baseline.
    assert never_finite([curve(1.0), broken_at(-1, value=value)]).ok is False
    assert never_finite([curve(1.0)]) is None


@pytest.mark.parametrize("losses", [(math.inf, -math.inf), (1.7e308, 1.7e308)])
def test_losses_that_have_no_sum_are_no_error(losses):
    whole = LossCurve((1.0, 2.0), losses)
    assert math.isnan(whole.mean_between(0.0, 2.0))
    assert never_finite([LossCurve((499.0, 500.0), losses)]).ok is False
    # Nor where each seed's last loss has a mean, but theirs together have none.
    with pytest.raises(SearchError, match="and 3 whose loss ends not finite"):
        baseline_band([LossCurve((1.0,), losses[-1:], seed) for seed in range(3)])


def test_a_run_with_one_huge_step_cannot_be_told():
    found = judge([LossCurve((500.0, 5000.0), (1.0, 1.0))], BAND)
    assert found.ok is None
    assert "no step of the run ends" in found.reason


def test_seeds_that_change_nothing_leave_room_for_rounding():
    band = baseline_band([curve(1.0, seed=1)] * 3)
    assert judge([curve(1.0005, seed=1)] * 3, band).ok is True
    assert judge([curve(1.01, seed=1)] * 3, band).ok is False


def test_a_band_needs_two_seeds_that_end_finite():
    with pytest.raises(SearchError, match="at least 2 seeds of the baseline, but got 1."):
        baseline_band([curve(1.0)])
    with pytest.raises(SearchError, match="got 1 and 1 whose loss ends not finite"):
        baseline_band([curve(1.0), broken_at(-1)])
    survivors = baseline_band([curve(1.0, seed=1), broken_at(-1), curve(1.02, seed=2)])
    assert len(survivors.curves) == 2
    with pytest.raises(SearchError, match="must end a step in the last 20% of 500 samples"):
        baseline_band([LossCurve((500.0,), (1.0,)), LossCurve((300.0, 900.0), (1.0, 1.0))])
    with pytest.raises(SearchError, match="one loss per count of samples"):
        LossCurve((1.0,), ())
