"""The five dimensions, from records, trials, logs and baseline files."""

import json
import math
from pathlib import Path

import pytest

from mindtune.controller.contract import (
    METRICS,
    KnobsFile,
    RunConditions,
    RunMetrics,
    RunResult,
    StudyFile,
    TrialPlan,
    TrialRecord,
    TrialResult,
    read_document,
    read_yaml,
    write_json,
    write_yaml,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.metrics.compare import compare
from mindtune.controller.metrics.run_metrics import read_metrics
from mindtune.controller.metrics.run_source import study_conditions
from mindtune.controller.records import SignalWriter
from mindtune.policies.signals import Observation
from mindtune.search.model_shape import ModelShape

SAMPLES = Path(__file__).parents[2] / "controller" / "contract" / "samples"
MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "seq_length": 128,
}
SHAPE = ModelShape(**MODEL)


def write_run(folder, observations, *, conditions=None, result=None):
    folder.mkdir(parents=True, exist_ok=True)
    writer = SignalWriter(folder / "signals.csv")
    for observation in observations:
        writer.write(observation)
    writer.close()
    if conditions is not None:
        write_json(folder / RunConditions.FILE, RunConditions(**conditions))
    if result is not None:
        write_json(folder / RunResult.FILE, RunResult(**result))
    return folder


def steady(count, *, time_s=0.5, **signals):
    return [
        Observation(
            step=step,
            phase="train",
            loss=3.0 - 0.001 * step,
            step_time_s=time_s,
            wall_time_s=step * time_s,
            **signals,
        )
        for step in range(1, count + 1)
    ]


def test_every_metric_is_in_the_table_and_in_one_section():
    names = [
        name
        for _, section in RunMetrics.model_validate(
            json.loads((SAMPLES / "run_metrics.json").read_text())
        ).sections()
        for name in type(section).model_fields
    ]
    assert names == list(METRICS)


def test_only_steps_that_trained_count_for_times(tmp_path):
    steps = steady(20, tokens=1000)
    steps[0] = Observation(step=1, phase="compile", loss=3.0, step_time_s=60.0, tokens=1000)
    steps[9] = Observation(step=10, phase="save", loss=2.99, step_time_s=30.0, tokens=1000)
    steps[14] = Observation(step=15, phase="eval", loss=2.98, step_time_s=20.0, eval_loss=3.5)
    metrics = read_metrics(write_run(tmp_path / "run", steps))
    assert metrics.throughput.step_time_s == 0.5
    assert metrics.throughput.step_time_mean_s == 0.5
    assert metrics.throughput.tokens_per_s == 2000.0
    assert metrics.steps.timed == 17
    assert metrics.steps.excluded == {"compile": 1, "save": 1, "eval": 1}
    assert metrics.convergence.eval_loss == 3.5
    assert metrics.convergence.first_loss == 3.0
    assert metrics.intervals["step_time_s"] == (0.5, 0.5)


def test_mfu_by_both_counts_and_hfu_with_the_source_of_the_peak(tmp_path):
    tokens = 8 * 128
    conditions = {
        "num_devices": 2,
        "model": MODEL,
        "peak_flops": 1e9,
        "peak_source": "measured here",
        "recompute": "full",
    }
    run = write_run(tmp_path / "run", steady(20, tokens=tokens), conditions=conditions)
    metrics = read_metrics(run)
    capacity = 0.5 * 1e9 * 2
    assert metrics.throughput.mfu == pytest.approx(SHAPE.step_flops(tokens) / capacity)
    # Two layers of 4 h^2 + 8 h^2 + 2 h, one norm, the output layer: 162,000 or so.
    parameters = 2 * (12 * 64 * 64 + 2 * 64) + 64 + 64_000
    assert metrics.throughput.mfu_6n == pytest.approx(6 * parameters * tokens / capacity)
    more = SHAPE.recompute_flops("full") * tokens / capacity
    assert metrics.throughput.hfu == pytest.approx(metrics.throughput.mfu + more)
    assert metrics.reasons["mfu"] == "of 0.001 TFLOP/s per device (measured here)"


