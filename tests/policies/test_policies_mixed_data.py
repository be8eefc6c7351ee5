"""Healthy runs whose batches are not alike: of two sources, of several tasks, with heavy tails."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from mindtune.policies.decisions import GUARDS, Advise, SetSkipThreshold
from mindtune.policies.detectors import DetectorState, update
from mindtune.policies.findings import FindingKind
from mindtune.policies.signals import Observation

GUARDED = frozenset({"learning_rate_scale", "clip_norm", "skip_threshold"})
Shape = Callable[[random.Random, int], dict]


def falling(step: int) -> float:
    return 2 + 8 * math.exp(-step / 60) + 1.5 * (1 + step / 100) ** -0.5


def hard(g: random.Random, step: int, *, is_hard: bool, loss: float, norm: float) -> dict:
    return {
        "loss": falling(step) * (loss if is_hard else 1.0) + g.gauss(0, 0.03),
        "grad_norm": 0.5 * (norm if is_hard else 1.0) * g.lognormvariate(0, 0.2),
    }


def one_in_ten(g: random.Random, step: int) -> dict:
    return hard(g, step, is_hard=g.random() < 0.1, loss=3, norm=12)


def by_turns(length: int) -> Shape:
    return lambda g, step: hard(g, step, is_hard=(step // length) % 2 == 1, loss=2, norm=6)


def seven_tasks(g: random.Random, step: int) -> dict:
    level = (0.1, 0.5, 1, 2, 4, 0.05, 8)[step % 7]
    return {
        "loss": level * (1 + 2 * math.exp(-step / 400)) * g.lognormvariate(0, 0.1),
        "grad_norm": level * g.lognormvariate(0, 0.2),
    }


def heavy_norms(g: random.Random, step: int) -> dict:
    """Norms alone: no loss tells that they are usual."""
    return {"grad_norm": (0.4 + 8 * math.exp(-step / 40)) * g.lognormvariate(0, 1)}


def heavy_both(g: random.Random, step: int) -> dict:
    return {"loss": 0.5 * falling(step) + g.paretovariate(2.5), "grad_norm": g.paretovariate(2.5)}


RUNS: dict[str, tuple[Shape, int]] = {
    "one batch in ten of another source": (one_in_ten, 3000),
    "sources that take turns every 10 steps": (by_turns(10), 2000),
    "sources that take turns every step": (by_turns(1), 1000),
    "seven tasks": (seven_tasks, 2000),
    "norms with heavy tails, no loss": (heavy_norms, 2000),
    "heavy tails of both": (heavy_both, 2000),
}


def drive(start, shape: Shape, steps: int, seed: int = 0):
    """Feed a run whose device obeys; return it, and the steps whose update the guard skipped."""
    run, g = start(reachable=GUARDED, can_rewind=True), random.Random(seed)
    acting = {"learning_rate_scale": 1.0, "clip_norm": math.inf, "skip_threshold": math.inf}
    skipped = []
    for step in range(1, steps + 1):
        row = shape(g, step)
        skips = row["grad_norm"] > acting["skip_threshold"]
        skipped += [step] if skips else []
        observation = Observation(step=step, update_skipped=float(skips), **row, **acting)
        acting |= {a.knob: a.value for a in run.feed(observation) if not isinstance(a, Advise)}
    return run, skipped


@pytest.mark.parametrize("name", RUNS)
def test_no_knob_is_turned_where_batches_differ_by_nature(start, name) -> None:
    run, skipped = drive(start, *RUNS[name])
    assert [a for _, a in run.grants if type(a) not in (*GUARDS, Advise)] == []
    assert len(skipped) <= 48
    # Each move of the guard is a record.
    assert len(run.set_points(SetSkipThreshold)) <= 40


def test_a_part_of_the_data_is_not_skipped_for_ever_and_the_user_is_told(start) -> None:
    run, skipped = drive(start, one_in_ten, 3000)
    assert skipped[-1] < 1500
    (advice,) = [a for _, a in run.grants if isinstance(a, Advise)]
    assert advice.id == "skip-guard-raised-1"
    for words in (
        "of the last 1000 updates were skipped",
        "a part of the data",
        "act from now on",
    ):
        assert words in advice.message


def test_what_is_far_beyond_all_data_stays_skipped_and_the_user_is_told(start) -> None:
    def poison(g: random.Random, step: int) -> dict:
        return hard(g, step, is_hard=step % 20 == 0, loss=3, norm=1e4)

    run, skipped = drive(start, poison, 2000)
    assert skipped == list(range(40, 2001, 20))
    assert [name for _, name in run.events(Advise)] == ["skip-often"]


def test_two_levels_of_a_signal_are_no_outliers_of_each_other() -> None:
    state, g = DetectorState(), random.Random(0)
    spikes = []
    for step in range(1, 3001):
        loss = (2.0 if (step // 10) % 2 else 4.0) + g.gauss(0, 0.03)
        loss = 40.0 if step == 2500 else loss
        findings, state = update(Observation(step=step, loss=loss), state)
        spikes += [f.step for f in findings if f.kind is FindingKind.LOSS_SPIKE]
    assert [step for step in spikes if step > 500] == [2500]
