"""A training run in miniature under all policies: left alone, protected, brought back, or ended."""

from __future__ import annotations

import math
import random

import pytest

from mindtune.policies.decisions import (
    GUARDS,
    Advise,
    SetClipNorm,
    SetLearningRateScale,
    SetSkipThreshold,
)

SEEDS = range(5)
NAN = math.nan


def during(first: int, count: int, change):
    """Return a fault that changes loss and gradient in `count` steps from `first` on."""

    def fault(step, loss, gradient):
        return change(loss, gradient) if first <= step < first + count else (loss, gradient)

    return fault


def scaled(factor: float, loss_factor: float = 1.5):
    return lambda loss, gradient: (loss * loss_factor, [factor * g for g in gradient])


def lost_gradient(loss, gradient):
    return loss, [NAN for _ in gradient]


def lost_loss(loss, gradient):
    return NAN, [NAN for _ in gradient]


def interventions(run) -> list:
    return [a for _, a in run.grants if type(a) not in (*GUARDS, Advise)]


@pytest.mark.parametrize("seed", range(2))
def test_a_healthy_run_of_20000_steps_is_left_alone(plant, seed) -> None:
    healthy = plant(seed=seed).drive(20_000)
    assert interventions(healthy.run) == []
    assert healthy.run.events(Advise) == []
    assert healthy.skipped == []
    # The guard is set once and follows the norm as it falls: seldom.
    assert 1 <= len(healthy.run.set_points(SetSkipThreshold)) <= 8


def test_observe_mode_asks_for_nothing_in_a_healthy_run(plant) -> None:
    healthy = plant(mode="observe").drive(2000)
    assert healthy.run.records == []


def scatter(step, loss, gradient):
    """Make norms as heavy-tailed as those of a fine-tuning run: a spread of 40 %."""
    factor = random.Random(step).lognormvariate(0, 0.4)
    return loss, [factor * g for g in gradient]


def test_a_healthy_run_with_heavy_tails_is_never_skipped(plant) -> None:
    healthy = plant(fault=scatter).drive(5000)
    assert healthy.skipped == []
    assert interventions(healthy.run) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [60, 1e3, 1e9])
def test_a_poisoned_update_is_skipped_in_its_own_step(plant, seed, factor) -> None:
    fault = during(300, 1, scaled(factor))
    guarded = plant(seed=seed, fault=fault).drive(400)
    assert guarded.skipped == [300]
    assert interventions(guarded.run) == []
    assert guarded.final_loss() == pytest.approx(
        plant(seed=seed).drive(400).final_loss(), rel=0.02
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_burst_of_ten_bad_batches_is_skipped_whole(plant, seed) -> None:
    fault = during(300, 10, scaled(100))
    guarded = plant(seed=seed, fault=fault).drive(500)
    assert guarded.skipped == list(range(300, 310))
    assert guarded.final_loss() == pytest.approx(2.0, rel=0.02)
    assert plant(guarded=False, seed=seed, fault=fault).drive(310).final_loss() > 5
    # Clipping came to help, and went again.
    assert [value for _, value in guarded.run.set_points(SetClipNorm)][1:] == [math.inf]
    assert guarded.knobs["clip_norm"] == math.inf


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("factor", "most"), [(2, 0), (3, 0), (5, 16)])
def test_a_legal_shift_of_the_norm_is_hardly_throttled(plant, seed, factor, most) -> None:
    fault = during(300, 10_000, scaled(factor, loss_factor=1.0))
    guarded = plant(seed=seed, fault=fault).drive(1000)
    assert len(guarded.skipped) <= most
    assert all(step < 320 for step in guarded.skipped)
    assert guarded.knobs["skip_threshold"] > 8 * 0.4 * factor
    assert interventions(guarded.run) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_shift_beyond_the_guard_is_released_within_32_steps(plant, seed) -> None:
    # A sixteenth of the rate, so that the larger gradients are legal.
    fault = during(300, 10_000, scaled(16, loss_factor=1.0))
    guarded = plant(seed=seed, fault=fault, rate=0.002).drive(1000)
    assert 1 <= len(guarded.skipped) <= 16
    assert max(guarded.skipped) < 300 + 20
    assert guarded.knobs["skip_threshold"] > 16 * 0.4
    opened = "skip-guard-open-1" in [name for _, name in guarded.run.events(Advise)]
    assert opened == (len(guarded.skipped) == 16)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("times", [30, 60, 100])
