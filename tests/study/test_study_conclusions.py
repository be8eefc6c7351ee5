"""What a study shows beside its winner, on known numbers."""

import pytest

from mindtune.controller.trials.conclusions import (
    ablation,
    ablation_way,
    config_key,
    kept_steps,
    speed_front,
    trial_noise,
)
from mindtune.controller.trials.summary import Measurement, TrialNoise, TrialSummary


def trial(number, value, *repeats, outcome="ok", stability=1.0, **knobs):
    def measured(repeat, value):
        return Measurement(
            repeat=repeat, seed=0, outcome=outcome if repeat == 0 else "ok", value=value,
            mfu=value / stability, stability=stability, step_time_s=0.1 / value, wall_s=1.0,
        )  # fmt: skip

    return TrialSummary(
        number=number, knobs=knobs, outcome=outcome,
        measurements=[measured(i, v) for i, v in enumerate((value, *repeats))],
    )  # fmt: skip


A = {"micro_batch_size": 1, "recompute": "full", "prefetch": 2}
TRIALS = [
    trial(0, 0.10, 0.10, 0.10, **A),
    trial(1, 0.09, **{**A, "prefetch": 8}),
    trial(2, 0.12, **{**A, "micro_batch_size": 4}),
    trial(3, 0.50, outcome="pruned", **{**A, "recompute": "none"}),
    trial(4, 0.20, 0.19, 0.21, **{**A, "micro_batch_size": 4, "recompute": "none"}),
    trial(5, 0.204, **{**A, "micro_batch_size": 4, "recompute": "none", "prefetch": 8}),
]  # fmt: skip
CONFIGS = {entry.number: entry.knobs for entry in TRIALS}
NOISE = TrialNoise(launch=0.02, launch_freedom=8)


def test_each_knob_gets_its_share_where_the_configs_between_were_measured():
    first, second, third = ablation(CONFIGS, TRIALS, base=0, winner=5, noise=NOISE)
    assert (first.since, first.trial) == (0, 2)
    assert first.changed == {"micro_batch_size": (1, 4)}
    assert first.ratio == pytest.approx(1.2)
    assert second.changed == {"recompute": ("full", "none")}
    assert second.ratio == pytest.approx(0.20 / 0.12)
    assert third.changed == {"prefetch": (2, 8)}
    assert [step.different for step in (first, second, third)] == [True, True, False]
    assert first.ratio * second.ratio * third.ratio == pytest.approx(2.04)


def test_knobs_whose_steps_were_not_measured_share_one_entry():
    known = [entry for entry in TRIALS if entry.number != 2]
    (both,) = ablation(CONFIGS, known, base=0, winner=4, noise=TrialNoise())
    assert both.changed == {"micro_batch_size": (1, 4), "recompute": ("full", "none")}
    assert both.different is None, "the noise of a launch is not known"
    # A trial that was stopped early has no value to count with, at either end.
    assert ablation(CONFIGS, TRIALS, base=0, winner=3, noise=NOISE) == []
    assert ablation(CONFIGS, TRIALS, base=0, winner=0, noise=NOISE) == []
    assert ablation(CONFIGS, TRIALS, base=0, winner=None, noise=NOISE) == []


def test_base_and_winner_count_with_what_was_confirmed():
    """Of the winner the search has seen its luckiest launch."""
    lucky = trial(4, 0.30, 0.19, 0.21, **{**A, "micro_batch_size": 4, "recompute": "none"})
    slow = trial(0, 0.05, 0.10, 0.10, **A)
    trials = [slow, TRIALS[2], lucky]
    first, second = ablation(CONFIGS, trials, base=0, winner=4, noise=NOISE)
    assert (first.ratio, second.ratio) == (pytest.approx(1.2), pytest.approx(0.20 / 0.12))
    # On the way to another winner it is one launch like the others.
    last = ablation(CONFIGS, [*trials, TRIALS[5]], base=0, winner=5, noise=NOISE)[-1]
    assert last.ratio == pytest.approx(0.204 / 0.30)
    # A winner that the search had stopped early has its confirmed value.
    stopped = trial(3, 0.5, 0.15, 0.15, outcome="pruned", **{**A, "recompute": "none"})
    (only,) = ablation(CONFIGS, [slow, stopped], base=0, winner=3, noise=NOISE)
    assert only.ratio == pytest.approx(1.5)