@pytest.mark.parametrize(
    ("peak", "kind"), [(1e8, "mfu_invalid"), (1e10, "low_utilization"), (1.7e9, None)]
)
def test_mfu_that_is_impossible_is_said_and_one_that_is_low_is_found(tmp_path, peak, kind):
    conditions = {"num_devices": 1, "model": MODEL, "peak_flops": peak}
    run = write_run(tmp_path / "run", steady(20, tokens=512), conditions=conditions)
    metrics = read_metrics(run)
    found = [finding for finding in metrics.findings if finding.evidence["metric"] == "mfu"]
    assert [finding.kind for finding in found] == [kind] * (kind is not None)
    expected = SHAPE.step_flops(512) / 0.5 / peak
    assert metrics.throughput.mfu == pytest.approx(expected)  # not clipped


def test_an_unknown_peak_leaves_mfu_open_and_says_why(tmp_path):
    conditions = {"num_devices": 1, "model": MODEL, "hardware": "FrobX 9"}
    conditions |= {"precision": "float16"}
    run = write_run(tmp_path / "run", steady(10, tokens=512), conditions=conditions)
    metrics = read_metrics(run)
    assert metrics.throughput.mfu is None
    assert "no peak is known for 'FrobX 9'" in metrics.reasons["mfu"]
    named = {**conditions, "hardware": "NVIDIA A100-SXM4-80GB"}
    run = write_run(tmp_path / "named", steady(10, tokens=512), conditions=named)
    assert "NVIDIA A100 data sheet" in read_metrics(run).reasons["mfu"]


def test_mfu_that_the_run_recorded_stands_where_the_model_is_not_known(tmp_path):
    metrics = read_metrics(write_run(tmp_path / "run", steady(10, mfu=0.4)))
    assert metrics.throughput.mfu == 0.4
    assert metrics.reasons["mfu"] == "as the run has recorded it"
    assert metrics.throughput.mfu_6n is None


def test_resources_of_the_worst_rank_and_their_findings(tmp_path):
    steps = steady(
        20,
        data_time_s=0.15,
        device_memory_used_bytes=90,
        device_memory_total_bytes=100,
        device_utilization=0.9,
        device_power_w=300.0,
        device_temperature_c=70.0,
    )
    result = {"outcome": "ok", "steps": 20, "wall_s": 10.0, "peak_memory_bytes": 88,
              "peak_reserved_bytes": 110}  # fmt: skip
    metrics = read_metrics(write_run(tmp_path / "run", steps, result=result))
    use = metrics.resources
    assert (use.peak_memory_bytes, use.memory_share) == (88, 0.88)
    assert use.memory_fragmentation == pytest.approx(0.2)
    assert use.data_share == pytest.approx(0.3)
    assert (use.device_utilization, use.device_power_w) == pytest.approx((0.9, 300.0))
    assert {finding.kind for finding in metrics.findings} == {"data_stall", "memory_pressure"}


def test_stability_counts_what_went_wrong(tmp_path):
    steps = steady(100, overflow=0.0, update_skipped=0.0)
    for index in (10, 20):
        steps[index] = Observation(
            step=index + 1, phase="train", loss=math.inf, step_time_s=0.5, overflow=1.0,
            update_skipped=1.0,
        )  # fmt: skip
    folder = write_run(tmp_path / "run", steps)
    # Killed, and gone on from step 90: ten steps twice, and slower.
    writer = SignalWriter(folder / "signals.csv")
    for step in range(91, 141):
        writer.write(
            Observation(step=step, phase="train", loss=2.9, step_time_s=0.6, overflow=0.0,
                        update_skipped=0.0)
        )  # fmt: skip
    writer.close()
    stability = read_metrics(folder).stability
    assert stability.overflow_rate == pytest.approx(2 / 150)
    assert stability.skipped_rate == pytest.approx(2 / 150)
    assert stability.non_finite_rate == pytest.approx(2 / 150)
    assert stability.interruptions == 1
    assert stability.repeated_steps_share == pytest.approx(10 / 150)
    assert stability.timeouts == 0
    mean = (100 * 0.5 + 50 * 0.6) / 150
    assert stability.stability == pytest.approx((1 - 2 / 150) * 0.5 / mean)
    assert stability.step_time_jitter == pytest.approx(0.2)


