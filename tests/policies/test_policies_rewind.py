"""When a state counts as lost, what is tried, and how a run ends that cannot be brought back."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from mindtune.policies.arbiter_state import ArbiterState
from mindtune.policies.decisions import RequestStop, Rewind, SetLearningRateScale
from mindtune.policies.ledger import without_rewind
from mindtune.policies.settings import PolicySettings
from mindtune.policies.signals import Observation

NAN = math.nan


def drive(run, losses, *, scale: float = 1.0, first: int = 1, **signals) -> int:
    """Feed losses until the run is ended; return the last step."""
    step = first - 1
    for step, loss in enumerate(losses, start=first):
        row = {"learning_rate_scale": scale, "update_skipped": 0.0, **signals}
        for action in run.feed(Observation(step=step, loss=loss, **row)):
            if isinstance(action, SetLearningRateScale):
                scale = action.value
        if run.events(RequestStop):
            break
    return step


def noise(mean: float, sigma: float, count: int, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, sigma) for _ in range(count)]


def diverging(count: int, seed: int = 0, top: float = 9.0) -> list[float]:
    """Climb from 2 within 12 steps to a level at which the loss scatters without any order."""
    generator = random.Random(seed)
    climb = [2 + (top - 2) * (i + 1) / 12 for i in range(12)]
    return [*noise(2, 0.03, 150, seed), *climb, *(generator.uniform(top - 4, top + 6) for _ in range(count))]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_a_divergence_that_lower_rates_do_not_end_is_rewound(start, seed) -> None:
    run = start(can_rewind=True)
    drive(run, diverging(14, seed))
    found = run.steps_of("divergence")[0]
    ((step, _),) = run.events(Rewind)
    assert step == found + 15
    cuts = run.set_points(SetLearningRateScale)
    assert len([at for at, _ in cuts if at <= step]) >= 2
    record = next(r for r in run.records if r.action == "Rewind")
    assert "lower learning rates did not bring it back" in record.reason
    assert record.evidence["budget"] == 3


def test_a_divergence_that_comes_back_is_left_to_the_learning_rate(start) -> None:
    run = start(can_rewind=True)
    back = [9 - 7 * (i + 1) / 8 for i in range(8)]
    drive(run, [*diverging(0), *back, *noise(2, 0.03, 100, 1)])
    assert run.set_points(SetLearningRateScale)
    assert run.events(Rewind) == []
    assert run.events(RequestStop) == []


def test_a_divergence_that_does_not_come_back_after_a_rewind_is_rewound_again_and_ended(
    start,
) -> None:
    run = start(can_rewind=True)
    last = drive(run, diverging(300))
    steps = [step for step, _ in run.events(Rewind)]
    assert [b - a for a, b in itertools.pairwise(steps)] == [15, 15]
    assert run.events(RequestStop) == [(last, "lost-divergence")]
    (stop,) = [a for _, a in run.grants if isinstance(a, RequestStop)]
    for words in (
        "3 returns to an earlier state",
        "learning rate of the schedule",
        "Last actions",
    ):
        assert words in stop.diagnosis


def test_a_divergence_without_states_to_return_to_is_ended_after_64_steps(start) -> None:
    run = start(can_rewind=False)
    last = drive(run, diverging(300))
    found = run.steps_of("divergence")[0]
    assert found + 63 <= last <= found + 90
    assert run.events(RequestStop) == [(last, "lost-divergence")]
    (stop,) = [a for _, a in run.grants if isinstance(a, RequestStop)]
    assert "no earlier state of this run is at hand" in stop.diagnosis


def test_a_budget_of_none_is_none(start) -> None:
    settings = {"rewind": PolicySettings(limits={"budget": 0})}
    run = start(can_rewind=True, settings=settings)
    drive(run, [*noise(2, 0.03, 50), *[NAN] * 50])
    assert run.events(Rewind) == []
    assert run.events(RequestStop) == [(60, "non-finite-loss")]


def test_the_budget_comes_back_after_1000_steps(start) -> None:
    run, losses = start(can_rewind=True), noise(2, 0.03, 3000)
    for step in (100, 200, 300, 1105, 1210, 2300):
        losses[step - 1] = NAN
        losses[step] = NAN
    drive(run, losses)
    assert [step for step, _ in run.events(Rewind)] == [101, 201, 301, 1106, 1211, 2301]


@pytest.mark.parametrize(
    ("row", "after"),
    [
        # A non-finite gradient that was applied: at once.
        ({"grad_norm": NAN, "update_skipped": 0.0}, 1),
        ({"grad_norm": math.inf, "update_skipped": 0.0, "overflow": 1.0, "loss_scale": 8.0}, 1),
        # A loss that is not finite, while the gradient is or is not measured: a second time.
        ({"loss": NAN, "grad_norm": 1.0, "update_skipped": 0.0}, 2),
        ({"loss": math.inf, "update_skipped": 0.0}, 2),
        # Skipped by the device, or unknown: half of what ends the run.
        ({"loss": NAN, "update_skipped": 1.0}, 5),
        ({"grad_norm": NAN, "update_skipped": None}, 5),
        # Overflows at the floor of the loss scale.
        ({"overflow": 1.0, "loss_scale": 0.5, "update_skipped": 1.0, "grad_norm": math.inf}, 5),
    ],
)
def test_a_lost_state_is_seen_in_time(start, row, after) -> None:
    run = start(can_rewind=True, reachable=frozenset({"learning_rate_scale"}))
    for step in range(1, 60):
        bad = step > 40
        signals = {"loss": 2.0 + 0.01 * (step % 7), "grad_norm": 1.0, "update_skipped": 0.0}
        run.feed(Observation(step=step, **{**signals, **(row if bad else {})}))
        if run.events(Rewind):
            break
    assert step == 40 + after


@pytest.mark.parametrize("good", [3, 5, 10])
@pytest.mark.parametrize(("can_rewind", "latest"), [(True, 100), (False, 60)])
def test_one_good_step_in_between_does_not_hide_that_most_are_not_finite(
    start, good, can_rewind, latest
) -> None:
    run = start(can_rewind=can_rewind)
    for step in range(1, 300):
        bad = step > 50 and step % good
        loss = NAN if bad else 2.0 + 0.01 * (step % 7)
        run.feed(Observation(step=step, loss=loss, update_skipped=float(bool(bad))))
        if run.events(RequestStop):
            break
    assert step <= 50 + latest
    assert bool(run.events(Rewind)) == can_rewind
    assert "finite" in run.grants[-1][1].diagnosis


@pytest.mark.parametrize("can_rewind", [True, False])
def test_a_run_whose_loss_was_never_finite_is_ended_at_the_third(start, can_rewind) -> None:
    run = start(can_rewind=can_rewind)
    last = drive(run, [NAN] * 20, update_skipped=1.0, overflow=1.0, loss_scale=256.0)
    assert last == 3
    assert run.events(RequestStop) == [(3, "never-finite")]
    assert "the weights that were loaded" in run.grants[-1][1].diagnosis


def test_one_bad_batch_at_the_start_does_not_end_the_run(start) -> None:
    run = start(can_rewind=True)
    drive(run, [NAN, *noise(5, 0.1, 30)], update_skipped=1.0)
    assert run.grants == []


def test_a_log_with_an_interval_is_judged_by_steps(start) -> None:
    run = start()
    losses = [4.4, 3.0, 2.2, 1.8, 1.5, NAN, NAN, NAN]
    for epoch, loss in enumerate(losses, start=1):
        run.feed(Observation(step=264 * epoch, loss=loss))
    assert run.events(RequestStop)[0] == (264 * 7, "non-finite-loss")


@pytest.mark.parametrize("first", [20, 40, 100])
def test_bad_batches_that_the_device_skips_are_no_explosion(start, first) -> None:
    run = start(can_rewind=True)
    for step in range(1, 200):
        bad = first <= step < first + 20 and step % 2 == 0
        run.feed(
            Observation(
                step=step, loss=40_000.0 + step**2 if bad else 0.5 + 0.03 * (step % 9),
                grad_norm=400.0 if bad else 1.0 + 0.1 * (step % 7), overflow=0.0,
                update_skipped=float(bad),
            )
        )  # fmt: skip
    assert run.events(Rewind) == []
    assert run.set_points(SetLearningRateScale) == []


def test_an_overflow_that_the_device_skips_is_no_lost_state(start) -> None:
    run = start(can_rewind=True)
    scale = 2.0**24
    for step in range(1, 100):
        hit = scale > 2.0**10
        for action in run.feed(
            Observation(
                step=step, loss=2.0 + 0.01 * (step % 7), grad_norm=math.inf if hit else 1.0,
                overflow=float(hit), update_skipped=float(hit), loss_scale=scale,
            )
        ):  # fmt: skip
            scale = action.value
    assert run.events(Rewind) == []


def test_a_rewind_lowers_the_rate_once_and_it_comes_back(start) -> None:
    run = start(can_rewind=True)
    losses = noise(2, 0.03, 400)
    losses[100] = losses[101] = NAN
    drive(run, losses)
    assert [s for s, _ in run.events(Rewind)] == [102]
    assert run.set_points(SetLearningRateScale) == [(103, 0.5), (167, 1.0)]


def test_after_a_rewind_the_baselines_hold_and_the_rows_begin_anew(start) -> None:
    run = start(can_rewind=True)
    drive(run, diverging(14))
    assert run.events(Rewind)
    before = run.state.detectors.loss
    run.feed(Observation(step=500, loss=2.0, learning_rate_scale=0.1))
    after = run.state.detectors.loss
    assert len(before.held) > 0
    assert after.held == ()
    assert after.window.values[:-1] == before.window.values[1:] or (
        after.window.values[:-1] == before.window.values
    )


def test_in_observe_mode_a_rewind_is_told_and_nothing_is_reset(start) -> None:
    run = start(can_rewind=True, mode="observe")
    drive(run, [*noise(2, 0.03, 100), NAN, NAN, *noise(2, 0.03, 50, 1)])
    assert run.grants == []
    assert [(r.step, r.verdict) for r in run.records if r.action == "Rewind"] == [
        (102, "observed")
    ]
    assert run.state.arbiter.rewound_step is None


def test_a_rewind_that_could_not_be_carried_out_counts_for_nothing(start) -> None:
    run = start(can_rewind=True)
    losses = [*noise(2, 0.03, 100), *[NAN] * 20]
    for step, loss in enumerate(losses, start=1):
        run.feed(Observation(step=step, loss=loss, update_skipped=0.0, learning_rate_scale=1.0))
        if any(isinstance(action, Rewind) for at, action in run.grants if at == step):
            # What the controller does where there is no state to return to.
            run.state = run.state.without_rewind()
        if run.events(RequestStop):
            break
    assert [step for step, _ in run.events(Rewind)] == [102]
    assert run.set_points(SetLearningRateScale) == []
    assert run.events(RequestStop) == [(110, "non-finite-loss")]
    assert "Last actions" not in run.grants[-1][1].diagnosis


def test_what_ended_a_run_ends_it_again_after_it_was_resumed(start) -> None:
    run = start()
    drive(run, [*noise(2, 0.03, 100), *[NAN] * 20])
    stops = [event for _, event in run.events(RequestStop)]
    assert len(stops) == 1
    document = json.loads(json.dumps(run.state.to_json(), allow_nan=False))
    again = start()
    again.state = again.engine.from_json(document, again.state.facts).state
    drive(again, [NAN] * 20, first=121)
    assert [event for _, event in again.events(RequestStop)] == stops


def test_only_the_return_that_was_not_carried_out_is_taken_from_the_told_actions() -> None:
    told = ("step 3: rewind returned to an earlier state", "step 9: a set b from 1 to 2")
    state = ArbiterState(history=(*told, told[0], "step 9: c set d from 1 to 2"), rewound_step=9)
    after = without_rewind(state)
    assert after.rewound_step is None
    assert after.history == (*told, "step 9: c set d from 1 to 2")
    assert without_rewind(ArbiterState(history=told[1:])).history == told[1:]
