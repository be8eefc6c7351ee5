"""The program as a launcher starts it: in a trial's folder, with a config of its own."""

import csv
import json
import os
import subprocess
import sys

import pytest
import yaml

CONFIG = {
    "model": {"num_layers": 2, "hidden_size": 32, "seq_length": 32},
    "training": {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "recompute": "interval:2",
        "eval_every": 4,
        "eval_samples": 8,
        "steps": 500,
    },
    "faults": {"slow_data": {"seconds": 0.4, "first_step": 7, "last_step": 8}},
}


def _trial(folder, config):
    plan = {
        "number": 3, "repeat": 1, "seed": 11, "warmup_steps": 2, "measure_steps": 8, "deadline_s": 300,
    }  # fmt: skip
    knobs = {"recompute": "interval:2", "micro_batch_size": 4}
    (folder / "knobs.yaml").write_text(
        yaml.safe_dump({"schema": 1, "knobs": knobs, "trial": plan})
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MINDTUNE_")}
    return subprocess.run(
        [sys.executable, "-m", "mindtune.experiments.gpt", "--config", "config.yaml"],
        cwd=folder,
        env=inherited | {"MINDTUNE_TRIAL_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trial")
    done = _trial(folder, CONFIG)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.mindspore
def test_a_trial_leaves_its_measured_steps_and_what_really_acted(trial):
    result = json.loads((trial / "result.json").read_text())
    assert result["outcome"] == "ok"
    assert len(result["step_time_s"]) == len(result["loss"]) == 8
    assert result["samples_per_step"] == 8
    assert result["tokens_per_step"] == 8 * 32
    assert 4.0 < result["eval_loss"] < 5.6
    assert result["effective"] == {
        "data_parallel": 1,
        "model_parallel": 1,
        "micro_batch_size": 4,
        "micro_batch_num": 2,
        "precision": "float32",
        "recompute": "interval:2",
        "gradient_compression": "none",
        "data_workers": 1,
        "prefetch": 2,
    }


@pytest.mark.mindspore
def test_its_signals_show_the_starved_steps_and_the_evaluations(trial):
    with (trial / "signals.csv").open(newline="") as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file)}
    assert sorted(rows) == list(range(1, 11))
    # Two sleeps of 0.4 s per step, of which the two batches read ahead hide a part.
    assert float(rows[8]["data_time_s"]) > 0.5
    assert float(rows[6]["data_time_s"]) < 0.3
    # The loss of an evaluation stands in the row after it.
    assert [step for step, row in rows.items() if row["eval_loss"]] == [5, 9]
    # The schedule is that of the whole run, not of the trial.
    assert float(rows[10]["learning_rate"]) == pytest.approx(1e-3 * 10 / 20, rel=1e-5)


def test_a_wrong_config_leaves_a_typed_outcome(tmp_path):
    done = _trial(tmp_path, {"training": {"recompute": "selective"}})
    assert done.returncode == 2
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["outcome"] == "bad_config"
    assert "'selective'" in result["message"]
    assert "Traceback" not in done.stderr
