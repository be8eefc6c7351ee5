"""Judgements of a study on known numbers: stability, early stop, winner, what was learnt."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mindtune.controller.contract import (
    KnobsFile,
    TrialPlan,
    TrialRecord,
    TrialResult,
    parse,
    write_json,
    write_yaml,
)
from mindtune.controller.trials.confirm import Plan, choose, judge_convergence, num_leaders
from mindtune.controller.trials.early_stop import (
    Progress,
    ProgressReader,
    possible_trial,
    stop_reason,
)
from mindtune.controller.trials.learned import learn
from mindtune.controller.trials.measure import Launch
from mindtune.controller.trials.measured import bad_steps, final_loss, loss_curve, measured_trial
from mindtune.controller.trials.outcome import TrialOutcome
from mindtune.controller.trials.progress import TimeLeft
from mindtune.controller.trials.summary import Measurement
from mindtune.search.convergence import ConvergenceVerdict
from mindtune.search.halving import Bar
from mindtune.search.scoring import stability


def result(**fields):
    content = {"outcome": "ok", "step_time_s": [0.1] * 20, **fields}
    return parse(TrialResult, content, source="test")


def outcome(trial, **record):
    content = {"outcome": "ok", "wall_s": 1.0, **record}
    return TrialOutcome(record=TrialRecord.model_validate(content), result=trial)


# What a result measured

CALM = [3.0 - 0.01 * step for step in range(20)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"loss": CALM}, 0),
        ({"loss": [*CALM[:10], "nan", *CALM[11:]]}, 1),
        ({"loss": [*CALM[:15], 30.0, *CALM[16:]]}, 1),
        ({"grad_norm": [1.0] * 18 + ["inf", "inf"]}, 2),
        ({"loss": [1e308] * 20, "grad_norm": [-1e308] * 20}, 20),
        ({"overflow": [0] * 15 + [1] * 5, "update_skipped": [0] * 15 + [1] * 5}, 5),
        ({"overflow": [1, 0], "loss": ["inf", *CALM[1:]]}, 1),
        ({"overflow": 0.1}, 2),
        ({"loss": 2.5}, 0),
        ({}, 0),
    ],
)
def test_bad_steps_are_counted_once_each(fields, expected):
    assert bad_steps(result(**fields), 20) == expected


def test_result_becomes_a_measured_trial():
    trial = result(
        step_time_s=[0.1] * 19 + [0.5], overflow=[1] + [0] * 19, tokens_per_step=640, loss=CALM
    )
    measured = measured_trial(outcome(trial, peak_memory_bytes=7))
    assert measured.median_s == 0.1
    assert measured.bad_steps == 1
    assert measured.peak_memory_bytes == 7
    assert measured.throughput("tokens_per_step") == 6400
    assert stability(measured) == pytest.approx(0.95 * 0.1 / 0.12)


def test_one_step_time_stands_for_every_step():
    measured = measured_trial(outcome(result(step_time_s=0.2, overflow=[1, 0, 0, 0])))
    assert measured.step_time_s == (0.2,) * 4
    assert measured.bad_steps == 1


def test_failed_trial_measures_nothing():
    assert measured_trial(outcome(result(), outcome="crash")) is None
    assert measured_trial(outcome(None, outcome="timeout")) is None


def test_losses_are_counted_from_sample_zero():
    curve = loss_curve(result(loss=[3.0, 2.0]), warmup_steps=5, samples_per_step=16)
    assert curve.samples == (96.0, 112.0)
    assert loss_curve(result(loss=2.0), warmup_steps=5, samples_per_step=16) is None
    assert final_loss(result(loss=[9.0] * 8 + [2.0, 4.0])) == 3.0
    assert math.isnan(final_loss(result(loss=[9.0, "nan"])))
    assert math.isnan(final_loss(result(loss=[1e308] * 20)))  # no float is as large as their sum
    assert final_loss(result()) is None


# Early stop

BAR = Bar(step_time_s=0.1, stability=1.0, mfu_exponent=1.0, stability_exponent=1.0)


def seen(times, bad=0):
    is_bad = tuple(index < bad for index in range(len(times)))
    return Progress(steps=len(times) + 2, step_time_s=tuple(times), is_bad=is_bad)


@pytest.mark.parametrize(
    ("progress", "stopped"),
    [
        (seen([0.2] * 20), True),
        (seen([0.2] * 11), False),  # before the first rung
        (seen([0.2] * 91), False),  # as good as over
        (seen([]), False),
    ],
)
def test_trial_is_stopped_only_where_that_saves_something(progress, stopped):
    reason = stop_reason(progress, BAR, measure_steps=100)
    assert (reason is not None) == stopped
    if reason is not None:
        assert reason == (
            "stopped after 20 of 100 steps: at best 50% of the best value by its first 12 "
            "(a step of 0.2 s, best config 0.1 s), and noise explains 20%"
        )


def test_what_could_have_come_of_a_stopped_trial_is_more_than_what_it_measured():
    progress = seen([0.3] * 6 + [0.2] * 6, bad=2)
    possible = possible_trial(progress, measure_steps=100)
    assert (len(possible.step_time_s), possible.bad_steps) == (100, 2)
    assert possible.median_s == pytest.approx(0.2 * 0.2 / 0.3)
    assert stability(possible) == pytest.approx(0.98)
    assert possible_trial(seen([0.3] * 11), measure_steps=100) is None


def test_progress_is_read_as_it_grows(tmp_path):
    path = tmp_path / "signals.csv"
    reader = ProgressReader(path, warmup_steps=1)
    assert reader.read().steps == 0
    path.write_text("step,phase,loss,step_time_s\n1,compile,3,9.0\n2,train,2,0.5\n3,tr")
    assert reader.read() == Progress(steps=2, step_time_s=(0.5,), is_bad=(False,))
    with path.open("a") as table:
        table.write("ain,nan,0.25\n4,eval,,7.0\nwhat,is,this,row\n")
    assert reader.read() == Progress(steps=4, step_time_s=(0.5, 0.25), is_bad=(False, True))


# The confirmation


def repeats(*values, memory=100, outcome="ok"):
    return [
        Measurement(
            repeat=index + 1, seed=index, outcome=outcome, value=value, peak_memory_bytes=memory,
            wall_s=1.0,
        )
        for index, value in enumerate(values)
    ]  # fmt: skip


def verdict(*, ok):
    return ConvergenceVerdict(ok, 3.0, 2.0, 100.0, "loss 3.0 is above")


BASE = repeats(1.0, 1.01, 0.99)


@pytest.mark.parametrize(
    ("leaders", "verdicts", "winner", "words"),
    [
        ({1: repeats(1.5, 1.49, 1.51)}, {}, 1, "1.50 x the base config's value"),
        ({1: repeats(1.5, 0.7, 0.9)}, {}, 0, "no config is better than the base config"),
        ({1: repeats(1.005, 1.004, 1.006)}, {}, 0, "beyond noise"),
        ({}, {}, 0, "no config is better"),
        ({1: repeats(1.5, 1.5, 1.5), 2: repeats(1.49, 1.49, 1.49, memory=50)}, {}, 2,
         "it lies within 2% of trial 1 and needs less memory"),
        ({1: repeats(1.5, 1.5, 1.5), 2: repeats(1.4, 1.4, 1.4, memory=50)}, {}, 1, "1.50 x"),
        ({1: repeats(1.5, 1.5, 1.5), 2: repeats(1.2, 1.2, 1.2)}, {1: verdict(ok=False)}, 2,
         "trial 1 is out: it does not converge as the base does"),
        ({1: repeats(1.5, 1.5, 1.5)}, {1: verdict(ok=None)}, 1, "1.50 x"),
        ({1: [*repeats(1.5, 1.5), *repeats(None, outcome="oom")]}, {}, 0, "trial 1 is out"),
        ({1: repeats(0.0)}, {}, 0, "repeat 1 ended, but its value is 0, as no step of it was good"),
    ],
)  # fmt: skip
def test_winner_of_confirmed_configs(leaders, verdicts, winner, words):
    found = choose({0: BASE, **leaders}, verdicts, device_memory=None)
    assert found.winner == winner
    assert words in found.reason


def test_single_repeats_win_by_more_than_two_percent_and_say_that_noise_is_unknown():
    found = choose({0: repeats(1.0), 1: repeats(1.1)}, {}, device_memory=None)
    assert (found.winner, "noise is not known" in found.reason) == (1, True)
    assert choose({0: repeats(1.0), 1: repeats(1.01)}, {}, device_memory=None).winner == 0


def test_base_that_fails_leaves_the_best_of_the_rest():
    failed = repeats(None, None, outcome="oom")
    found = choose({0: failed, 1: repeats(1.5, 1.5)}, {}, device_memory=None)
    assert found.winner == 1
    assert "trial 0 is out" in found.reason
    assert choose({0: failed}, {}, device_memory=None).winner is None


def test_base_above_the_memory_limit_is_compared_with_but_cannot_win():
    above = repeats(1.0, 1.0, outcome="infeasible")
    found = choose({0: above, 1: repeats(0.8, 0.8)}, {}, device_memory=None)
    assert found.winner == 1
    assert "0.80 x the base config's value" in found.reason


def launches(*losses, samples=None):
    return [
        Launch(
            number=0, repeat=index + 1, folder=Path(),
            plan=TrialPlan(number=0, warmup_steps=0, measure_steps=20, deadline_s=9.0),
            outcome=outcome(result(loss=entry, samples_per_step=samples)), measured=None,
        )
        for index, entry in enumerate(losses)
    ]  # fmt: skip


GOOD = [launches([2.0 + 0.01 * seed] * 20)[0] for seed in range(3)]


@pytest.mark.parametrize(
    ("base", "leader", "ok", "words"),
    [
        (GOOD, launches([2.0] * 20), True, "is not shown to be worse than the baseline's"),
        (GOOD, launches([1.0] * 20), True, "is not shown to be worse than the baseline's"),
        (GOOD, launches(*[[2.0] * 20] * 3), True, "is within the baseline's"),
        (GOOD, launches([2.5] * 20), False, "is above the baseline's"),
        (GOOD, launches([2.0] * 19 + ["nan"]), False, "not finite at the end, at 320 samples"),
        (GOOD, launches(None), None, "its repeats recorded no losses"),
        (GOOD, [], None, "its repeats recorded no losses"),
        (GOOD, launches([2.0] * 5), None, "losses were recorded of 80 of 320 samples only"),
        # Half of the samples in a step: it is compared where the base was at as many.
        (launches(*[[4.0] * 10 + [2.0 + 0.01 * s] * 10 for s in range(3)]),
         launches([4.0] * 20, samples=8), True, "at 160 samples is not shown to be worse"),
        # A base that diverges: what does not, may win, and what does may not.
        (launches(["nan"] * 20, ["nan"] * 20, [2.0] * 20), launches([2.0] * 20), None,
         "got 1 and 2 whose loss ends not finite"),
        (launches(["nan"] * 20, ["nan"] * 20, [2.0] * 20), launches(["nan"] * 20), False,
         "not finite at the end"),
        (launches(["nan"] * 20, [2.0] * 20, [2.02] * 20), launches([2.5] * 20), False, "2 seeds"),
        (launches([2.0] * 20), launches([2.5] * 20), None, "at least 2 seeds"),
        ([], launches(["inf"] * 20), False, "not finite at the end"),
    ],
)  # fmt: skip
def test_a_leader_must_learn_as_the_base_does(base, leader, ok, words):
    verdict = judge_convergence({0: base, 1: leader}, samples_per_step=16)[1]
    assert verdict.ok is ok
    assert words in verdict.reason


def test_repeats_from_one_seed_are_compared_with_the_base_of_that_seed():
    """A seed moves both by 0.2; what the leader adds, 0.05, is told in spite of it."""
    base = launches(*[[2.0 + 0.2 * turn] * 20 for turn in range(3)])
    leader = launches(*[[2.05 + 0.2 * turn + 0.01 * (turn % 2)] * 20 for turn in range(3)])
    assert judge_convergence({0: base, 1: leader}, samples_per_step=16)[1].ok is True
    base, leader = (
        [replace(entry, plan=entry.plan.model_copy(update={"seed": 7 + turn}))
         for turn, entry in enumerate(own)]
        for own in (base, leader)
    )  # fmt: skip
    # Whatever the order of the repeats.
    found = judge_convergence({0: base, 1: leader[::-1]}, samples_per_step=16)[1]
    assert found.ok is False
    assert "3 seeds, compared seed by seed" in found.reason


def test_a_winner_whose_learning_is_not_known_says_so():
    found = choose({0: BASE, 1: repeats(1.5, 1.5, 1.5)}, {1: verdict(ok=None)}, device_memory=None)
    assert "whether it learns as well as the base is not known (loss 3.0 is" in found.reason


def test_base_and_leaders_take_turns():
    assert Plan((4, 2), repeats=2, steps=None).order() == [
        (0, 1), (4, 1), (2, 1), (0, 2), (4, 2), (2, 2),
    ]  # fmt: skip
    # The band of convergence takes three seeds of the base.
    assert Plan((4,), repeats=1, steps=200).order() == [(0, 1), (4, 1), (0, 2), (0, 3)]
    # Those that follow them take new turns with the base; its band is wide enough already.
    assert Plan((2,), repeats=2, steps=200, base_repeats=3).order() == [
        (0, 4), (2, 1), (0, 5), (2, 2),
    ]  # fmt: skip


def test_a_fifth_of_the_configs_is_confirmed():
    assert [num_leaders(n) for n in (1, 5, 8, 15, 100)] == [1, 1, 2, 3, 3]


# Time left, and what is learnt


def test_time_left_follows_the_median_and_the_length_of_what_is_to_come():
    left = TimeLeft()
    assert left.seconds() is None
    left.plan("search", 3)
    left.plan("confirm", 2, longer_by=4.0)
    for wall_s in (10.0, 12.0, 100.0):
        left.done("search", wall_s)
    assert left.seconds() == 3 * 12 + 2 * 4 * 12
    assert left.seconds(elapsed_s=5.0) == 3 * 12 + 2 * 4 * 12 - 5
    assert left.seconds(phase="confirm") == 96
    left.done("confirm", 48.0)
    left.plan("search", 0)
    assert left.seconds() == 96


def test_healthy_ranges_are_learnt_from_measured_steps_only(tmp_path):
    plan = TrialPlan(number=1, warmup_steps=1, measure_steps=4, deadline_s=9.0)
    write_yaml(tmp_path / "knobs.yaml", KnobsFile(knobs={}, trial=plan))
    write_json(tmp_path / "result.json", result(step_time_s=[0.2, 0.2, 0.3, 0.1]))
    (tmp_path / "signals.csv").write_text(
        "step,phase,grad_norm,loss_scale,overflow,step_time_s,data_time_s\n"
        "1,compile,99,65536,0,9.0,8.0\n2,train,1,1024,0,0.2,0.02\n3,train,2,1024,0,0.2,0.02\n"
        "4,train,inf,2048,1,0.3,0.03\n5,train,4,512,0,0.1,0.01\n"
    )
    learned = learn([tmp_path], peak_memory_bytes=5)
    assert learned.step_time_s == 0.2
    assert learned.data_share == pytest.approx(0.1)
    assert (learned.loss_scale_min, learned.loss_scale_max) == (512.0, 1024.0)
    assert (learned.grad_norm.median, learned.grad_norm.mad) == (2.0, 1.0)
    assert learned.grad_norm.samples == 3
    assert learned.peak_memory_bytes == 5


def test_all_launches_of_a_config_are_learnt_from(tmp_path):
    for number, (norms, scale) in enumerate((([1.0, 2.0, 3.0], 512), ([5.0, 6.0], 2048))):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_json(folder / "result.json", result(step_time_s=[0.1 + number] * len(norms)))
        rows = [f"{step},{norm},{scale}" for step, norm in enumerate(norms, start=1)]
        table = "\n".join(["step,grad_norm,loss_scale", *rows]) + "\n"
        (folder / "signals.csv").write_text(table)
        plan = TrialPlan(number=1, warmup_steps=0, measure_steps=3, deadline_s=9.0)
        write_yaml(folder / "knobs.yaml", KnobsFile(knobs={}, trial=plan))
    learned = learn([tmp_path / "0", tmp_path / "1"], peak_memory_bytes=None)
    assert (learned.grad_norm.samples, learned.grad_norm.median) == (5, 3.0)
    assert (learned.loss_scale_min, learned.loss_scale_max) == (512.0, 2048.0)
    assert learned.step_time_s == pytest.approx(0.6)


def test_without_a_table_the_norms_of_the_result_are_learnt(tmp_path):
    write_json(tmp_path / "result.json", result(grad_norm=[1.0, 3.0, 5.0, "nan"]))
    learned = learn([tmp_path], peak_memory_bytes=None)
    assert (learned.grad_norm.median, learned.grad_norm.samples) == (3.0, 3)
    assert learned.data_share is None


@pytest.mark.parametrize(("rate", "bad"), [(0.5, 5), (math.inf, 10), (7.0, 10), (-1.0, 0)])
def test_a_rate_outside_0_to_1_counts_at_most_every_step(rate, bad):
    result = TrialResult(outcome="ok", step_time_s=[0.1] * 10, overflow=rate)
    assert bad_steps(result, 10) == bad


def test_a_result_of_a_million_steps_is_judged_in_seconds():
    count = 1_000_000
    result = TrialResult(outcome="ok", step_time_s=[0.1] * count, loss=[1.0] * count)
    started = time.process_time()
    assert bad_steps(result, count) == 0
    assert time.process_time() - started < 20.0
