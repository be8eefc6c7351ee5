"""The loss scale over plants that overflow above a limit of their own, and over recorded storms."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from mindtune.policies.decisions import Advise, RequestStop, SetLossScale
from mindtune.policies.errors import PolicyError
from mindtune.policies.loss_scale import LossScaleState
from mindtune.policies.settings import PolicySettings
from mindtune.policies.signals import Observation
from mindtune.policies.state import from_json, to_json

QUICK = {"loss_scale": PolicySettings(thresholds={"scale_window": 2})}


def observe(step: int, scale: float, overflow: bool, loss: float | None = None) -> Observation:
    return Observation(
        step=step,
        loss=3.0 - 0.001 * step if loss is None else loss,
        grad_norm=math.inf if overflow else 1.0,
        overflow=float(overflow),
        update_skipped=float(overflow),
        loss_scale=scale,
    )


def drive(run, scale: float, overflows: Callable[[int, float], bool], steps: int, **options):
    """Let the plant overflow as told; return the scales that acted and the steps lost."""
    scales, lost = [], []
    for step in range(1, steps + 1):
        hit = overflows(step, scale)
        scales.append(scale)
        if hit:
            lost.append(step)
        for grant in run.feed(observe(step, scale, hit, **options)):
            if isinstance(grant, SetLossScale):
                scale = grant.value
    return scales, lost


@pytest.mark.parametrize("hits", [(1, 501, 1001, 1501), (100, 600, 1100, 1600)])
def test_isolated_overflows_lower_nothing(start, hits) -> None:
    run = start(settings={"loss_scale": PolicySettings(thresholds={"scale_window": 2000})})
    scales, _ = drive(run, 2.0**16, lambda step, _: step in hits and step > 1, 1800)
    assert set(scales) == {2.0**16}
    assert run.grants == []


def test_an_overflow_restarts_the_growth(start) -> None:
    run = start(settings={"loss_scale": PolicySettings(thresholds={"scale_window": 20})})
    drive(run, 1024.0, lambda step, _: step == 15, 36)
    assert run.set_points(SetLossScale) == [(35, 2048.0)]


@pytest.mark.parametrize("exponent", [24, 23, 16, 10, 0])
def test_a_known_scale_is_found_with_one_lost_update(start, exponent) -> None:
    known = 2.0**exponent
    settings = {"loss_scale": PolicySettings(thresholds={"known_scale": known})}
    run = start(settings=settings)
    scales, lost = drive(run, 2.0**24, lambda _, scale: scale > known, 60)
    assert scales[-1] == known
    assert len(lost) == (0 if exponent == 24 else 1)
    # Should the trials have been wrong, the search goes on from there.
    run = start(settings=settings)
    scales, lost = drive(run, 2.0**24, lambda _, scale: scale > known / 8, 60)
    assert scales[-1] <= known / 8
    assert len(lost) <= 6


def test_above_a_known_scale_one_step_of_growth_is_halved_as_ever(start) -> None:
    settings = {
        "loss_scale": PolicySettings(thresholds={"known_scale": 1024.0, "scale_window": 4})
    }
    run = start(settings=settings)
    drive(run, 1024.0, lambda _, scale: scale > 4096.0, 40)
    moves = run.set_points(SetLossScale)
    assert moves[:4] == [(4, 2048.0), (8, 4096.0), (12, 8192.0), (13, 4096.0)]
    assert {value for _, value in moves[2:]} == {8192.0, 4096.0}


@pytest.mark.parametrize("known", [1024.0, 1.0, None])
@pytest.mark.parametrize("clean", [1, 500])
def test_a_scale_that_ran_clean_outweighs_a_lower_known_one(start, known, clean) -> None:
    thresholds = {} if known is None else {"known_scale": known}
    run = start(settings={"loss_scale": PolicySettings(thresholds=thresholds)})
    # After `clean` steps at 65536 two overflows in a row halve it, whatever the trials visited.
    drive(run, 65536.0, lambda step, scale: step > clean and scale > 32768.0, clean + 20)
    assert run.set_points(SetLossScale) == [(clean + 2, 32768.0)]


def test_a_state_that_was_stored_without_the_clean_scale_is_read():
    stored = to_json(LossScaleState(credit=1, clean=7, clean_scale=512.0))
    assert from_json(LossScaleState, stored).clean_scale == 512.0
    del stored["clean_scale"]
    assert from_json(LossScaleState, stored) == LossScaleState(credit=1, clean=7)
    del stored["clean"]
    with pytest.raises(PolicyError, match="clean"):
        from_json(LossScaleState, stored)


def test_growth_right_after_a_window_is_halved_and_not_thrown_back_to_the_known_scale(start):
    run = start(settings={"loss_scale": PolicySettings(thresholds={"known_scale": 1024.0})})
    drive(run, 65536.0, lambda _, scale: scale > 65536.0, 1010)
    assert run.set_points(SetLossScale) == [(1000, 131072.0), (1001, 65536.0)]


@pytest.mark.parametrize("exponent", range(24, 4, -1))
def test_a_start_too_high_loses_no_more_updates_than_halving(start, exponent) -> None:
    limit = 2.0**exponent
    run = start()
    scales, lost = drive(run, 2.0**24, lambda _, scale: scale > limit, 60)
    assert len(lost) <= 24 - exponent
    # At most one bit below the largest scale that fits.
    assert limit / 2 <= scales[-1] <= limit


def test_a_search_of_ten_bits_takes_six_steps(start) -> None:
    run = start()
    drive(run, 2.0**24, lambda _, scale: scale > 2.0**14, 20)
    assert run.set_points(SetLossScale) == [
        (1, 2.0**23), (2, 2.0**22), (3, 2.0**20), (4, 2.0**18), (5, 2.0**16), (6, 2.0**14),
    ]  # fmt: skip


def test_a_poisoned_batch_costs_one_step_and_no_halving(start) -> None:
    run = start()
    scales, lost = drive(run, 2.0**14, lambda step, _: step == 30, 60)
    assert (lost, set(scales), run.grants) == ([30], {2.0**14}, [])
    bad = start()
    for step in range(1, 60):
        bad.feed(observe(step, 2.0**14, step == 30, math.nan if step == 30 else None))
    assert bad.grants == []


def test_the_second_overflow_in_a_row_halves(start) -> None:
    run = start()
    drive(run, 65536.0, lambda step, scale: step >= 10 and scale > 16384.0, 40)
    assert run.set_points(SetLossScale) == [(11, 32768.0), (12, 8192.0)]


def test_overflows_that_come_often_are_not_isolated(start) -> None:
    run = start()
    drive(run, 65536.0, lambda step, scale: step % 8 == 0 and scale > 32768.0, 80)
    assert run.set_points(SetLossScale) == [(32, 32768.0)]


def test_a_growth_that_does_not_fit_is_taken_back_at_once(start) -> None:
    run = start(settings={"loss_scale": PolicySettings(thresholds={"scale_window": 50})})
    _, lost = drive(run, 1024.0, lambda _, scale: scale > 1024.0, 120)
    assert run.set_points(SetLossScale) == [
        (50, 2048.0), (51, 1024.0), (101, 2048.0), (102, 1024.0),
    ]  # fmt: skip
    assert lost == [51, 102]


def test_growth_ends_at_the_cap_with_one_warning(start) -> None:
    run = start(settings=QUICK)
    scales, _ = drive(run, 2.0**20, lambda *_: False, 300)
    assert max(scales) == 2.0**24
    assert run.events(Advise) == [(10, "loss-scale-cap")]
    at_the_cap = start(settings=QUICK)
    drive(at_the_cap, 2.0**24, lambda *_: False, 300)
    assert at_the_cap.grants == [(2, at_the_cap.grants[0][1])]
    # The next overflows still lower it.
    drive_on = [at_the_cap.feed(observe(step, 2.0**24, True)) for step in (301, 302)]
    assert [len(grants) for grants in drive_on] == [0, 1]


def test_a_scale_above_the_cap_comes_down_to_it(start) -> None:
    run = start()
    drive(run, 2.0**32, lambda _, scale: scale > 2.0**16, 40)
    assert run.set_points(SetLossScale)[0] == (1, 2.0**24)
    assert run.set_points(SetLossScale)[-1] == (6, 2.0**15)


@pytest.mark.parametrize(("exponent", "ends"), [(32, 20), (24, 19), (16, 15), (0, 10), (-4, 10)])
def test_overflow_at_every_step_ends_with_a_diagnosis(start, exponent, ends) -> None:
    run = start()
    scales, _ = drive(run, 2.0**exponent, lambda *_: True, 60)
    assert run.events(RequestStop) == [(ends, "loss-scale-floor")]
    # Every power of two from 1 down was tried.
    assert {2.0**-i for i in range(max(0, -exponent), 6)} <= set(scales[:ends])
    assert min(scales) == 2.0**-5
    (stop,) = [grant for _, grant in run.grants if isinstance(grant, RequestStop)]
    assert f"{ends} overflows in a row" in stop.diagnosis
    assert "the floor of the loss scale (now 0.03125" in stop.diagnosis
    assert "the loss is finite" in stop.diagnosis
    assert "the gradient norm is inf" in stop.diagnosis
    assert "float32" in stop.diagnosis


@pytest.mark.parametrize("exponent", [24, 16, 10])
def test_overflow_from_the_middle_on_ends_within_20_steps(start, exponent) -> None:
    run = start(can_rewind=True)
    drive(run, 2.0**exponent, lambda step, _: step > 100, 160)
    step, name = run.events(RequestStop)[0]
    assert name == "loss-scale-floor"
    assert step <= 120


def test_a_clean_step_now_and_then_does_not_hide_the_floor(start) -> None:
    run = start()
    drive(run, 1.0, lambda step, _: step % 5 != 0, 100)
    ((step, name),) = run.events(RequestStop)
    assert (step, name) == (29, "loss-scale-floor")
    (stop,) = [grant for _, grant in run.grants if isinstance(grant, RequestStop)]
    assert stop.diagnosis.startswith("24 overflows in 48 steps at the floor")


def test_a_bad_loss_is_not_the_scales_fault(start) -> None:
    run = start()
    scales, _ = drive(run, 2.0**16, lambda *_: True, 12, loss=math.nan)
    assert set(scales) == {2.0**16}
    assert run.events(RequestStop)[0] == (3, "never-finite")


def test_overflow_without_effect_is_explained_then_stopped(replay) -> None:
    losses = [11.67, 8.85, 8712.59, 15806.38]
    rows = [{"loss": loss, "overflow": 1.0, "loss_scale": 1024.0} for loss in losses]
    run = replay(rows, reachable=frozenset())
    assert run.events(Advise)[0] == (3, "overflow-without-effect")
    assert "neither skips the update nor lowers the scale" in run.grants[0][1].message
    longer = [{"loss": 9.0 + i % 3, "overflow": 1.0, "loss_scale": 1024.0} for i in range(12)]
    run = replay(longer, reachable=frozenset())
    assert run.events(RequestStop) == [(10, "overflow-without-effect-stop")]


@pytest.mark.parametrize(
    "facts",
    [{"reachable": frozenset()}, {"loss_scale_dynamic": False}, {"mode": "observe"}],
)
def test_a_scale_that_others_manage_is_left_to_them(start, facts) -> None:
    run = start(**facts)
    scale = 2.0**32
    for step in range(1, 60):
        hit = scale > 2.0**16
        run.feed(observe(step, scale, hit))
        scale = scale / 2 if hit else scale
    assert run.records == []


def test_a_run_without_a_scale_is_left_alone(replay) -> None:
    rows = [{"loss": 2 + 0.001 * i, "grad_norm": 1.0, "overflow": 0.0} for i in range(2500)]
    assert replay(rows).records == []
