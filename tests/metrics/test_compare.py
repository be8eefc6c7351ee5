"""Comparing with a baseline: noise is no difference, and unlike things are not compared."""

import json

import numpy as np
import pytest

from mindtune.controller.cli.app import main
from mindtune.controller.contract import (
    CompareOutput,
    GoalsFile,
    RunConditions,
    RunMetrics,
    parse,
    read_document,
    write_json,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.metrics.compare import compare
from mindtune.controller.metrics.run_metrics import read_metrics
from mindtune.controller.records import SignalWriter
from mindtune.policies.signals import Observation

SAME = {"hardware": "FrobX", "num_devices": 1, "seed": 0, "versions": {"mindspore": "2.10.0"}}


def write_run(folder, *, seed, time_s=0.5, steps=400, **conditions):
    """A run whose step times swing slowly by 5 %, and whose losses scatter."""
    folder.mkdir()
    generator = np.random.default_rng(seed)
    writer = SignalWriter(folder / "signals.csv")
    swing = 0.0
    for step in range(1, steps + 1):
        swing = 0.8 * swing + float(generator.normal()) * 0.022
        writer.write(
            Observation(
                step=step,
                phase="train",
                loss=2.0 + float(generator.normal()) * 0.1,
                step_time_s=time_s * (1 + swing),
                tokens=1000,
                update_skipped=0.0,
            )
        )
    writer.close()
    write_json(folder / RunConditions.FILE, RunConditions(**{**SAME, **conditions}))
    return folder


def rows(tmp_path, *, goals=None, **other):
    first = read_metrics(write_run(tmp_path / "first", seed=1))
    second = read_metrics(write_run(tmp_path / "second", seed=2, **other))
    found = compare(first, second, goals)
    return {row.metric: row for row in found.rows}, found.warnings


def test_a_difference_inside_the_noise_is_none(tmp_path):
    found, warnings = rows(tmp_path)
    for name in ("step_time_s", "tokens_per_s", "loss", "skipped_rate"):
        assert found[name].different is False, name
    low, high = found["step_time_s"].interval
    assert low < 1 < high
    # Taken as independent, the medians of 400 steps would have 0.018.
    assert high - low > 0.025
    assert warnings == []


def test_a_slower_run_is_told_with_the_interval_of_the_ratio(tmp_path):
    found, _ = rows(tmp_path, time_s=0.6)
    row = found["step_time_s"]
    assert row.different is True
    low, high = row.interval
    assert 1.0 < low < 1.2 < high < 1.35
    assert row.unit == "s"
    assert found["tokens_per_s"].different is True
    assert found["loss"].different is False


def test_times_of_other_hardware_are_shown_and_not_judged(tmp_path):
    found, warnings = rows(tmp_path, time_s=0.6, hardware="FrobY")
    row = found["step_time_s"]
    assert (row.different, row.interval) == (None, None)
    assert (row.baseline, row.achieved) == (pytest.approx(0.5, 0.1), pytest.approx(0.6, 0.1))
    assert "other hardware (FrobX; FrobY): a new baseline" in row.note
    assert found["loss"].different is False
    assert any("times, memory and utilization cannot be compared" in text for text in warnings)


def test_losses_of_runs_that_are_not_equally_far_are_not_judged(tmp_path):
    found, warnings = rows(tmp_path, steps=300)
    assert found["loss"].different is None
    assert "not equally far: step 400 and step 300" in found["loss"].note
    assert found["step_time_s"].different is False
    assert any("losses and gradient norms cannot be compared" in text for text in warnings)


def test_losses_that_are_of_other_steps_are_not_judged(tmp_path):
    def log(name, every):
        path = tmp_path / f"{name}.csv"
        rows = [
            f"{step},{4 - 0.003 * step + 0.01 * (step // every % 3)},0.5"
            for step in range(every, 1001, every)
        ]
        path.write_text("step,loss,step_time_s\n" + "\n".join(rows) + "\n")
        return read_metrics(path)

    dense, sparse = log("dense", 1), log("sparse", 10)
    assert (dense.steps.interval, sparse.steps.interval) == (1, 10)
    found = compare(dense, sparse)
    row = next(row for row in found.rows if row.metric == "loss")
    # A fifth of the records, at most 100: the last 100 steps, and the last 200.
    assert row.achieved > row.baseline + 0.1
    assert row.different is None
    assert row.note == "recorded every 1 and every 10 steps: the losses are of other steps"
    assert any("the last and the best loss cannot be compared" in text for text in found.warnings)
    old = dense.model_copy(update={"steps": dense.steps.model_copy(update={"interval": None})})
    row = next(row for row in compare(old, sparse).rows if row.metric == "loss")
    assert row.different is not None, "an older file does not say, and is taken as equal"


def test_seed_versions_and_what_is_not_known_are_warned_of(tmp_path):
    _, warnings = rows(tmp_path, versions={"mindspore": "2.7.2"})
    assert warnings == ["versions differ: mindspore 2.10.0 and 2.7.2."]
    first = read_metrics(tmp_path / "first")
    other = first.model_copy(
        update={"conditions": RunConditions(seed=5, num_devices=2, precision="float16")}
    )
    told = compare(first, other).warnings
    assert any("the seeds differ (0 and 5)" in text for text in told)
    assert any("number of devices differs: 1 and 2" in text for text in told)
    assert told[-1] == "not known of both, and taken as equal: hardware, versions."


def test_other_models_have_no_losses_in_common():
    model = {"num_layers": 1, "hidden_size": 4, "num_heads": 1, "intermediate_size": 8,
             "vocab_size": 10, "seq_length": 8}  # fmt: skip
    steps = {"first_step": 1, "last_step": 9, "recorded": 9, "timed": 9}
    sides = [
        RunMetrics(
            source="a", format="run", steps=steps, convergence={"loss": 1.0},
            intervals={"loss": (0.9, 1.1)}, conditions={"model": {**model, "num_layers": layers}},
        )
        for layers in (1, 2)
    ]  # fmt: skip
    (row,) = compare(*sides).rows
    assert (row.different, row.note) == (None, "the models are different ones")


@pytest.mark.parametrize(
    ("before", "after", "different", "interval"),
    [
        (((1.0, (0.9, 1.1))), (2.0, (1.8, 2.2)), True, (1.73, 2.31)),
        ((-1.0, (-1.2, -0.8)), (0.1, (-0.3, 0.5)), True, None),
        ((-0.1, (-0.3, 0.1)), (0.1, (-0.1, 0.3)), False, None),
        ((1.0, None), (1.0, None), False, None),
        ((1.0, None), (1.1, None), None, None),
        ((float("nan"), None), (1.0, (0.9, 1.1)), True, None),
        ((float("nan"), None), (float("nan"), None), False, None),
    ],
)
def test_intervals_of_ratios_and_differences(before, after, different, interval):
    steps = {"first_step": 1, "last_step": 9, "recorded": 9, "timed": 9}
    sides = [
        RunMetrics(
            source="a",
            format="run",
            steps=steps,
            convergence={"loss_drop_per_1000_steps": value},
            intervals={} if span is None else {"loss_drop_per_1000_steps": span},
        )
        for value, span in (before, after)
    ]
    (row,) = compare(*sides).rows
    assert row.different is different
    if interval is None:
        assert row.interval is None
    else:
        assert row.interval == pytest.approx(interval, abs=0.01)


def test_more_than_the_devices_can_do_meets_no_goal():
    steps = {"first_step": 1, "last_step": 9, "recorded": 9, "timed": 9}
    before, after = (
        RunMetrics(source="a", format="run", steps=steps, throughput={"mfu": mfu})
        for mfu in (0.4, 1.3)
    )
    (row,) = compare(before, after, {"mfu": 0.5}).rows
    assert (row.achieved, row.met) == (1.3, None)
    assert row.note.startswith("above 1, which is wrong")


def test_goals_are_met_or_missed_by_the_metric_s_own_direction(tmp_path):
    found, _ = rows(tmp_path, goals={"step_time_s": 0.7, "tokens_per_s": 5000.0, "mfu": 0.4})
    assert (found["step_time_s"].goal, found["step_time_s"].met) == (0.7, True)
    assert found["tokens_per_s"].met is False
    assert (found["mfu"].met, found["mfu"].achieved) == (None, None)
    assert "needs the model's shape" in found["mfu"].note
    with pytest.raises(ConfigError, match="is better, but got 'speed'; known are loss,"):
        parse(GoalsFile, {"goals": {"speed": 1}}, source="goals.yaml")


def test_the_command_with_folders_logs_and_a_baseline_file(tmp_path, capsys):
    first = write_run(tmp_path / "first", seed=1, steps=100)
    second = write_run(tmp_path / "second", seed=2, time_s=0.6, steps=100)
    baseline = tmp_path / "baseline.json"
    assert main(["compare", str(first), "--save-baseline", str(baseline)]) == 0
    shown = capsys.readouterr().out
    assert "steps 1 to 100, 100 recorded, 100 timed" in shown
    assert "loss_drop_per_1000_steps" in shown
    assert read_document(RunMetrics, baseline) == read_metrics(first)
    goals = tmp_path / "goals.yaml"
    goals.write_text("goals: {step_time_s: 0.55}\n")
    command = ["compare", str(baseline), str(second), "--goals", str(goals)]
    assert main([*command, "--json"]) == 0
    told = CompareOutput.model_validate(json.loads(capsys.readouterr().out))
    row = next(row for row in told.root if row.metric == "step_time_s")
    assert (row.different, row.met, row.goal) == (True, False, 0.55)
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "missed" in captured.out
    log = tmp_path / "log.csv"
    log.write_text((first / "signals.csv").read_text())
    assert main(["compare", str(log), str(second), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert "not known of both, and taken as equal: hardware" in captured.err
    assert main(["compare", str(first), "--goals", str(goals)]) == 2
    assert main(["compare", str(first), "--save-baseline", str(tmp_path / "b.yaml")]) == 2
    assert main(["compare", str(first), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["source"] == "first"