def test_what_a_restart_has_made_once_more_is_no_part_of_the_course(tmp_path):
    folder = tmp_path / "run"
    lost = [
        Observation(step=step, phase="train", loss=math.nan if step > 60 else 3.0)
        for step in range(1, 101)
    ]
    write_run(folder, lost)
    writer = SignalWriter(folder / "signals.csv")
    for step in range(51, 91):
        writer.write(Observation(step=step, phase="train", loss=2.0))
    writer.close()
    metrics = read_metrics(folder)
    # A fifth of the 90 steps in force.
    assert metrics.convergence.loss == 2.0
    assert metrics.convergence.loss_drop_per_1000_steps == pytest.approx(20, abs=10)
    assert metrics.stability.non_finite_rate == pytest.approx(40 / 140)
    low, high = metrics.intervals["non_finite_rate"]
    assert low < 40 / 140 < high


def test_a_table_that_leaves_steps_out_tells_no_share_of_training(tmp_path):
    every = [
        Observation(step=step, phase="train", loss=3.0, step_time_s=0.5, wall_time_s=step * 0.5)
        for step in range(1, 101)
    ]
    assert read_metrics(write_run(tmp_path / "all", every)).throughput.training_share == 1.0
    tenth = read_metrics(write_run(tmp_path / "tenth", every[9::10]))
    assert tenth.throughput.training_share is None
    assert tenth.steps.interval == 10


def test_intervals_of_a_long_run_hold_its_own_figures(tmp_path):
    # Skewed times: a median and a 95th percentile of means of neighbours lie elsewhere.
    steps = [
        Observation(
            step=step, phase="train", loss=2.0, step_time_s=0.5 + (step * 7919 % 101 / 100) ** 8
        )
        for step in range(1, 9001)
    ]
    metrics = read_metrics(write_run(tmp_path / "run", steps))
    for name in ("step_time_s", "step_time_p95_s", "step_time_mean_s", "step_time_jitter"):
        low, high = metrics.intervals[name]
        assert low <= metrics.values()[name] <= high, name


def test_spikes_and_their_rhythm(tmp_path):
    steps = [
        Observation(
            step=step,
            phase="train",
            loss=(9.0 if step % 64 == 0 else 3.0) + 0.01 * (step * 7 % 11),
            step_time_s=0.5,
            num_microbatches=16,
        )
        for step in range(1, 601)
    ]
    metrics = read_metrics(write_run(tmp_path / "run", steps))
    assert metrics.stability.spike_period_steps == 64
    assert "a multiple of the 16 micro-batches" in metrics.reasons["spike_period_steps"]
    assert metrics.stability.loss_spikes_per_1000_steps == pytest.approx(9 / 0.6, abs=2)


def test_the_fall_of_the_loss_has_an_interval(tmp_path):
    steps = [
        Observation(step=step, phase="train", loss=5.0 - 0.002 * step + 0.05 * (step * 37 % 17))
        for step in range(1, 401)
    ]
    metrics = read_metrics(write_run(tmp_path / "run", steps))
    fall = metrics.convergence.loss_drop_per_1000_steps
    low, high = metrics.intervals["loss_drop_per_1000_steps"]
    assert low < 2.0 < high
    assert low < fall < high
    short = read_metrics(write_run(tmp_path / "short", steps[:19]))
    assert short.convergence.loss_drop_per_1000_steps is None
    assert "there are 19" in short.reasons["loss_drop_per_1000_steps"]


