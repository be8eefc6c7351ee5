"""`mindtune search` runs on a simulated cluster as on a real one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mindtune.controller.contract import StudyFile, parse, read_document, read_yaml
from mindtune.controller.trials.launcher import launch
from mindtune.controller.trials.outcome import judge
from mindtune.controller.trials.study_runner import run_study
from mindtune.controller.trials.study_setup import load_study
from mindtune.experiments.cluster_simulator.__main__ import main
from mindtune.experiments.cluster_simulator.problems import KINDS, problem
from mindtune.experiments.cluster_simulator.study import study_content, write_study

EXAMPLE = Path(__file__).parents[2] / "experiments" / "cluster_simulator"


@pytest.mark.parametrize("kind", KINDS)
def test_a_study_tells_what_its_problem_tells(kind):
    study = parse(StudyFile, study_content(kind, 0), source=kind)
    assert study.cluster.num_devices == problem(kind, 0).machine.num_devices


def test_the_example_is_what_the_command_writes(tmp_path):
    written = read_document(StudyFile, write_study("dense_64_2000", 0, tmp_path))
    assert read_document(StudyFile, EXAMPLE / "study.yaml") == written
    assert read_yaml(EXAMPLE / "base.yaml") == read_yaml(tmp_path / "base.yaml")


def test_a_study_file_makes_the_space_of_its_problem(tmp_path):
    setup = load_study(write_study("compressed_8_200", 1, tmp_path))
    known = problem("compressed_8_200", 1)
    assert setup.space.choices == known.space.choices
    assert setup.space.facts == known.space.facts


def test_search_finds_what_is_good_on_a_simulated_cluster(tmp_path):
    study_file = write_study("compressed_8_200", 3, tmp_path)
    content = yaml.safe_load(study_file.read_text())
    content["trial"] |= {"repeats": 1, "confirm_steps": 1}
    study_file.write_text(yaml.safe_dump(content))
    result = run_study(study_file, tmp_path / "out", trials=4)
    assert result.exit_code == 0
    known = problem("compressed_8_200", 3)
    best = yaml.safe_load(result.best_config.read_text())["knobs"]
    config = {name: best[name] for name in known.space.knobs}
    values = {
        key: value
        for entry in known.report.configs
        if (value := known.true_value(entry.config)) is not None
        for key in [known.space.key(entry.config)]
    }
    assert values[known.space.key(config)] > 0.75 * max(values.values())
    records = sorted((tmp_path / "out" / "trials").glob("*/repeat_0/trial.json"))
    assert len(records) == 4
    # The program plays what the problem says: same config, same seed, same times.
    for record in records:
        left = json.loads((record.parent / "result.json").read_text())
        knobs = yaml.safe_load((record.parent / "knobs.yaml").read_text())["knobs"]
        own = {name: knobs[name] for name in known.space.knobs}
        run = known.draw(own, seed=0)
        assert run.outcome == left["outcome"] == "ok"
        assert left["step_time_s"] == list(run.step_time_s)
        assert (record.parent / "signals.csv").read_text().count("\n") == 1 + 3 + 12


def failing(known, outcome):
    """Return a config and a seed of a given end."""
    for entry in known.report.configs:
        for seed in range(200):
            if known.draw(entry.config, seed=seed).outcome == outcome:
                return entry.config, seed
    raise AssertionError(outcome)


@pytest.mark.parametrize("outcome", ["oom", "crash"])
def test_simulated_failures_are_typed_by_the_launcher(tmp_path, outcome):
    known = problem("dense_8_200", 2)
    config, seed = failing(known, outcome)
    setup = load_study(write_study("dense_8_200", 2, tmp_path))
    folder = tmp_path / "trial"
    plan = {"number": 1, "seed": seed, "warmup_steps": 3, "measure_steps": 12, "deadline_s": 60}
    folder.mkdir()
    (folder / "knobs.yaml").write_text(
        yaml.safe_dump({"schema": 1, "knobs": config, "trial": plan})
    )
    report = launch(
        setup.trial_command(tmp_path / "base.yaml"), trial_dir=folder, startup_deadline_s=60,
        deadline_s=60,
    )  # fmt: skip
    assert judge(report, knobs=config).record.outcome == outcome


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["survey", "dense_9_9"], "problems must be some of dense_8_200"),
        (["survey", "--seeds", "0"], "--seeds must be 1 or more, but got 0"),
        (["study", "dense_8_200", "--time-scale", "-1", "--out", "{}/new"], "time_scale"),
        (["study", "dense_8_200", "--time-scale", "nan", "--out", "{}/new"], "time_scale"),
        (["study", "dense_8_200", "--out", "{}/file"], "file"),
    ],
)
def test_wrong_use_is_named_and_writes_nothing(tmp_path, capsys, command, said):
    (tmp_path / "file").write_text("")
    assert main([part.format(tmp_path) for part in command]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: ")
    assert said in told.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_program_refuses_to_run_outside_of_a_trial(tmp_path):
    write_study("dense_8_200", 0, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "mindtune.experiments.cluster_simulator", "trial", "--config",
         str(tmp_path / "base.yaml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "started by `mindtune search`" in done.stderr
