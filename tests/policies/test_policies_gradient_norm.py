"""Cuts where there is trouble, none where there is none, and the way back."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from mindtune.policies.decisions import Advise, RequestStop, SetLearningRateScale
from mindtune.policies.settings import PolicySettings
from mindtune.policies.signals import Observation

SHORT = {
    "gradient_norm": PolicySettings(thresholds={"recover_after": 20, "recover_after_cold": 20})
}


def noise(mean: float, sigma: float, count: int, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, sigma) for _ in range(count)]


def rows(losses=None, norms=None) -> list[dict]:
    count = len(losses if losses is not None else norms)
    return [
        {
            "loss": None if losses is None else losses[i],
            "grad_norm": None if norms is None else norms[i],
        }
        for i in range(count)
    ]


def drive(run, signals: list[dict], scale: float = 1.0, first: int = 1) -> float:
    """Feed signals to a run whose learning-rate scale obeys; return the scale at the end."""
    for step, row in enumerate(signals, start=first):
        observation = Observation(step=step, learning_rate_scale=scale, **row)
        for grant in run.feed(observation):
            if isinstance(grant, SetLearningRateScale):
                scale = grant.value
    return scale


QUIET = 200


def spiking(count: int, norm: float = 20.0, rise: float = 0.3) -> list[dict]:
    losses = [*noise(2, 0.02, QUIET), *[3 + rise * i for i in range(count)]]
    return rows(losses, [*noise(1, 0.05, QUIET, 1), *[norm] * count])


def test_the_third_spike_in_a_row_that_the_loss_confirms_halves_the_rate(start) -> None:
    run = start()
    drive(run, spiking(3))
    assert run.set_points(SetLearningRateScale) == [(203, 0.5)]
    record = next(record for record in run.records if record.policy == "gradient_norm")
    assert (record.policy, record.action, record.before) == (
        "gradient_norm", "SetLearningRateScale", 1.0,
    )  # fmt: skip
    assert "robust deviations above its median" in record.reason
    assert record.evidence["consecutive"] == 3
    assert record.budget_left == 15


def test_lasting_trouble_is_cut_every_eighth_step_down_to_the_floor(start) -> None:
    run = start()
    drive(run, spiking(90, rise=1.0))
    cuts = run.set_points(SetLearningRateScale)
    assert [value for _, value in cuts] == [2.0**-i for i in range(1, 7)]
    assert min(b[0] - a[0] for a, b in pairwise(cuts)) >= 8
    assert "learning-rate-floor" in [name for _, name in run.events(Advise)]


@pytest.mark.parametrize(
    ("losses", "norms"),
    [
        pytest.param(noise(2, 0.1, 400), noise(1, 0.2, 400, 1), id="noise"),
        pytest.param(
            [10.6 * 0.99**i + x for i, x in enumerate(noise(0, 0.05, 400))],
            [44.0, 47.0, *[1 + 30 * 0.9**i for i in range(398)]],
            id="warm-up with norms of 44 and 47",
        ),
        pytest.param(noise(2, 0.05, 300), [*noise(1, 0.1, 100), *noise(3, 0.1, 200)], id="shift"),
        pytest.param(None, [*noise(1, 0.1, 100), *noise(3, 0.1, 300)], id="shift without a loss"),
        pytest.param(
            noise(2, 0.05, 400),
            [50.0 if i % 20 == 7 else x for i, x in enumerate(noise(1, 0.1, 400))],
            id="isolated spikes",
        ),
        pytest.param(
            [8.0 if i % 40 == 39 else x for i, x in enumerate(noise(2, 0.05, 400))],
            [50.0 if i % 40 == 39 else x for i, x in enumerate(noise(1, 0.1, 400))],
            id="isolated bad batches",
        ),
        pytest.param(noise(2, 0.05, 300), [*noise(1, 0.1, 200), *[20.0] * 100], id="norm alone"),
        pytest.param(
            [*[5 - 3 * i / 29 for i in range(30)], 4.5, *[4.4 - 2.35 * i / 59 for i in range(60)]],
            None,
            id="a spike that is recovered from",
        ),
        pytest.param([*noise(2, 0.05, 60), *[math.nan] * 9], None, id="non-finite losses"),
        pytest.param([0.0, -0.0] * 200, [0.0, 0.05] * 200, id="zero losses"),
        pytest.param([*noise(3, 0.05, 100), *noise(2, 0.05, 100), *noise(1, 0.05, 200)], None, id="steps"),
    ],
)  # fmt: skip
def test_a_healthy_run_is_never_touched(start, losses, norms) -> None:
    run = start()
    assert drive(run, rows(losses, norms)) == 1.0
    assert run.set_points(SetLearningRateScale) == []


def test_spikes_at_a_rate_are_trouble_where_the_loss_follows(start) -> None:
    run = start()
    pattern = [
        {"loss": 4.0 + 0.1 * i, "grad_norm": 30.0} if i % 2 else {"loss": 2.0, "grad_norm": 1.0}
        for i in range(40)
    ]
    drive(run, [*rows(noise(2, 0.02, 100), noise(1, 0.05, 100, 1)), *pattern])
    # The 8th flag within 48 steps.
    assert run.set_points(SetLearningRateScale)[0] == (100 + 16, 0.5)


def test_without_a_loss_a_norm_of_five_medians_is_trouble(start) -> None:
    run = start()
    drive(run, rows(None, [*noise(1, 0.05, 100), *[8.0] * 3]))
    assert run.set_points(SetLearningRateScale) == [(103, 0.5)]


def test_an_exploding_start_is_cut_to_a_sixteenth_and_again_if_that_is_not_enough(start) -> None:
    run = start()
    falling = [5.57, 5.27, 6.99, 6.51, 4.09, 11.52, 11.89, 13.37, 13.64, 14.24]
    drive(run, rows([*falling, *[14.0 + 0.01 * i for i in range(10)]]))
    assert run.set_points(SetLearningRateScale)[:2] == [(8, 0.0625), (14, 0.03125)]


@pytest.mark.parametrize("skip", [{"update_skipped": 1.0}, {"overflow": 1.0}])
def test_nothing_is_cut_while_updates_are_skipped(start, skip) -> None:
    run = start(reachable=frozenset({"learning_rate_scale"}))
    falling = rows([3.99, 3.70, 3.55, 3.52, 3.24])
    elevated = [{"loss": loss, **skip} for loss in (15.0, 15.6, 16.4, 17.3, 16.0)]
    drive(run, [*falling, *elevated, *rows([3.2, 3.15, 3.08, 3.23])])
    assert "divergence" in run.kinds()
    assert run.set_points(SetLearningRateScale) == []


def test_recovery_goes_in_steps_and_only_after_a_healthy_stretch(start) -> None:
    run = start(settings=SHORT)
    healthy = rows(noise(2, 0.02, 120, 3), noise(1, 0.05, 120, 4))
    scale = drive(run, [*spiking(12, rise=0.5), *healthy])
    values = [value for _, value in run.set_points(SetLearningRateScale)]
    assert values == [0.5, 0.25, 0.5, 1.0]
    assert scale == 1.0
    raises = run.set_points(SetLearningRateScale)[2:]
    assert raises[1][0] - raises[0][0] >= 20


def test_a_raise_after_which_the_loss_is_worse_is_undone_and_tried_later(start) -> None:
    run = start(settings=SHORT)
    generator = random.Random(5)
    scale, step = 0.25, 0
    raised = []
    for step in range(1, 260):
        loss = (2.0 if scale <= 0.25 else 2.4) + generator.gauss(0, 0.02)
        grants = run.feed(
            Observation(step=step, loss=loss, grad_norm=1.0, learning_rate_scale=scale)
        )
        for grant in grants:
            if isinstance(grant, SetLearningRateScale):
                raised.append((step, scale, grant.value))
                scale = grant.value
    ups = [step for step, before, after in raised if after > before]
    downs = [step for step, before, after in raised if after < before]
    assert len(ups) == len(downs) == 2
    assert downs[0] - ups[0] <= 18
    assert ups[1] - downs[0] == 4 * 20
    assert scale == 0.25
    undone = {record.step: record for record in run.records if record.verdict == "undone"}
    assert [(step, record.requested) for step, record in undone.items()] == [
        (step, 0.25) for step in downs
    ]
    assert all(record.acted == 0.25 for record in list(undone.values()))
    assert any(
        (record.outcome or "").startswith("undone: median loss went from")
        for record in run.records
    )


@pytest.mark.parametrize(
    ("row", "stop", "words"),
    [
        ({"loss": 1.0, "grad_norm": math.nan}, "non-finite-norm", "the loss is finite"),
        ({"loss": math.nan, "update_skipped": 0.0}, "non-finite-loss", "updates were applied"),
        ({"loss": math.nan, "update_skipped": 1.0}, "non-finite-loss", "every update was skipped"),
    ],
)
def test_non_finite_values_stop_the_run_at_the_tenth(start, row, stop, words) -> None:
    run = start()
    drive(run, [*[{"loss": 1.0 + 0.01 * i, "grad_norm": 1.0} for i in range(20)], *[row] * 1000])
    assert run.events(RequestStop) == [(30, stop)]
    (event,) = [grant for _, grant in run.grants if isinstance(grant, RequestStop)]
    assert words in event.diagnosis
    assert "10 steps in a row" in event.diagnosis
    assert run.set_points(SetLearningRateScale) == []
    assert stop.replace("-", " ").replace("non finite", "non-finite") in run.records[0].reason


def test_a_frozen_loss_with_skipped_updates_stops_the_run(start) -> None:
    run = start()
    frozen = {
        "loss": math.log(256),
        "grad_norm": math.nan,
        "overflow": 1.0,
        "loss_scale": 1.0,
        "update_skipped": 1.0,
    }
    drive(run, [*rows(noise(3, 0.1, 40)), *[frozen] * 20])
    assert run.events(RequestStop)[0][1] in ("frozen-loss", "loss-scale-floor")
    assert run.events(RequestStop)[0][0] <= 40 + 12


def test_a_single_nan_is_counted_and_nothing_is_done(replay) -> None:
    run = replay([{"loss": v, "update_skipped": 0.0} for v in (2.0, 1.9, math.nan, 1.8)])
    assert run.grants == []
    assert run.steps_of("non_finite_loss") == [3]