def test_a_log_of_another_program_with_what_a_study_says(tmp_path):
    log = tmp_path / "train.csv"
    rows = [f"{step},{4 - 0.01 * step},{0.25},{8}" for step in range(1, 31)]
    log.write_text("step,loss,step_time_s,global_batch_size\n" + "\n".join(rows) + "\n")
    study = read_document(StudyFile, SAMPLES / "study.yaml")
    told = study_conditions(study)
    metrics = read_metrics(log, conditions=told)
    # The first record of a log that tells no phase may hold the compile.
    assert metrics.steps.excluded == {"first": 1}
    assert metrics.throughput.tokens_per_s == 8 * study.model.seq_length / 0.25
    assert metrics.throughput.mfu is not None
    assert metrics.throughput.training_share is None
    assert metrics.stability.timeouts is None
    assert read_metrics(log).throughput.mfu is None


def test_the_mean_of_a_first_epoch_holds_the_compile(tmp_path):
    log = tmp_path / "train.log"
    lines = []
    for epoch in range(1, 6):
        lines += [
            f"epoch: {epoch} step: {step}, loss is {3 - epoch / 10}" for step in range(1, 11)
        ]
        time_ms = 900.0 if epoch == 1 else 100.0
        lines.append(f"Train epoch time: {10 * time_ms:.3f} ms, per step time: {time_ms:.3f} ms")
    log.write_text("\n".join(lines) + "\n")
    metrics = read_metrics(log)
    assert metrics.steps.timed == 4
    assert metrics.throughput.step_time_mean_s == pytest.approx(0.1)


def test_a_trial_s_folder_takes_model_and_peak_from_its_study(tmp_path):
    study = read_yaml(SAMPLES / "study.yaml")
    (tmp_path / "study.yaml").write_text((SAMPLES / "study.yaml").read_text())
    trial = tmp_path / "trials" / "0003" / "repeat_1"
    trial.mkdir(parents=True)
    plan = TrialPlan(number=3, repeat=1, seed=7, warmup_steps=1, measure_steps=10, deadline_s=60)
    write_yaml(trial / KnobsFile.FILE, KnobsFile(knobs={"recompute": "full"}, trial=plan))
    write_json(
        trial / TrialResult.FILE,
        TrialResult(
            outcome="ok", step_time_s=[2.0] * 10, loss=[3.0] * 9 + [2.5],
            tokens_per_step=4096, peak_memory_bytes=10,
        ),
    )  # fmt: skip
    write_json(trial / TrialRecord.FILE, TrialRecord(outcome="timeout", wall_s=9.0))
    metrics = read_metrics(trial)
    assert (metrics.source, metrics.format, metrics.outcome) == (
        "0003/repeat_1",
        "trial",
        "timeout",
    )
    assert metrics.conditions.num_devices == study["cluster"]["num_devices"]
    assert (metrics.conditions.seed, metrics.conditions.recompute) == (7, "full")
    assert metrics.throughput.tokens_per_s == 2048
    assert metrics.throughput.hfu > metrics.throughput.mfu
    assert metrics.stability.timeouts == 1
    assert metrics.stability.interruptions == 1
    # A fifth of ten losses.
    assert metrics.convergence.loss == 2.75


def test_what_a_trial_s_knobs_do_not_say_is_not_taken_as_none(tmp_path):
    trial = tmp_path / "trials" / "0000" / "repeat_0"
    trial.mkdir(parents=True)
    (tmp_path / "study.yaml").write_text((SAMPLES / "study.yaml").read_text())
    plan = TrialPlan(number=0, warmup_steps=1, measure_steps=10, deadline_s=60)
    write_yaml(trial / KnobsFile.FILE, KnobsFile(knobs={"data_parallel": 2}, trial=plan))
    result = TrialResult(outcome="ok", step_time_s=[2.0] * 10, tokens_per_step=4096)
    write_json(trial / TrialResult.FILE, result)
    metrics = read_metrics(trial)
    assert metrics.throughput.mfu is not None
    assert metrics.throughput.hfu is None
    assert metrics.reasons["hfu"] == "it is not known what is recomputed"
    (tmp_path / "peak.json").write_text('{"flops_per_device": "fast"')
    with pytest.raises(ConfigError, match=r"peak.json, line 1 must be JSON"):
        read_metrics(trial)


