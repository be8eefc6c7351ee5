"""Our callback in MindFormers' own trainer: what it reads, what it turns, what it answers.

Every fact about a step is witnessed there without mindtune, by a callback that stands before ours.
"""

import json
import math
import statistics

import pytest

pytestmark = pytest.mark.peer

ACT = {"mode": "act", "out_dir": "run"}
HALF = {"dtype": "float16"}
HIGH = {"initial": 2.0**32, "window": 1000}
PLAN = {
    6: {"learning_rate_scale": 0.0},
    8: {"learning_rate_scale": 0.5},
    9: {"loss_scale": 512.0},
    11: {"learning_rate_scale": 1.0, "loss_scale": 2048.0},
}
ORDER = ["MFLossMonitor", "Witness", "TuneCallback"]


def equal(recorded, witnessed):
    return all(
        ours == theirs or (math.isnan(ours) and math.isnan(theirs))
        for ours, theirs in zip(recorded, witnessed, strict=True)
    )


def sets(training, knob):
    return [entry for entry in training.actions(knob) if entry.verdict == "granted"]


def stops(training):
    return [entry for entry in training.actions("RequestStop") if entry.verdict == "granted"]


# Knobs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["graph", "pynative"])
def turned(request, train):
    return train(
        script="turned_by_hand.py",
        arguments=[json.dumps(PLAN)],
        steps=14,
        batch=4,
        pynative=request.param == "pynative",
        scale={"initial": 1024.0},
        mindtune=ACT,
    )


def test_the_learning_rate_obeys_and_the_step_reports_it(turned):
    scales = turned.recorded("learning_rate_scale")
    assert scales == [1.0] * 6 + [0.0, 0.0] + [0.5] * 3 + [1.0] * 3
    rates, moved = turned.witnessed("learning_rate"), turned.witnessed("moved")
    assert rates[6:8] == moved[6:8] == [0.0, 0.0]
    # The cosine falls by less than a quarter from step to step here; half a scale halves it.
    assert 0.3 < rates[8] / rates[5] < 0.5
    assert rates[11] > rates[10]
    assert 0 < moved[8] < 0.5 * moved[5]
    assert equal(turned.recorded("learning_rate"), rates)


def test_the_loss_scale_obeys_and_the_step_reports_it(turned):
    assert turned.witnessed("loss_scale") == [1024.0] * 9 + [512.0] * 2 + [2048.0] * 3
    assert turned.recorded("loss_scale") == turned.witnessed("loss_scale")


def test_signals_are_those_of_the_step(turned):
    for name in ("loss", "grad_norm", "overflow"):
        assert equal(turned.recorded(name), turned.witnessed(name)), name
    assert turned.recorded("step") == turned.witnessed("number") == list(range(1, 15))
    assert set(turned.recorded("clip_norm")) == {1.0}
    assert set(turned.recorded("global_batch_size")) == {4}


# Ways of plugging in, and the harmless search for a loss scale ---------------------------------


@pytest.fixture(scope="module")
def guarded_search(train):
    # YAML alone; seven values with `local_norm`.
    return train(steps=60, scale=HIGH, local_norm=True, plugged="yaml", mindtune=ACT, **HALF)


@pytest.fixture(scope="module")
def watched_search(train):
    return train(steps=60, scale=HIGH, plugged="registry", mindtune={"out_dir": "run"}, **HALF)


def test_all_ways_of_plugging_in_read_the_block_of_the_yaml(guarded_search, watched_search):
    for training in (guarded_search, watched_search):
        assert [name for name in training.seen.callbacks if name in ORDER] == ORDER
        assert training.seen.failure is None
        assert len(training.rows) == 60
    assert sets(guarded_search, "SetLossScale")
    assert {entry.verdict for entry in watched_search.decisions[1:]} <= {"observed", "refused"}


def test_a_scale_that_starts_at_2_to_the_32_is_searched_faster_and_never_stopped(
    guarded_search, watched_search
):
    lost = sum(watched_search.recorded("overflow"))
    assert lost >= 16
    assert watched_search.recorded("loss_scale")[:3] == [2.0**32, 2.0**31, 2.0**30]
    assert sum(guarded_search.recorded("overflow")) <= lost / 2
    assert equal(guarded_search.recorded("overflow"), guarded_search.witnessed("overflow"))
    for training in (guarded_search, watched_search):
        assert not training.actions("RequestStop", "SetLearningRateScale")
        assert training.seen.stop_reason is None
    grants = sets(guarded_search, "SetLossScale")
    assert [entry.acted for entry in grants] == [entry.requested for entry in grants]


def test_mindformers_own_check_for_nan_still_ends_such_a_run_and_our_result_says_so(train):
    training = train(
        steps=20, scale=HIGH, check_for_nan=True, plugged="registry", mindtune=ACT, **HALF
    )
    assert "There is nan in global_norm" in training.seen.failure
    result = json.loads((training.folder / "run" / "result.json").read_text())
    assert result["outcome"] != "ok"
    assert "There is nan in global_norm" in result["message"]


