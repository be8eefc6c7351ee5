"""Inputs on which public systems fail, each with the decision that is right, and its relatives."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from mindtune.policies.decisions import (
    Advise,
    RequestStop,
    Rewind,
    SetClipNorm,
    SetLearningRateScale,
    SetLossScale,
    SetSkipThreshold,
)
from mindtune.policies.engine import build_engine
from mindtune.policies.facts import RunFacts
from mindtune.policies.settings import PolicySettings
from mindtune.policies.signals import Observation

GUARDED = frozenset({"learning_rate_scale", "clip_norm", "skip_threshold"})
NAN, INF = math.nan, math.inf
CUTS = (SetLearningRateScale, SetClipNorm, RequestStop, Rewind)


def noise(mean: float, sigma: float, count: int, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, sigma) for _ in range(count)]


@dataclass
class Device:
    """Compares each norm with the thresholds that act, as the training step does."""

    run: object
    skip: float = INF
    clip: float = INF
    step: int = 0
    skipped: list[int] = field(default_factory=list)
    clipped: list[int] = field(default_factory=list)

    def feed(self, norms: list[float], loss: float | None = 2.0) -> Device:
        for norm in norms:
            self.step += 1
            skip, clip = self.skip, self.clip
            lost = not math.isfinite(norm) or norm > skip
            if lost:
                self.skipped.append(self.step)
            elif norm > clip:
                self.clipped.append(self.step)
            observed = None if loss is None else loss + 0.01 * (self.step % 7)
            for action in self.run.feed(
                Observation(
                    step=self.step, loss=observed, grad_norm=norm, update_skipped=float(lost),
                    overflow=float(not math.isfinite(norm)), skip_threshold=skip, clip_norm=clip,
                )
            ):  # fmt: skip
                if isinstance(action, SetSkipThreshold):
                    self.skip = action.value
                elif isinstance(action, SetClipNorm):
                    self.clip = action.value
        return self


@pytest.mark.parametrize("can_rewind", [True, False])
@pytest.mark.parametrize("skipped", [None, 0.0, 1.0])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("loss", [None, 2.0])
def test_r1_a_norm_that_stays_non_finite_ends_the_run_at_the_tenth(
    start, can_rewind, skipped, value, loss
) -> None:
    run = start(can_rewind=can_rewind)
    for step in range(1, 1021):
        bad = step > 20
        run.feed(
            Observation(
                step=step, loss=loss, grad_norm=value if bad else 1.0,
                update_skipped=skipped if bad else 0.0,
            )
        )  # fmt: skip
        if run.events(RequestStop):
            break
    assert run.events(RequestStop) == [(30, "non-finite-norm")]
    record = next(r for r in run.records if r.action == "RequestStop")
    assert "non-finite norm" in record.reason
    assert run.set_points(SetLearningRateScale) in ([], [(run.grants[0][0] + 1, 0.5)])


def test_r1_what_is_no_row_does_not_end_the_run(start) -> None:
    run = start()
    device = Device(run).feed([1.0 if step % 9 else NAN for step in range(1, 500)])
    assert len(device.skipped) == 55
    assert run.events(RequestStop) == []
    assert run.set_points(SetLearningRateScale) == []


@pytest.mark.parametrize("seed", range(5))
def test_r3_one_nan_costs_one_update_and_blinds_nothing(start, seed) -> None:
    run = start(reachable=GUARDED)
    device = Device(run).feed(noise(2, 0.05, 200, seed))
    armed = device.skip
    device.feed([NAN])
    assert device.skip == armed
    device.feed([*noise(2, 0.05, 60, seed + 9), *[50.0] * 5, *noise(2, 0.05, 60, seed + 99)])
    assert device.skipped == [201, 262, 263, 264, 265, 266]
    assert [a for _, a in run.grants if isinstance(a, CUTS)] == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("norm", [20.0, 1e6])
def test_r4_a_burst_does_not_hide_its_own_tail(start, seed, norm) -> None:
    run = start(reachable=GUARDED)
    device = Device(run).feed(
        [*noise(2, 0.05, 200, seed), *[norm] * 10, *noise(2, 0.05, 100, seed + 9)]
    )
    assert device.skipped == list(range(201, 211))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loss", [None, 2.0])
@pytest.mark.parametrize(("level", "lost"), [(3.0, 0), (6.0, 0), (12.0, 16), (100.0, 16)])
def test_r5_a_legal_shift_of_the_level_is_released(start, seed, loss, level, lost) -> None:
    run = start(reachable=GUARDED)
    device = Device(run).feed([*noise(1, 0.1, 100, seed)], loss)
    device.feed(noise(level, 0.1 * level / 3, 300, seed + 9), loss)
    assert len(device.skipped) <= lost
    assert all(step <= 132 for step in (*device.skipped, *device.clipped))
    assert device.clip == INF
    if loss is not None:
        assert device.clipped == []
    # Without a loss, a norm of five times its median is trouble until it proves to be a level.
    if loss is not None or level < 5:
        assert run.set_points(SetLearningRateScale) == []


def test_r6_an_outlier_in_the_warm_up_does_not_let_the_next_one_pass(start) -> None:
    run = start(reachable=GUARDED)
    device = Device(run).feed([*noise(1, 0.1, 10), 50.0, *noise(1, 0.1, 14, 1), 10.0])
    assert run.steps_of("grad_norm_spike") == [11, 26]
    device.feed([*noise(1, 0.1, 20, 2), 10.0])
    assert device.skipped == [47]


@pytest.mark.parametrize(
    ("hysteresis", "halvings"), [(1, [2**15, 2**14, 2**13, 2**12]), (2, []), (3, [])]
)
def test_r9_isolated_overflows_halve_only_without_hysteresis(start, hysteresis, halvings) -> None:
    settings = {"loss_scale": PolicySettings(
        thresholds={"hysteresis": hysteresis, "scale_window": 2000})}  # fmt: skip
    run, scale = start(settings=settings), 2.0**16
    for step in range(1, 1600):
        hit = step in (20, 500, 1000, 1500)
        for action in run.feed(
            Observation(
                step=step, loss=2.0 + 0.01 * (step % 5), grad_norm=INF if hit else 1.0,
                overflow=float(hit), update_skipped=float(hit), loss_scale=scale,
            )
        ):  # fmt: skip
            scale = action.value
    assert [value for _, value in run.set_points(SetLossScale)] == halvings


@pytest.mark.parametrize("exponent", [24, 16, 0])
@pytest.mark.parametrize("can_rewind", [True, False])
def test_r10_overflow_at_the_floor_ends_after_ten_or_at_its_lowest_with_its_cause(
    start, exponent, can_rewind
) -> None:
    run, scale, hits = start(can_rewind=can_rewind), 2.0**exponent, 0
    for step in range(1, 100):
        hits += scale <= 1
        for action in run.feed(
            Observation(
                step=step, loss=3.0 - 0.001 * step, grad_norm=INF, overflow=1.0,
                update_skipped=1.0, loss_scale=scale,
            )
        ):  # fmt: skip
            if isinstance(action, SetLossScale):
                scale = action.value
        if run.events(RequestStop):
            break
    # From above the floor more than ten overflow on the way, and six scales from 1 to 2^-5 do.
    assert hits == (6 if exponent else 10)
    assert step <= 20
    assert run.events(RequestStop) == [(step, "loss-scale-floor")]
    assert len(run.events(Rewind)) <= 3


@pytest.mark.parametrize(
    "options",
    [
        {"reachable": frozenset()},
        {"loss_scale_dynamic": False},
        # The knob is there, and writing to it does nothing.
        {},
    ],
)
def test_r12_overflow_without_effect_ends_the_run(start, options) -> None:
    run = start(**options)
    for step in range(1, 60):
        loss = [11.67, 8.85, 8712.59, 15806.38][step % 4]
        run.feed(Observation(step=step, loss=loss, overflow=1.0, loss_scale=1024.0))
        if run.events(RequestStop):
            break
    assert step <= 20
    assert run.events(RequestStop)[0][1] == "overflow-without-effect-stop"


def falling(jump: float, seed: int, scatter: float) -> list[float]:
    generator = random.Random(seed)
    losses = [5 - 3 * i / 29 for i in range(30)]
    losses += [jump, *[jump - 0.1 - (jump - 2.15) * i / 59 for i in range(60)]]
    return [loss + generator.gauss(0, scatter) for loss in losses]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("jump", [3.0, 4.5, 9.0])
@pytest.mark.parametrize("scatter", [0.0, 0.05])
def test_r15_an_improving_run_is_not_cut(start, seed, jump, scatter) -> None:
    run = start(reachable=GUARDED, can_rewind=True)
    for step, loss in enumerate(falling(jump, seed, scatter), start=1):
        run.feed(Observation(step=step, loss=loss, clip_norm=INF, skip_threshold=INF))
    assert run.grants == []


@pytest.mark.parametrize("can_rewind", [True, False])
def test_r15_nan_is_not_cut_but_stopped(start, can_rewind) -> None:
    run = start(can_rewind=can_rewind)
    for step in range(1, 100):
        loss = NAN if step > 49 else 2.0 + 0.01 * (step % 7)
        run.feed(Observation(step=step, loss=loss, update_skipped=1.0 if step > 49 else 0.0))
        if run.events(RequestStop):
            break
    assert run.events(RequestStop) == [(59, "non-finite-loss")]
    # The only cut there may be is that of the way back.
    assert len(run.set_points(SetLearningRateScale)) == len(run.events(Rewind)) <= 1


def test_r16_a_nan_that_a_log_would_hide_is_seen(start) -> None:
    run = start()
    for step, loss in enumerate([2.0, 1.9, NAN, 1.8], start=1):
        run.feed(Observation(step=step, loss=loss, loss_scale=1.0, update_skipped=0.0))
    assert run.state.detectors.non_finite.total_losses == 1
    assert run.steps_of("non_finite_loss") == [3]


def test_r17_four_ranks_decide_alike_at_the_same_step() -> None:
    engines = [build_engine({}, mode="act") for _ in range(4)]
    facts = RunFacts(reachable=GUARDED, num_ranks=4, data_parallel=4, can_rewind=True)
    states = [engine.init(facts) for engine in engines]
    ids = []
    for step in range(1, 20):
        # One rank's NaN, as it is after the reduction over all ranks.
        norm = NAN if step == 7 else 1.0
        results = [
            engine.step(
                Observation(step=step, loss=2.0, grad_norm=norm, update_skipped=0.0), state
            )
            for engine, state in zip(engines, states, strict=True)
        ]
        states = [result.state for result in results]
        ids.append({repr(result.grants) for result in results})
    assert all(len(said) == 1 for said in ids)
    assert ids[6] != {"()"}
    assert ids[:6] == [{"()"}] * 6


def test_r22_no_state_is_kept_while_the_run_is_bad(start) -> None:
    run, well = start(), []
    for step in range(1, 60):
        loss = NAN if 30 <= step < 40 else 2.0 + 0.01 * (step % 7)
        run.feed(Observation(step=step, loss=loss, update_skipped=0.0))
        well.append(run.healthy)
    assert not any(well[29:46])
    assert well[28]
    assert well[47]


@pytest.mark.parametrize("losses", [[1, 0.9, 0.8, 0.7], [1, 0.9, 0.8, 0.7] * 30])
def test_r24_an_improving_run_is_never_stopped(start, losses) -> None:
    run = start(can_rewind=True)
    for step, loss in enumerate(losses, start=1):
        run.feed(Observation(step=step, loss=loss))
    assert run.grants == []


def test_a_frozen_loss_is_ended_within_20_steps(start) -> None:
    for can_rewind in (True, False):
        run = start(can_rewind=can_rewind)
        for step in range(1, 100):
            frozen = step > 40
            run.feed(
                Observation(
                    step=step, loss=math.log(256) if frozen else 5.0 + 0.01 * (step % 9),
                    grad_norm=NAN if frozen else 1.0, overflow=float(frozen),
                    update_skipped=float(frozen), loss_scale=2.0**16,
                )
            )  # fmt: skip
            if run.events(RequestStop):
                break
        assert step <= 60
        assert run.events(RequestStop)[0][1] == "frozen-loss"
        assert bool(run.events(Rewind)) == can_rewind


def test_a_saturated_clip_gets_advice_and_keeps_its_value(start) -> None:
    run = start(reachable=GUARDED)
    device = Device(run, clip=1.0).feed(noise(20, 2, 200))
    assert device.clip == 1.0
    assert [name for _, name in run.events(Advise)] == ["clip-saturation"]
    (advice,) = [a for _, a in run.grants if isinstance(a, Advise)]
    assert "Raise clip_norm to about" in advice.message
    assert run.set_points(SetClipNorm) == []