def test_an_absurd_rate_from_step_1_returns_to_the_first_good_state(plant, seed, times) -> None:
    rate = 0.03 * times
    unguarded = plant(guarded=False, seed=seed, rate=rate).drive(600)
    assert unguarded.final_loss() > 5
    guarded = plant(seed=seed, rate=rate).drive(600)
    assert guarded.rewinds[0] <= 12
    # The rate comes back to where it is just stable, which costs some noise.
    assert guarded.final_loss() < 2.5
    assert guarded.stopped is None


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gradient_that_reaches_the_weights_as_nan_is_taken_back(plant, seed) -> None:
    fault = during(300, 1, lost_gradient)
    guarded = plant(seed=seed, fault=fault, skips=False).drive(600)
    assert guarded.rewinds == [300]
    assert guarded.final_loss() == pytest.approx(2.0, rel=0.02)
    # Lower after the rewind, and back when it is well.
    assert [v for _, v in guarded.run.set_points(SetLearningRateScale)] == [0.5, 1.0]
    lost = plant(seed=seed, fault=fault, skips=False, can_rewind=False).drive(600)
    assert lost.stopped[0] == 309
    assert "updates were applied" in lost.stopped[1].diagnosis


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("can_rewind", [True, False])
@pytest.mark.parametrize("change", [lost_loss, lost_gradient])
def test_what_is_not_finite_for_ever_is_ended_within_20_steps(
    plant, skips, can_rewind, change
) -> None:
    fault = during(300, 10_000, change)
    ended = plant(fault=fault, skips=skips, can_rewind=can_rewind).drive(600)
    step, stop = ended.stopped
    assert step <= 320
    assert "not finite" in stop.diagnosis or "non-finite" in stop.diagnosis
    assert len(ended.rewinds) <= 3
    if can_rewind:
        assert ended.rewinds
        assert "Last actions: step" in stop.diagnosis


def test_a_single_bad_batch_that_the_device_skips_needs_no_rewind(plant) -> None:
    for change in (lost_loss, lost_gradient):
        run = plant(fault=during(300, 1, change)).drive(400)
        assert run.skipped == [300]
        assert interventions(run.run) == []


def test_a_run_that_dies_again_and_again_is_ended_when_the_budget_is_spent(plant) -> None:
    def every_40th(step, loss, gradient):
        return lost_gradient(loss, gradient) if step > 100 and step % 40 == 0 else (loss, gradient)

    ended = plant(fault=every_40th, skips=False).drive(600)
    assert ended.rewinds == [120, 160, 200]
    step, stop = ended.stopped
    assert (step, stop.id) == (240, "lost-non-finite-update")
    for words in ("3 returns to an earlier state", "log, sqrt or division", "Last actions: step"):
        assert words in stop.diagnosis


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rate_that_jumps_in_mid_run_is_lowered_and_the_damage_taken_back(plant, seed) -> None:
    guarded = plant(seed=seed).drive(300)
    guarded.rate *= 40
    guarded.drive(500)
    # A raise that is being taken back again costs some loss.
    assert guarded.final_loss() < 4
    assert guarded.knobs["learning_rate_scale"] <= 0.25
    unguarded = plant(guarded=False, seed=seed).drive(300)
    unguarded.rate *= 40
    assert unguarded.drive(500).final_loss() > 20


def test_states_are_kept_only_while_the_run_is_well(plant) -> None:
    healthy = []

    def nan_at_100(step, loss, gradient):
        return lost_gradient(loss, gradient) if step == 100 else (loss, gradient)

    run = plant(fault=nan_at_100, can_rewind=False)
    for _ in range(120):
        run.drive(1)
        healthy.append(run.run.healthy)
    wells = [step for step, well in enumerate(healthy, start=1) if well]
    assert wells == [*range(17, 100), *range(108, 121)]
