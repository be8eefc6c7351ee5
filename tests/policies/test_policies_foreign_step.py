"""Numbers that MindFormers' own step printed on a CPU, with only what such a step can be told."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from mindtune.policies.decisions import RequestStop, Rewind, SetLearningRateScale, SetLossScale
from mindtune.policies.signals import Observation

# A step that is not ours: nothing to skip with, nothing to go back to.
REACHABLE = frozenset({"learning_rate_scale", "loss_scale"})
# AdamW at 1.0 with a clip at 1, float32.
DIVERGING = [5.51, 5.5, 4.28, 4.84, 11.78, 10.59, 8.41, 10.65, 30.67, 6.84, 12.34, 17.55]
NORMS = [2.7, 2.6, 4.4, 2.3, 20.1, 100.3, 11.2, 4.9, 14.3, 4.2, 15.5, 8.2]
LN_256 = 5.545176029205322
NAN = math.nan


@pytest.fixture
def foreign(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a run over rows, with the facts of a foreign step."""

    def run(rows: list[dict[str, Any]], *, dynamic: bool) -> Any:
        begun = start(reachable=REACHABLE, loss_scale_dynamic=dynamic, optimizer_family="adam")
        for number, row in enumerate(rows, start=1):
            begun.feed(Observation(step=number, **row))
        return begun

    return run


def test_a_loss_worse_than_untrained_lowers_the_rate_however_it_scatters(foreign):
    rows = [
        {"loss": loss, "grad_norm": norm, "overflow": 0.0, "update_skipped": 0.0,
         "learning_rate_scale": 1.0, "clip_norm": 1.0}
        for loss, norm in zip(DIVERGING, NORMS, strict=True)
    ]  # fmt: skip
    run = foreign(rows, dynamic=False)
    assert run.set_points(SetLearningRateScale)[0] == (9, 0.0625)
    assert run.events(RequestStop) == run.events(Rewind) == []
    (found,) = [
        each for each in run.findings if each.step == 9 and each.kind.value == "divergence"
    ]
    assert found.evidence["pattern"] == "worse than untrained"


@pytest.mark.parametrize("sigma", [0.05, 0.1, 0.2])
def test_a_loss_that_scatters_from_the_start_is_not_worse_than_untrained(foreign, sigma):
    for seed in range(40):
        draw = random.Random(seed)
        rows = [{"loss": math.exp(draw.gauss(0, sigma)), "grad_norm": 1.0} for _ in range(13)]
        assert foreign(rows, dynamic=False).set_points(SetLearningRateScale) == []


def test_a_jump_that_is_recovered_from_is_not_worse_than_untrained(foreign):
    losses = [2.0, 2.0, 1.9, 1.9, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.2, 2.5]
    rows = [{"loss": loss, "grad_norm": 1.0} for loss in losses]
    assert foreign(rows, dynamic=False).set_points(SetLearningRateScale) == []


def test_a_frozen_loss_with_non_finite_norms_is_told_as_bad_weights(foreign):
    # Learning rate 1000: the loss freezes at once, the gradients turn NaN in the tenth step.
    first = {"loss": 5.5041, "grad_norm": 2.7, "overflow": 0.0, "update_skipped": 0.0}
    frozen = {**first, "loss": LN_256, "grad_norm": 0.0}
    dead = {**frozen, "grad_norm": NAN, "overflow": 1.0, "update_skipped": 1.0}
    run = foreign([first, *[frozen] * 8, *[dead] * 12], dynamic=False)
    # The first one ends a run; here it goes on.
    assert run.events(RequestStop) == [(12, "frozen-loss"), (19, "non-finite-norm")]
    early, stop = [each for _, each in run.grants if isinstance(each, RequestStop)]
    assert "a checkpoint from before the loss froze" in early.diagnosis
    assert "driven the weights out of range" in stop.diagnosis
    assert f"it has been {LN_256!r} for 18 steps" in stop.diagnosis
    assert "a checkpoint from before step 1," in stop.diagnosis
    assert "still good" not in stop.diagnosis


def test_bad_weights_in_float16_are_not_told_as_a_bad_batch_or_scale(foreign):
    good = [{"loss": loss, "grad_norm": 2.0, "overflow": 0.0, "update_skipped": 0.0,
             "loss_scale": 65536.0} for loss in (5.50, 5.50, 5.01, 5.2, 5.3)]  # fmt: skip
    dead = {"loss": NAN, "grad_norm": NAN, "overflow": 1.0, "update_skipped": 1.0,
            "loss_scale": 65536.0}  # fmt: skip
    run = foreign([*good, *[dead] * 20], dynamic=True)
    (stop,) = [each for _, each in run.grants if isinstance(each, RequestStop)]
    assert "10 batches met the same weights" in stop.diagnosis
    assert "not the loss scale" in stop.diagnosis
    # The scale does not act on the loss, so it is left where it is.
    assert run.set_points(SetLossScale) == []


def test_a_search_from_2_to_the_32_takes_fewer_overflows_and_never_stops(start):
    run = start(reachable=REACHABLE, loss_scale_dynamic=True, optimizer_family="adam")
    scale, lost = 2.0**32, 0
    for step in range(1, 40):
        over = scale > 2.0**16
        lost += over
        grants = run.feed(
            Observation(
                step=step, loss=5.5, grad_norm=NAN if over else 2.0, overflow=float(over),
                update_skipped=float(over), loss_scale=scale, learning_rate_scale=1.0,
            )
        )  # fmt: skip
        scale = next((each.value for each in grants if isinstance(each, SetLossScale)), scale)
    assert lost == 6
    assert run.events(RequestStop) == []
    assert run.set_points(SetLearningRateScale) == []


def test_a_norm_that_doubles_at_once_with_the_same_loss_is_no_trouble(foreign):
    draw = random.Random(0)
    rows = [
        {"loss": 2.9 + draw.gauss(0, 0.1), "grad_norm": (2.0 if step > 60 else 1.0) * 0.6
         * math.exp(draw.gauss(0, 0.3)), "overflow": 0.0, "update_skipped": 0.0}
        for step in range(1, 121)
    ]  # fmt: skip
    run = foreign(rows, dynamic=False)
    assert run.grants == []