def test_a_log_of_json_lines_may_end_in_json(tmp_path):
    log = tmp_path / "train.json"
    log.write_text("".join(f'{{"step": {n}, "loss": {3 - n / 100}}}\n' for n in range(1, 31)))
    assert read_metrics(log).convergence.first_loss == 2.99


def test_a_baseline_file_is_read_back_whole(tmp_path):
    metrics = read_metrics(write_run(tmp_path / "run", steady(40, tokens=100)))
    file = tmp_path / "baseline.json"
    write_json(file, metrics)
    assert read_metrics(file) == metrics


def test_one_device_exchanges_nothing_and_several_are_not_known(tmp_path):
    alone = write_run(tmp_path / "one", steady(8), conditions={"num_devices": 1})
    assert read_metrics(alone).communication.communication_share == 0.0
    many = write_run(tmp_path / "two", steady(8), conditions={"num_devices": 2})
    metrics = read_metrics(many)
    assert metrics.communication.communication_share is None
    assert "profiler window" in metrics.reasons["communication_share"]


def test_nothing_to_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least one optimizer step"):
        read_metrics(write_run(tmp_path / "empty", []))
    (tmp_path / "bare").mkdir()
    with pytest.raises(ConfigError, match="but it has none of these"):
        read_metrics(tmp_path / "bare")
    with pytest.raises(ConfigError, match="does not exist"):
        read_metrics(tmp_path / "none.log")


def test_a_log_with_an_interval_and_two_trainings(tmp_path):
    log = tmp_path / "train.csv"
    rows = [
        f"{step},{9.0 if step == 500 else 4.0 + step % 30 / 100},0" for step in range(10, 1001, 10)
    ]
    rows += [f"{step},{2.0},1" for step in range(10, 301, 10)]
    log.write_text("step,loss,run\n" + "\n".join(rows) + "\n")
    metrics = read_metrics(log)
    assert (metrics.steps.segments, metrics.steps.recorded) == (2, 130)
    assert (metrics.convergence.first_loss, metrics.convergence.best_loss) == (2.0, 2.0)
    # One spike in 1300 steps, of which every tenth is told.
    name = "loss_spikes_per_1000_steps"
    assert metrics.stability.loss_spikes_per_1000_steps == pytest.approx(1 / 1.3)
    assert metrics.reasons[name].startswith("130 records of 1300 steps")
    assert name not in metrics.intervals


def test_the_logs_of_ranks_are_one_run(tmp_path):
    for rank, slow in ((0, 0.0), (1, 0.25)):
        rows = [f"{step},{3 - step / 100},{0.5 + slow}" for step in range(1, 31)]
        text = "step,loss,step_time_s\n" + "\n".join(rows) + "\n"
        (tmp_path / f"worker_{rank}.log").write_text(text)
    metrics = read_metrics(tmp_path)
    assert metrics.steps.recorded == 30
    # Each step takes as long as on the slowest rank.
    assert metrics.throughput.step_time_s == 0.75


def test_non_finite_ends_are_not_hidden(tmp_path):
    steps = steady(50)
    steps[-1] = Observation(step=50, phase="train", loss=math.nan, step_time_s=0.5)
    metrics = read_metrics(write_run(tmp_path / "run", steps))
    assert math.isnan(metrics.convergence.loss)
    assert "loss" not in metrics.intervals
    assert metrics.convergence.best_loss == pytest.approx(3.0 - 0.049)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [0.0, -1.0, 5e-324, 9e149, 1.7e308, math.inf, math.nan])
def test_odd_values_give_metrics_that_can_be_written_and_compared(tmp_path, value):
    steps = [
        Observation(
            step=step, phase="train", loss=value, grad_norm=value, step_time_s=value,
            data_time_s=value, tokens_per_s=value, mfu=value, eval_loss=value, overflow=value,
            device_utilization=value, device_power_w=value, wall_time_s=value,
        )
        for step in range(1, 41)
    ]  # fmt: skip
    metrics = read_metrics(write_run(tmp_path / "run", steps))
    assert RunMetrics.model_validate_json(metrics.to_json()).to_json() == metrics.to_json()
    rows = compare(metrics, metrics).rows
    assert all(row.different in (False, None) for row in rows)