def test_what_was_measured_for_the_ablation_alone_has_no_number():
    known = [entry for entry in TRIALS if entry.number != 2]
    extra = {config_key({**A, "micro_batch_size": 4}): 0.16}
    first, second = ablation(CONFIGS, known, base=0, winner=4, noise=NOISE, extra=extra)
    assert (first.since, first.trial, first.value) == (0, None, 0.16)
    assert (second.since, second.trial) == (None, 4)
    assert second.ratio == pytest.approx(1.25)


def test_what_is_still_to_be_measured_is_what_may_run():
    known = [entry for entry in TRIALS if entry.number in (0, 5)]

    def may_run(config):
        return config["recompute"] == "full" or config["micro_batch_size"] == 4

    path = ablation_way(CONFIGS, known, base=0, winner=5, extra={}, may_run=may_run)
    assert path == (
        A,
        {**A, "micro_batch_size": 4},
        {**A, "micro_batch_size": 4, "recompute": "none"},
        CONFIGS[5],
    )
    assert ablation_way(CONFIGS, known, base=0, winner=5, extra={}) == (A, CONFIGS[5])


def test_kept_steps_are_the_improvements_in_order_with_the_way_back():
    steps = kept_steps(TRIALS, {0: "aa", 2: "bb", 4: "cc"}, NOISE)
    assert [step.trial for step in steps] == [0, 2, 4, 5]
    assert [step.version for step in steps] == ["aa", "bb", "cc", ""]
    assert (steps[0].gain, steps[0].changed) == (None, {})
    assert steps[2].gain == pytest.approx(0.2 / 0.12)
    assert steps[2].changed == {"recompute": ("full", "none")}
    assert steps[2].way_back == "mindtune export . --trial 4 --out trial_4.yaml"
    # The last one, 2 % better by one launch of 2 %, may be none.
    assert [step.different for step in steps] == [None, True, True, False]
    unknown = kept_steps(TRIALS, {}, TrialNoise())
    assert [step.different for step in unknown] == [None] * 4
    # Numbers are what counts, not the order of a listing; failures are no steps.
    failed = [trial(0, 0.1, outcome="oom"), TRIALS[1]]
    assert [step.trial for step in kept_steps(failed, {}, NOISE)] == [1]


def test_the_front_keeps_what_is_faster_or_steadier_beyond_noise():
    trials = [
        trial(0, 0.20, 0.20, stability=0.5),
        trial(1, 0.10, 0.10, stability=1.0),
        trial(2, 0.09, stability=0.9),
        trial(3, 0.05, stability=0.9),
        trial(4, 0.30, stability=0.6, outcome="oom"),
        trial(5, 0.0995, stability=1.0),
    ]
    assert speed_front(trials) == [0, 1, 5]
    assert speed_front([]) == []


def test_speed_and_stability_have_a_noise_each():
    def steady(number, speed, stability, jitter):
        values = [speed, speed * (1 + jitter), speed * (1 - jitter)]
        return trial(number, speed, *values, stability=stability)

    # Half as fast and steadier by a thousandth: nobody's choice, though the speeds are quiet.
    assert speed_front([steady(0, 0.50, 0.990, 0.0), steady(1, 0.25, 0.991, 0.0)]) == [0]
    # Speeds that vary by a tenth tell 0.20 from 0.18 no more; equal stabilities still tell.
    loud = [steady(0, 0.20, 0.80, 0.1), steady(1, 0.18, 0.90, 0.1)]
    assert speed_front(loud) == [1]
    quiet = [steady(0, 0.20, 0.80, 0.0), steady(1, 0.18, 0.90, 0.0)]
    assert speed_front(quiet) == [0, 1]


def test_noise_is_told_by_kind():
    repeated = [
        trial(0, 9.0, 1.00, 1.10, 1.00),
        trial(1, 9.0, 2.00, 2.20, 2.00),
        trial(2, 1.0),
    ]
    noise = trial_noise(repeated, [[0.1, 0.11, 0.1, 0.09] * 3, [0.1] * 12])
    # The second round was faster for all: nothing is left for the single launch.
    assert noise.common == pytest.approx(0.0550, abs=1e-3)
    assert noise.own == pytest.approx(0.0, abs=1e-9)
    assert noise.launch == pytest.approx(noise.common)
    assert noise.launch_freedom == 4
    assert noise.step == pytest.approx(0.5 * 1.4826 * 0.05)
    assert noise.part == 0.0
    assert trial_noise([trial(0, 1.0)], []) == TrialNoise()