def test_a_scale_that_grows_too_often_is_an_overflow_storm_that_ends(train):
    # A window of 2: MindFormers' own rule overflows in every third step, for ever.
    greedy = {"initial": 2.0**15, "window": 2}
    lost = {}
    for mode in ("observe", "act"):
        training = train(
            steps=60, scale=greedy, plugged="instance", mindtune={**ACT, "mode": mode}, **HALF
        )
        assert training.seen.stop_reason is None
        lost[mode] = sum(training.witnessed("overflow"))
    assert lost["observe"] >= 10
    assert lost["act"] <= 4


# Learning rates that are far too high ----------------------------------------------------------


def test_a_frozen_loss_with_every_update_skipped_is_stopped_for_the_weights(train):
    training = train(
        steps=40, learning_rate=1000.0, warmup_ratio=0.0, plugged="instance", mindtune=ACT
    )
    losses = training.witnessed("loss")
    assert losses[-1] == pytest.approx(math.log(256), rel=1e-6)
    assert any(training.witnessed("overflow"))
    # Stopped by MindFormers' own loop after ten updates, of norm 0 and then skipped, that left the
    # loss where it was.
    assert len(losses) == losses.index(losses[-1]) + 11
    (stop,) = stops(training)
    assert stop.step == len(losses)
    for text in ("driven the weights out of range", "learning rate", f"{losses[-1]:.9g}"):
        assert text in training.seen.stop_reason
    assert set(training.recorded("loss_scale")) == {None}


def test_weights_that_are_bad_in_float16_are_stopped_for_the_weights_not_for_the_scale(train):
    # The learning rate is out of reach for the policy: nothing but a stop is left.
    fixed = {"policies": {"gradient_norm": {"limits": {"min_scale": 1.0}}}}
    training = train(
        steps=60,
        learning_rate=1.0,
        lr_end=1.0,
        warmup_ratio=0.5,
        scale={"initial": 65536.0, "window": 20},
        plugged="instance",
        mindtune={**ACT, **fixed},
        **HALF,
    )
    losses = training.witnessed("loss")
    last_good = max(index for index, loss in enumerate(losses) if math.isfinite(loss))
    assert len(losses) - (last_good + 1) <= 20
    (stop,) = stops(training)
    assert "not the loss scale" in training.seen.stop_reason
    assert "weights" in training.seen.stop_reason
    assert stop.requested == "non-finite-loss"
    # The scale was not dragged down to its floor meanwhile.
    assert min(training.recorded("loss_scale")) > 1024


def test_a_divergence_without_a_non_finite_value_lowers_the_learning_rate(train):
    losses = {}
    for mode in ("observe", "act"):
        training = train(
            steps=100, learning_rate=1.0, plugged="instance", mindtune={**ACT, "mode": mode}
        )
        assert all(math.isfinite(loss) for loss in training.witnessed("loss"))
        assert training.seen.stop_reason is None
        losses[mode] = training.witnessed("loss")
    cut = sets(training, "SetLearningRateScale")[0]
    assert cut.verdict == "granted"
    assert cut.step <= 12
    after = training.rows[cut.step]
    assert after.learning_rate_scale == pytest.approx(cut.requested)
    assert after.learning_rate == pytest.approx(training.seen.steps[cut.step].learning_rate)
    # Mean of the last ten: the guarded run learns, the other one has only just stopped diverging.
    guarded, unguarded = (sum(losses[mode][20:80]) / 60 for mode in ("act", "observe"))
    assert guarded < unguarded / 2


# What is not trouble ---------------------------------------------------------------------------


def test_a_norm_that_doubles_on_resume_with_another_interleave_is_no_trouble(train):
    first = train(steps=60, saves=True, plugged="instance", mindtune=ACT)
    assert list((first.folder / "run" / "state").glob("*.json"))
    second = train(
        steps=60,
        interleave=2,
        resume_from=first.folder,
        plugged="instance",
        mindtune={**ACT, "out_dir": str(first.folder / "run")},
    )
    rows = first.rows
    assert [row.step for row in rows] == list(range(1, 121))
    assert {row.run for row in rows} == {0, 1}
    before, after = rows[50:60], rows[60:70]
    # The step returns the sum of two losses, MindFormers prints their mean, and so do we record it.
    assert equal([row.loss for row in after], [loss / 2 for loss in second.witnessed("loss")[:10]])
    for name, ratio in (("loss", 1.0), ("grad_norm", 2.0)):
        levels = [
            statistics.median(getattr(row, name) for row in part) for part in (before, after)
        ]
        assert levels[1] / levels[0] == pytest.approx(ratio, rel=0.3), name
    acted = [entry for entry in second_decisions(first, 60) if entry.action != "Advise"]
    assert acted == []
    assert second.seen.stop_reason is None


def second_decisions(training, step):
    return [entry for entry in training.decisions if entry.step > step]


def test_steps_are_counted_as_they_run_where_sink_mode_is_dropped(train):
    training = train(steps=6, sink_mode=True, plugged="registry", mindtune=ACT)
    # MindFormers multiplied the epochs for a sinking that MindSpore drops on a CPU.
    assert training.seen.epochs == 6
    numbers = training.witnessed("number")
    assert numbers == training.recorded("step") == list(range(1, 37))
    assert not [entry for entry in training.decisions if "hidden_steps" in str(entry.requested)]


def test_the_result_of_a_run_in_good_order(turned):
    result = json.loads((turned.folder / "run" / "result.json").read_text())
    assert (result["outcome"], result["steps"]) == ("ok", 14)
