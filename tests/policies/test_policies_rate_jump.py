"""A learning rate that jumps above every earlier one, and a loss that answers."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

import pytest

from mindtune.policies.decisions import Rewind, SetLearningRateScale
from mindtune.policies.detectors import DetectorState, update
from mindtune.policies.detectors.rate_jump import RATE_JUMP
from mindtune.policies.findings import Severity
from mindtune.policies.signals import Observation

JUMP = 50


def recorded(name="learning_rate_jump"):
    """Return the reference workload at 30 times its rate from step 50 on, which nobody cut."""
    path = Path(__file__).parent / "data" / f"{name}.csv"
    with path.open(encoding="utf-8") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def jumps(rows):
    state, found = DetectorState(), []
    for step, row in enumerate(rows, start=1):
        findings, state = update(Observation(step=step, **row), state)
        found += [f for f in findings if f.evidence.get("pattern") == RATE_JUMP]
    return found


def schedule(rate_of, *, loss_of=lambda step: 3.0, count=200, seed=0):
    draw = random.Random(seed)
    return [
        {"loss": loss_of(step) * draw.gauss(1, 0.02), "learning_rate": rate_of(step)}
        for step in range(1, count + 1)
    ]


def bump(step):
    return 3.0 if step <= 100 else 3.0 + 3.0 * math.exp(-(step - 101) / 5)


def test_the_rate_is_named_in_the_first_step_that_shows_it():
    first, *_ = found = jumps(recorded())
    assert {f.severity for f in found} == {Severity.CRITICAL}
    assert first.step == JUMP + 1
    assert first.evidence["learning_rate"] == pytest.approx(0.02215)
    assert first.evidence["highest_before"] == pytest.approx(0.001)
    assert "which is 22.1 times the highest before" in first.message


def test_a_large_jump_needs_no_spike_to_be_named():
    first, *_ = found = jumps(recorded("learning_rate_jump_mild"))
    assert first.step == JUMP + 1
    assert first.evidence["loss"] == pytest.approx(4.058)
    assert {f.step for f in found} == {JUMP + 1}


@pytest.mark.parametrize(("factor", "named"), [(3.5, False), (11.0, False), (14.0, True)])
def test_the_larger_the_jump_the_less_the_loss_has_to_say(factor, named):
    # A quiet loss counts as scattered by 5 %, so that one step stands 4.1 deviations above.
    rows = [
        {
            "loss": 3.0 * (1.0 + 4.1 * 0.05 * (step == 102)),
            "learning_rate": 1e-4 * (factor if step > 100 else 1.0),
        }
        for step in range(1, 121)
    ]
    assert bool(jumps(rows)) is named


def test_the_run_goes_back_and_on_at_a_sixteenth(replay):
    run = replay(recorded(), can_rewind=True)
    assert [step for step, _ in run.events(Rewind)] == [JUMP + 1]
    assert run.set_points(SetLearningRateScale)[0] == (JUMP + 1, 1 / 16)


def test_without_earlier_states_the_rate_is_cut_all_the_same(replay):
    run = replay(recorded())
    assert run.events(Rewind) == []
    assert run.set_points(SetLearningRateScale)[0] == (JUMP + 1, 1 / 16)


@pytest.mark.parametrize("mode", ["act", "observe"])
def test_a_jump_that_the_loss_does_not_answer_is_meant(replay, mode):
    rows = schedule(lambda step: 1e-4 if step <= 100 else 3e-3)
    assert jumps(rows) == []
    assert replay(rows, mode=mode, can_rewind=True).grants == []


@pytest.mark.parametrize(
    "rate_of",
    [
        lambda step: 1e-3 * (0.5 + 0.5 * math.cos(math.pi * ((step - 1) % 100) / 100)),  # restarts
        lambda step: 1e-3 * min(1.0, step / 20),  # a warm-up
        lambda step: 1e-5 * 1.2 ** min(step, 30),  # an exponential one
        lambda step: 1e-6 if step <= 8 else 1e-3,  # a stair in the first steps
        lambda _step: 0.0,
        lambda step: math.nan if step == 90 else 1e-3,
        lambda step: 1e-3 if step <= 100 else 2e-3,  # for a batch twice as large
        lambda _step: None,
    ],
)
def test_a_usual_schedule_is_no_jump_though_the_loss_rises(rate_of):
    assert jumps(schedule(rate_of, loss_of=bump)) == []


def test_the_loss_has_eight_steps_to_answer():
    for late, named in ((8, True), (9, False)):
        rows = schedule(
            lambda step: 1e-4 if step < 100 else 3e-3,
            loss_of=lambda step, late=late: 6.0 if step == 100 + late else 3.0,
        )
        assert bool(jumps(rows)) is named


def test_a_note_of_the_cold_start_hides_no_jump():
    rows = schedule(lambda step: 1e-4 if step < 40 else 3e-3, loss_of=lambda step: 3.0, count=60)
    for row in rows[40:44]:
        row["loss"] = 30.0
    assert jumps(rows)[0].step == 41
