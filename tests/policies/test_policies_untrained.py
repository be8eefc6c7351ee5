"""One bad update throws the weights to where nothing was learnt, and the loss stays there."""

from __future__ import annotations

import math
import random

import pytest

from mindtune.policies.decisions import SetLearningRateScale
from mindtune.policies.detectors import DetectorState, update
from mindtune.policies.detectors.untrained import UNTRAINED
from mindtune.policies.signals import Observation


def poisoned(at: int):
    """Return a fault that throws the weights far out without a sign in the loss of that step."""
    return lambda step, loss, gradient: (loss, [1e4, -1e4, 1e4, -1e4] if step == at else gradient)


@pytest.mark.parametrize("at", [15, 20, 25, 28])
def test_a_poisoned_update_before_the_guard_is_armed_is_taken_back(plant, at) -> None:
    guarded = plant(fault=poisoned(at)).drive(300)
    assert guarded.rewinds == [at + 8]
    assert guarded.final_loss() == pytest.approx(2.0, rel=0.02)
    assert [v for _, v in guarded.run.set_points(SetLearningRateScale)] == [0.5, 1.0]
    assert plant(guarded=False, fault=poisoned(at)).drive(300).final_loss() > 40


@pytest.mark.parametrize("at", [15, 20, 28, 31])
def test_a_run_that_cannot_go_back_is_ended_with_the_reason(plant, at) -> None:
    ended = plant(fault=poisoned(at), can_rewind=False).drive(300)
    step, stop = ended.stopped
    assert step < at + 100
    assert "no earlier state of this run is at hand" in stop.diagnosis
    assert ".." not in stop.diagnosis
    # It is no new level, to which the learning rate would come back.
    assert ended.knobs["learning_rate_scale"] < 0.2


def named(losses: list[float], **signals: list) -> list[int]:
    """Return the steps in which a run is called untrained again."""
    state, steps = DetectorState(), []
    for index, loss in enumerate(losses):
        row = {name: values[index] for name, values in signals.items()}
        findings, state = update(Observation(step=index + 1, loss=loss, **row), state)
        steps += [f.step for f in findings if f.evidence.get("pattern") == UNTRAINED]
    return steps


def learning(count: int, floor: float, seed: int = 0) -> list[float]:
    g = random.Random(seed)
    return [floor + (10 - floor) * math.exp(-i / 20) + g.gauss(0, 0.03) for i in range(count)]


def test_it_is_told_from_the_eighth_loss_on_as_long_as_it_lasts() -> None:
    g = random.Random(1)
    stays = [10.4 + g.gauss(0, 0.03) for _ in range(100)]
    assert named([*learning(200, 2), *stays, *learning(50, 2)[5:]]) == list(range(208, 301))


@pytest.mark.parametrize(
    "then",
    [
        [6 + 0.03 * (i % 3) for i in range(60)],  # a harder stage, still better than no model
        [10.4 * 0.98**i for i in range(60)],  # a new task, which is learnt at once
        [10.4 if i % 6 else 2.0 for i in range(60)],  # bad batches, and good ones between
    ],
)
def test_a_loss_that_rises_for_another_reason_is_no_run_that_forgot(then) -> None:
    assert named([*learning(200, 2), *then]) == []


def test_a_run_that_has_learnt_little_has_nothing_to_forget() -> None:
    assert named([*learning(200, 8), *[10.4 + 0.01 * (i % 3) for i in range(60)]]) == []


def test_a_loss_that_is_summed_over_samples_follows_the_batch() -> None:
    losses = [*learning(200, 2), *[16 + 0.03 * (i % 3) for i in range(60)]]
    assert named(losses, global_batch_size=[8] * 200 + [64] * 60) == []
    assert named(losses, global_batch_size=[8] * 260) != []


def test_around_zero_the_first_losses_say_nothing() -> None:
    losses = [0.02 * x for x in learning(200, 2)] + [0.21 + 0.001 * (i % 3) for i in range(60)]
    assert named(losses) == []
