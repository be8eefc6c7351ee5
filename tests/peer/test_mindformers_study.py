"""A study of a MindFormers YAML in its real trainer: init, search, export, run."""

import json
import math
import os
import random
import subprocess
from pathlib import Path

import pytest
import yaml

from mindtune.controller.cli.app import main
from mindtune.controller.contract import TrialRecord, TrialResult, read_document
from mindtune.controller.mindformers import model_block
from mindtune.controller.records import RunFolder, read_decisions, read_signals
from mindtune.controller.trials.study_setup import load_study
from mindtune.experiments.mindformers_peer import launch
from mindtune.search.constraints import check

pytestmark = pytest.mark.peer
HERE = Path(__file__).parent
SAMPLES = HERE.parent / "mindformers"
COMMAND = "from mindtune.controller.cli import main; main()"
SHIPPED = 19
STEPS = 40


@pytest.fixture(scope="session")
def python():
    """Return the Python of MindFormers' environment."""
    found = os.environ.get(launch.PYTHON_VARIABLE)
    if not found:
        pytest.skip(f"{launch.PYTHON_VARIABLE} names no Python with MindFormers: CONTRIBUTING.md")
    return os.path.abspath(found) if os.sep in found else found  # noqa: PTH100 - a link stays one


@pytest.fixture(scope="session")
def call(python, tmp_path_factory):
    """Return a function that runs Python there, with this very mindtune."""
    root = launch.import_root(tmp_path_factory.mktemp("study") / "root")
    kept = {name: v for name, v in os.environ.items() if not name.startswith("MINDTUNE_")}

    def run(folder, *arguments, expected=0):
        done = subprocess.run(
            [python, *map(str, arguments)], cwd=folder, env=kept | {"PYTHONPATH": str(root)},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == expected, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    return run


# YAMLs ------------------------------------------------------------------------------------------


def test_every_shipped_yaml_becomes_a_study_that_loads(call, tmp_path, capsys):
    told = call(tmp_path, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    shipped = sorted(Path(told.strip(), "configs").rglob("*.yaml"))
    assert len(shipped) == SHIPPED
    for base in shipped:
        out = tmp_path / base.name
        assert main(["init", "--mindformers", str(base), str(out)]) == 0, base
        assert main(["space", str(out), "--limit", "1"]) == 0, base
        capsys.readouterr()
    # A config of each kind that its own trainer takes is a config of the space.
    for name in ("pretrain_qwen3_30b_a3b_4k", "pretrain_qwen3_32b_4k", "finetune_qwen3"):
        setup = load_study(tmp_path / f"{name}.yaml")
        assert setup.space.named(setup.space.complete(setup.base)) in setup.space


def test_mindformers_own_rules_pass_what_ours_pass_and_its_names_are_ours(call, tmp_path):
    base = tmp_path / "pipeline.yaml"
    base.write_bytes((SAMPLES / "pipeline.yaml").read_bytes())
    assert main(["init", "--mindformers", str(base), str(tmp_path / "study.yaml")]) == 0
    setup = load_study(tmp_path / "study.yaml")
    draw = random.Random(3)
    passed = draw.sample([entry.config for entry in check(setup.space).configs], 12)
    # What its rules refuse: ranks that are not filled, a list that is longer than the pipeline.
    refused = [
        {**passed[0], "data_parallel": 16, "model_parallel": 2, "pipeline_stage": 1},
        {**passed[0], "data_parallel": 8, "model_parallel": 1, "pipeline_stage": 2,
         "recompute": "layers:1/1/1"},
    ]  # fmt: skip
    yamls = []
    for number, config in enumerate([*passed, *refused]):
        path = tmp_path / f"config_{number}.yaml"
        changes = setup.config.overrides(setup.knobs(config))
        path.write_text(yaml.safe_dump(setup.config.merged(changes)))
        yamls.append(str(path))
    asked, told = tmp_path / "asked.json", tmp_path / "told.json"
    asked.write_text(json.dumps({"yamls": yamls, "devices": setup.study.cluster.num_devices}))
    call(tmp_path, HERE / "loaded_yaml.py", asked, told)
    found = json.loads(told.read_text())
    verdicts = [found["yamls"][path]["refusal"] for path in yamls]
    assert verdicts[: len(passed)] == [None] * len(passed)
    assert all(verdicts[len(passed) :])
    for table in (model_block.SIZES, model_block.EXPERTS):
        for name, aliases in table.items():
            theirs = next(names for names in found["names"].values() if aliases[0] in names)
            assert set(aliases) - {"padded_vocab_size"} == set(theirs), name


# In its trainer -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def searched(call, tmp_path_factory):
    """Search over MindFormers' trainer, our callback plugged in by YAML alone."""
    folder = tmp_path_factory.mktemp("searched")
    call(folder, HERE / "write_base.py", folder, STEPS)
    (folder / "train.py").write_bytes((HERE / "cpu_train.py").read_bytes())
    assert (
        main(["init", "--mindformers", str(folder / "base.yaml"), str(folder / "study.yaml")]) == 0
    )
    study = yaml.safe_load((folder / "study.yaml").read_text())
    study["study"]["trials"] = 3
    study["trial"] |= {
        "command": ["python", "train.py", "--config", "{config}"], "warmup_steps": 3,
        "measure_steps": 5, "confirm_steps": 8, "repeats": 1,
        "startup_deadline": "2min", "deadline": "2min",
    }  # fmt: skip
    # Accumulation is no knob of one device: MindFormers sets it to 1 in silence.
    study["overrides"]["runner_config.gradient_accumulation_steps"] = {
        "knob": "micro_batch_num", "create": True,
    }  # fmt: skip
    study["space"] = {"candidates": "candidates.csv"}
    (folder / "candidates.csv").write_text(
        "micro_batch_size,recompute,data_workers,prefetch\n"
        "8,none,1,1\n8,layers:1,2,4\n4,none,1,1\n"
    )
    (folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    call(folder, "-c", COMMAND, "search", "study.yaml", "--out", "study")
    return folder


def trials(folder):
    """Return recompute and micro-batch -> the trial's folder."""
    found = {}
    for path in (folder / "study" / "trials").glob("*/repeat_0"):
        knobs = yaml.safe_load((path / "knobs.yaml").read_text())["knobs"]
        found[(knobs["recompute"], knobs["micro_batch_size"])] = path
    return found


def test_knobs_act_in_its_trainer_and_are_read_back(searched):
    found = trials(searched)
    losses = []
    for knobs in (("none", 8), ("layers:1", 8)):
        result = read_document(TrialResult, found[knobs] / "result.json")
        record = read_document(TrialRecord, found[knobs] / "trial.json")
        asked = yaml.safe_load((found[knobs] / "knobs.yaml").read_text())["knobs"]
        assert record.outcome == "ok", record
        effective = dict(result.effective)
        whole = effective["recompute"]
        assert (whole if isinstance(whole, str) else f"layers:{whole[0]}") == knobs[0]
        for name in ("data_parallel", "micro_batch_size", "micro_batch_num", "data_workers",
                     "prefetch", "pp_interleave_num", "optimizer_sharding", "precision"):  # fmt: skip
            expected = {"pp_interleave_num": 1, "optimizer_sharding": "none",
                        "precision": "float32", "data_parallel": 1}  # fmt: skip
            assert effective[name] == asked.get(name, expected.get(name)), name
        assert (result.samples_per_step, result.tokens_per_step) == (8, 8 * 64)
        assert len(result.step_time_s) == len(result.loss) == 5
        assert not list(found[knobs].glob("output/checkpoint/**/*.ckpt"))
        losses.append(result.loss)
    # Recomputation changes when values are computed, not the values.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_mindformers_resets_in_silence_is_a_bad_config(searched):
    record = read_document(TrialRecord, trials(searched)[("none", 4)] / "trial.json")
    assert record.outcome == "bad_config"
    assert "micro_batch_num: 2, but 1 acted" in record.message


def test_without_our_callback_its_log_is_measured(searched, call):
    folder = searched
    study = yaml.safe_load((folder / "study.yaml").read_text())
    study["trial"]["callback"] = None
    study["study"] |= {"name": "logged", "trials": 1}
    (folder / "logged.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    call(folder, "-c", COMMAND, "search", "logged.yaml", "--out", "logged")
    trial = folder / "logged" / "trials" / "0000" / "repeat_0"
    record = read_document(TrialRecord, trial / "trial.json")
    assert record.outcome == "ok"
    assert "mindformers" in record.message
    summary = json.loads((folder / "logged" / "summary.json").read_text())
    assert summary["trials"][0]["value"] is not None
    # The same steps as with the callback, as its own lines tell them.

    logged = read_document(TrialResult, trial / "result.json")
    own = read_document(TrialResult, trials(folder)[("none", 8)] / "result.json")
    # It is ended once its log is seen to hold the planned steps; an idle machine makes all of its
    # YAML's in the second between two looks.
    assert 5 <= len(logged.loss) <= STEPS - 3
    assert logged.loss[:5] == pytest.approx(own.loss, abs=1e-5)
    assert logged.grad_norm[:5] == pytest.approx(own.grad_norm, rel=1e-4)
    assert all(math.isclose(t * 1000, round(t * 1000), abs_tol=1e-6) for t in logged.step_time_s)


def test_the_exported_yaml_is_mindformers_own_and_runs_guarded(searched, call):
    folder = searched
    # The user's production YAML is another one by now: its learning rate is far too high.
    tree = yaml.safe_load((folder / "base.yaml").read_text())
    tree["lr_schedule"] |= {"learning_rate": 1.0, "lr_end": 0.1}
    (folder / "hot.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    number = str(int(trials(folder)[("layers:1", 8)].parent.name))
    call(folder, "-c", COMMAND, "export", "study", "--trial", number, "--mindformers", "hot.yaml",
         "--out", "best.yaml")  # fmt: skip
    asked, told = folder / "asked.json", folder / "told.json"
    asked.write_text(json.dumps({"yamls": [str(folder / "best.yaml")], "devices": 1}))
    call(folder, HERE / "loaded_yaml.py", asked, told)
    (verdict,) = json.loads(told.read_text())["yamls"].values()
    assert verdict == {"refusal": None, "block": True}
    best = yaml.safe_load((folder / "best.yaml").read_text())
    call(folder, "-c", COMMAND, "run", "best.yaml", "--out", "run", "--mode", "act")
    records = RunFolder(folder / "run")
    result = json.loads((folder / "run" / "result.json").read_text())
    assert (result["outcome"], result["steps"], result["actions"]) == ("ok", STEPS, 1)
    for name in ("recompute", "data_workers", "prefetch", "micro_batch_size"):
        acted = result["effective"][name]
        spelled = f"layers:{acted[0]}" if isinstance(acted, list) else acted
        assert spelled == best["mindtune"]["knobs"][name], name
    rows = [row.observation for row in read_signals(records.signals)]
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert {row.global_batch_size for row in rows} == {8}
    # The policies act through MindFormers' own step, which reports the rate that acted.
    cuts = [e for e in read_decisions(records.decisions) if e.action == "SetLearningRateScale"]
    assert (cuts[-1].verdict, cuts[-1].requested, cuts[-1].acted) == ("granted", 1 / 16, 1 / 16)
    assert rows[cuts[-1].step].learning_rate < 0.1 < rows[cuts[-1].step - 1].learning_rate
    assert rows[-1].loss < rows[0].loss
    # What the user asked for is saved in a run.
    assert list((folder / "run").glob("output/checkpoint/**/*.ckpt"))
