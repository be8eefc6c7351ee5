"""The parts around the controller that need no framework: clock, sensors, settings, state."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from mindtune.controller.contract import TrialPlan, TrialResult, read_document
from mindtune.controller.device import DeviceReading
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.packed import NUM_HOST_SIGNALS
from mindtune.controller.live.sensors import (
    BatchFacts,
    HostSignals,
    StepSignals,
    observe,
    reduce_rows,
)
from mindtune.controller.live.settings import load_settings
from mindtune.controller.live.state import (
    ControllerState,
    find_state,
    read_state,
    save_state,
)
from mindtune.controller.live.timing import StepTimer
from mindtune.controller.live.trial_report import TrialReport
from mindtune.controller.live.workload import Workload
from mindtune.controller.trials.worker import TrialContext
from mindtune.policies.signals import Observation


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


# Timing ---------------------------------------------------------------------------------------


def call(timer, clock, *, wait_s, run_s, own_s=0.0):
    """One call of the step: the data comes, the step runs, the controller works."""
    clock.now += wait_s
    timer.begin_call()
    clock.now += run_s
    timer.end_call()
    yield
    clock.now += own_s
    timer.leave()


def run_call(timer, clock, **times):
    for _ in call(timer, clock, **times):
        pass


def test_a_step_lasts_from_end_to_end_and_waits_from_leave_to_begin(clock):
    timer = StepTimer(clock)
    for _ in call(timer, clock, wait_s=3, run_s=10, own_s=1):
        assert timer.lap()[:2] == (13, 3)
    for _ in call(timer, clock, wait_s=2, run_s=5):
        assert timer.lap()[:2] == (8, 2)
    assert timer.elapsed_s == 21


def test_micro_batches_sum_to_one_step(clock):
    timer = StepTimer(clock)
    run_call(timer, clock, wait_s=1, run_s=4)
    run_call(timer, clock, wait_s=2, run_s=4)
    for _ in call(timer, clock, wait_s=3, run_s=4):
        assert timer.lap()[:2] == (18, 6)


def test_a_pause_counts_neither_as_step_nor_as_waiting(clock):
    timer = StepTimer(clock)
    for _ in call(timer, clock, wait_s=0, run_s=1):
        timer.lap()
    timer.pause()
    timer.pause()
    clock.now += 50
    timer.resume()
    timer.resume()
    for _ in call(timer, clock, wait_s=2, run_s=1):
        assert timer.lap()[:2] == (3, 2)


def test_without_a_seen_beginning_the_waiting_is_unknown_for_that_step_alone(clock):
    timer = StepTimer(clock)
    clock.now += 5
    timer.begin_call(waited=False)
    clock.now += 1
    timer.end_call()
    assert timer.lap()[:2] == (6, None)
    for _ in call(timer, clock, wait_s=2, run_s=1):
        assert timer.lap()[:2] == (3, 2)


def test_own_time_ends_where_the_gradients_are_there_and_sampling_counts_for_nothing(clock):
    timer = StepTimer(clock)
    run_call(timer, clock, wait_s=1, run_s=4, own_s=0.5)
    clock.now += 2
    timer.begin_call()
    clock.now += 3
    timer.exclude(3)  # the model's own function
    clock.now += 4
    timer.gradients_ready()
    clock.now += 5  # the others are waited for
    clock.now += 6
    timer.exclude(6)
    timer.end_call()
    timing = timer.lap()
    assert timing.step_time_s == 1 + 4 + 0.5 + 2 + 4 + 5
    assert timing.own_time_s == 1 + 4 + 0.5 + 2 + 4
    assert timing.host_time_s == 1 + 0.5 + 2
    assert timing.data_time_s == 1 + 2
    for _ in call(timer, clock, wait_s=1, run_s=1):
        timing = timer.lap()
    assert (timing.step_time_s, timing.own_time_s, timing.host_time_s) == (2, None, 1)


def test_what_precedes_the_launch_of_a_step_is_the_hosts_own(clock):
    timer = StepTimer(clock)
    clock.now += 1
    timer.begin_call()
    clock.now += 2
    timer.exclude(2)  # the model's own function
    clock.now += 4  # a slow host
    timer.launch()
    clock.now += 8
    timer.exclude(0.5)
    timer.end_call()
    timing = timer.lap()
    assert timing.step_time_s == 1 + 4 + 8 - 0.5
    assert timing.data_time_s == 1
    assert timing.host_time_s == 1 + 4
    for _ in call(timer, clock, wait_s=1, run_s=1):
        assert timer.lap().host_time_s == 1


# Sensors --------------------------------------------------------------------------------------


def test_host_signals_travel_as_one_row_and_back():
    sent = HostSignals(
        step_time_s=0.5,
        data_time_s=0.25,
        wall_time_s=64.0,
        phase="save",
        reading=DeviceReading(
            device_utilization=0.75,
            device_memory_used_bytes=2**30,
            device_memory_total_bytes=2**34,
        ),
        memory_allocated_bytes=2**29,
    )
    # Own times become the straggler, which a single rank is not.
    assert reduce_rows([replace(sent, own_time_s=0.25, host_time_s=0.125).to_row()]) == sent
    assert len(sent.to_row()) == NUM_HOST_SIGNALS
    assert reduce_rows([sent.to_row()]) == sent


@pytest.mark.parametrize(
    ("rows", "straggler"),
    [
        # (step, own, host): the slow rank's gradients are there last.
        ([(4.0, 1.0, 0.5), (4.0, 3.0, 0.5), (4.0, 1.5, 0.5), (4.0, 1.0, 0.5)], (1, 3.0)),
        # One graph: rank 2 waits 2 s for data, the others 2 s inside their call.
        ([(3.0, None, 0.0), (3.0, None, 0.0), (3.0, None, 2.0)], (2, 3.0)),
        # Of two ranks the other one is the measure.
        ([(2.0, 2.0, 0.1), (2.0, 1.0, 0.1)], (0, 2.0)),
        # A rank that tells less than the others takes all to what all tell.
        ([(3.0, 2.5, 0.0), (3.0, None, 2.0)], (1, 3.0)),
        ([(2.0, 1.0, 0.5)], None),
        ([(2.0, 1.0, 0.5), (None, None, None)], None),
    ],
)
def test_the_straggler_is_the_rank_that_the_others_wait_for(rows, straggler):
    told = [
        HostSignals(step_time_s=step, own_time_s=own, host_time_s=host) for step, own, host in rows
    ]
    reduced = reduce_rows([one.to_row() for one in told])
    assert (reduced.straggler_rank, reduced.straggler_ratio) == (straggler or (None, None))


def test_what_no_rank_measured_is_none():
    row = HostSignals().to_row()
    assert all(math.isnan(value) for value in row)
    assert reduce_rows([row, row]) == HostSignals()


def test_ranks_reduce_to_the_slowest_the_busiest_and_the_fullest_memory():
    first = HostSignals(
        step_time_s=1.0,
        data_time_s=0.5,
        phase="train",
        reading=DeviceReading(
            device_utilization=0.5, device_memory_used_bytes=40, device_memory_total_bytes=100
        ),
        memory_allocated_bytes=7,
    )
    second = HostSignals(
        step_time_s=2.0,
        data_time_s=0.25,
        phase="compile",
        reading=DeviceReading(
            device_utilization=1.0, device_memory_used_bytes=30, device_memory_total_bytes=50
        ),
        memory_allocated_bytes=9,
    )
    reduced = reduce_rows([first.to_row(), second.to_row(), HostSignals().to_row()])
    assert reduced == HostSignals(
        step_time_s=2.0,
        data_time_s=0.5,
        phase="compile",
        reading=DeviceReading(
            device_utilization=1.0, device_memory_used_bytes=30, device_memory_total_bytes=50
        ),
        memory_allocated_bytes=9,
    )


def test_rates_belong_to_the_step_whose_time_is_known():
    seen = observe(
        8,
        StepSignals(loss=2.0, num_microbatches=4),
        host=HostSignals(step_time_s=0.5),
        batch=BatchFacts(tokens=400, global_batch_size=40),
        timed_batch=BatchFacts(tokens=100, flops=2e9),
        peak_flops=1e10,
    )
    assert (seen.tokens, seen.tokens_per_s, seen.mfu) == (400, 200.0, 0.4)
    assert seen.data_time_s is None


@pytest.mark.parametrize("time_s", [None, 0.0])
def test_without_a_time_there_is_no_rate(time_s):
    batch = BatchFacts(tokens=100, flops=1e9)
    seen = observe(
        1, StepSignals(), host=HostSignals(step_time_s=time_s), batch=batch, timed_batch=batch,
        peak_flops=1e12,
    )  # fmt: skip
    assert (seen.tokens_per_s, seen.mfu) == (None, None)


MODEL = {
    "num_layers": 2, "hidden_size": 8, "num_heads": 2, "intermediate_size": 32, "vocab_size": 16,
    "seq_length": 4,
}  # fmt: skip


def test_flops_of_a_step_follow_the_tokens():
    # Per token and layer, forward: qkv 2*8*24, scores and values 2*2*4*8, output 2*8*8, mlp
    # 2*2*8*32; head 2*8*16; three times that with the backward pass.
    forward = 2 * (384 + 128 + 128 + 1024) + 256
    assert Workload(model=MODEL).step_flops(10) == 3 * forward * 10
    assert Workload(model=MODEL).step_flops(None) is None
    assert Workload().step_flops(10) is None


@pytest.mark.parametrize(
    "wrong",
    [{"peak_flops": 0}, {"tokens_per_sample": -1}, {"model": {"layers": 1}}],
)
def test_a_wrong_workload_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Workload(**wrong)


# Settings -------------------------------------------------------------------------------------

BEST = """
schema: 1
command: [python, train.py]
policies: {gradient_norm: {limits: {min_scale: 0.1}}}
learned: {step_time_s: 0.5, grad_norm: {median: 1.5, mad: 0.25, samples: 60, expires_after_steps: 100}}
"""


def test_nothing_given_observes_with_defaults():
    settings = load_settings(None, {})
    assert (settings.mode, settings.out_dir, settings.keeps_records) == ("observe", None, True)
    assert not settings.wants_to_act


def test_a_best_config_gives_policies_and_prior(tmp_path):
    path = tmp_path / "best_config.yaml"
    path.write_text(BEST)
    for settings in (
        load_settings(path, {}),
        load_settings(str(path), {}),
        load_settings(None, {"MINDTUNE_CONFIG": str(path)}),
    ):
        assert settings.policies["gradient_norm"].limits == {"min_scale": 0.1}
        assert settings.prior.median == 1.5
        assert settings.mode == "observe"


def test_the_loss_scale_of_the_trials_reaches_its_policy_unless_the_user_has_set_it(tmp_path):
    path = tmp_path / "best_config.yaml"

    def known_scale(text):
        path.write_text(text)
        sections = load_settings(path, {}).policies_with_known_scale
        assert sections["gradient_norm"].limits == {"min_scale": 0.1}
        return (
            sections["loss_scale"].thresholds["known_scale"] if "loss_scale" in sections else None
        )

    learned = BEST.replace("step_time_s: 0.5,", "step_time_s: 0.5, loss_scale_max: 4096,")
    assert known_scale(BEST) is None
    assert known_scale(learned) == 4096.0
    own = "{loss_scale: {thresholds: {known_scale: 8}}, gradient_norm:"
    assert known_scale(learned.replace("{gradient_norm:", own)) == 8.0


def test_the_block_in_a_mindformers_yaml_is_the_same(tmp_path):
    path = tmp_path / "best_config.yaml"
    path.write_text(BEST)
    block = "\n  ".join(BEST.strip().splitlines())
    mindformers = tmp_path / "mindformers.yaml"
    mindformers.write_text(f"runner_config:\n  batch_size: 4\nmindtune:\n  {block}\n")
    assert load_settings(mindformers, {}) == load_settings(path, {})


def test_the_environment_wins(tmp_path):
    given = {"mode": "act", "out_dir": "here"}
    assert load_settings(given, {}).mode == "act"
    settings = load_settings(given, {"MINDTUNE_MODE": "observe", "MINDTUNE_RUN_DIR": "there"})
    assert (settings.mode, str(settings.out_dir)) == ("observe", "there")
    assert load_settings({}, {"MINDTUNE_MODE": "act"}).mode == "act"


def test_a_whole_config_with_mode_and_folder_beside_it():
    settings = load_settings({"command": ["x"], "mode": "act", "out_dir": "here"}, {})
    assert (settings.mode, str(settings.out_dir)) == ("act", "here")


def test_in_a_trial_policies_observe_whatever_is_asked_for():
    asked = {"mode": "act", "policies": {"loss_scale": {"mode": "act"}}, "out_dir": "here"}
    settings = load_settings(asked, {"MINDTUNE_TRIAL_DIR": "trial", "MINDTUNE_MODE": "act"})
    assert (settings.mode, str(settings.out_dir)) == ("observe", "trial")
    assert settings.observes_only
    assert load_settings(asked, {"MINDTUNE_MODE": "observe"}).observes_only


def test_an_explicit_null_keeps_no_records():
    assert not load_settings({"out_dir": None}, {}).keeps_records
    assert load_settings({"out_dir": None}, {"MINDTUNE_RUN_DIR": "there"}).keeps_records


@pytest.mark.parametrize(
    ("given", "environ", "said"),
    [
        ({"modus": "act"}, {}, "unknown key 'modus'.*mode"),
        ({"mode": "actt"}, {}, "mode.*actt"),
        ({"command": ["x"], "modus": 1}, {}, "unknown key 'modus'"),
        ({"watchdog": {"train_min_s": 0}}, {}, "watchdog.train_min_s"),
        ({"policies": {"gradient_norm": {"limit": {}}}}, {}, "unknown key 'limit'"),
        ({}, {"MINDTUNE_MODE": "on"}, "MINDTUNE_MODE must be observe or act, but got 'on'"),
        ("missing.yaml", {}, "missing.yaml must exist"),
    ],
)
def test_wrong_settings_are_named(given, environ, said):
    with pytest.raises(ConfigError, match=said):
        load_settings(given, environ)


# State ----------------------------------------------------------------------------------------


def state(step, updates):
    return ControllerState(
        step=step,
        updates=updates,
        engine={"schema": 1},
        knobs={"clip_norm": math.inf},
        snapshots={"healthy": [step - 1], "unproved": None, "healthy_steps": 1},
    )


def test_a_state_survives_its_file(tmp_path):
    path = save_state(tmp_path, state(12, 10))
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"bare {name}"))
    assert find_state(tmp_path, updates=10) == state(12, 10)


def test_the_newest_state_no_newer_than_the_weights_is_found(tmp_path):
    for step, updates in ((5, 4), (10, 9), (15, 14)):
        save_state(tmp_path, state(step, updates))
    assert find_state(tmp_path, updates=9).step == 10
    assert find_state(tmp_path, updates=13).step == 10
    assert find_state(tmp_path, updates=3) is None
    assert find_state(tmp_path / "none", updates=3) is None


def test_a_return_to_an_early_checkpoint_keeps_the_states_that_follow(tmp_path):
    for step in range(100, 125):
        save_state(tmp_path, state(step, step))
    save_state(tmp_path, state(50, 50))
    assert find_state(tmp_path, updates=50) == state(50, 50)
    assert len(list(tmp_path.iterdir())) == 20


def test_only_the_newest_twenty_states_are_kept(tmp_path):
    for step in range(1, 31):
        save_state(tmp_path, state(step, step))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"controller_{step:09d}.json" for step in range(11, 31)]


def test_a_state_from_before_there_were_earlier_states_is_read():
    content = state(12, 10).to_dict()
    del content["snapshots"]
    assert ControllerState.from_dict(content) == replace(state(12, 10), snapshots=None)


def test_a_state_of_another_version_or_a_damaged_one_is_passed_over_with_a_message(
    tmp_path, caplog
):
    save_state(tmp_path, state(5, 5))
    newer = state(9, 9).to_dict() | {"schema": 2}
    (tmp_path / "controller_000000009.json").write_text(json.dumps(newer))
    (tmp_path / "controller_000000008.json").write_text('{"schema": 1, "st')
    assert find_state(tmp_path, updates=9) == state(5, 5)
    assert caplog.text.count("passed over") == 2
    assert "must have schema 1, but got 2" in caplog.text
    caplog.clear()
    assert read_state(newer) is None
    assert "start afresh" in caplog.text
    assert read_state(state(9, 9).to_dict()) == state(9, 9)


WHOLE_STATE = {"schema": 1, "step": 3, "updates": 3, "engine": {}, "knobs": {}}


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"schema": 2},
        {"schema": 1, "step": 3},
        *(
            WHOLE_STATE | {name: value}
            for name, value in [
                ("step", math.inf), ("updates", math.inf), ("knobs", [1]), ("knobs", None),
                ("knobs", {"clip_norm": 10**400}), ("engine", 5), ("snapshots", "x"),
                ("snapshots", 7),
            ]
        ),
    ],
)  # fmt: skip
def test_a_state_of_another_shape_is_refused(content):
    with pytest.raises(ConfigError, match="start afresh"):
        ControllerState.from_dict(content)


# Trial ----------------------------------------------------------------------------------------


def trial(tmp_path, *, warmup=2, measure=3):
    plan = TrialPlan(number=1, warmup_steps=warmup, measure_steps=measure, deadline_s=60)
    return TrialContext(trial_dir=tmp_path, knobs={}, plan=plan)


def finish(report, **changes):
    told = {"effective": {}, "eval_loss": None, "peak_memory_bytes": None, "memory_source": None}
    report.finish(**{**told, **changes})


def result(tmp_path):
    return read_document(TrialResult, tmp_path / "result.json")


def test_the_warm_up_is_left_out_and_the_last_step_ends_the_trial(tmp_path):
    report = TrialReport(trial(tmp_path), rank=0)
    ends = []
    for step in range(1, 6):
        report.add_time(step, step / 10, "compile" if step == 1 else "train")
        seen = Observation(step=step, loss=float(step), tokens=64, global_batch_size=8, overflow=0)
        ends.append(report.add_step(seen))
    assert ends == [False, False, False, False, True]
    finish(report, effective={"micro_batch_size": 8}, eval_loss=1.5, peak_memory_bytes=9,
           memory_source="rss")  # fmt: skip
    left = result(tmp_path)
    assert (left.outcome, left.step_time_s, left.loss) == ("ok", [0.3, 0.4, 0.5], [3, 4, 5])
    assert (left.tokens_per_step, left.samples_per_step, left.grad_norm) == (64, 8, None)
    assert (left.effective, left.eval_loss) == ({"micro_batch_size": 8}, 1.5)
    assert (left.peak_memory_bytes, left.memory_source) == (9, "rss")


def test_times_that_held_a_compile_or_a_save_are_no_step_times(tmp_path):
    report = TrialReport(trial(tmp_path, warmup=0), rank=0)
    for step, phase in ((1, "compile"), (2, "train"), (3, "save")):
        report.add_time(step, float(step), phase)
        report.add_step(Observation(step=step, loss=1.0))
    finish(report)
    assert result(tmp_path).step_time_s == [2.0]
    assert len(result(tmp_path).loss) == 3


def test_a_training_that_ends_early_says_so(tmp_path):
    report = TrialReport(trial(tmp_path), rank=0)
    for step in (1, 2, 3):
        report.add_time(step, 1.0, "train")
        report.add_step(Observation(step=step, loss=1.0))
    finish(report)
    assert "1 of 3 measured" in result(tmp_path).message


def test_no_measured_step_is_a_crash_and_a_last_nan_is_non_finite(tmp_path):
    finish(TrialReport(trial(tmp_path), rank=0))
    assert result(tmp_path).outcome == "crash"
    report = TrialReport(trial(tmp_path, warmup=0, measure=1), rank=0)
    report.add_time(1, 1.0, "train")
    report.add_step(Observation(step=1, loss=math.nan))
    finish(report)
    assert result(tmp_path).outcome == "non_finite"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(MemoryError("x"), "oom"), (ConfigError("x"), "bad_config"), (RuntimeError("x"), "crash"),
     (FloatingPointError("x"), "non_finite")],
)  # fmt: skip
def test_a_failure_is_typed_and_other_ranks_leave_their_own_file(tmp_path, error, outcome):
    TrialReport(trial(tmp_path), rank=1).fail(error)
    assert [path.name for path in tmp_path.iterdir()] == ["result.rank1.json"]
    assert read_document(TrialResult, tmp_path / "result.rank1.json").outcome == outcome


def test_a_result_that_stands_is_not_replaced_by_a_later_failure(tmp_path):
    report = TrialReport(trial(tmp_path, warmup=0, measure=1), rank=0)
    report.add_time(1, 1.0, "train")
    report.add_step(Observation(step=1, loss=1.0))
    finish(report)
    report.fail(RuntimeError("later"))
    assert result(tmp_path).outcome == "ok"
