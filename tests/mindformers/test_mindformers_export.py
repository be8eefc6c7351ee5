"""From a MindFormers study to a MindFormers YAML, and to the run that takes it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mindtune.controller.cli.app import main
from mindtune.controller.config_tree import dotted_keys, get_key
from mindtune.controller.contract import TrialPlan
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.settings import LiveConfig
from mindtune.controller.mindformers.plug_in import (
    check_command,
    in_own_folder,
    register_folder,
    with_callback,
)
from mindtune.controller.mindformers.tuned_yaml import _RUN_SETTINGS, tuned_header
from mindtune.controller.trials.study_setup import load_study

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Search three configs of `single.yaml`, with the program in MindFormers' place."""
    folder = tmp_path_factory.mktemp("project")
    tree = yaml.safe_load((HERE / "single.yaml").read_text())
    tree["train_dataset_task"]["dataset_config"] = tree[
        "train_dataset"
    ]  # an alias, as users write
    (folder / "base.yaml").write_text("# mine\n" + yaml.safe_dump(tree, sort_keys=False))
    (folder / "data").mkdir()
    (folder / "reporting_trainer.py").write_bytes((HERE / "reporting_trainer.py").read_bytes())
    (folder / "modules").mkdir()
    (folder / "modules" / "mine.py").write_text("")
    assert (
        main(["init", "--mindformers", str(folder / "base.yaml"), str(folder / "study.yaml")]) == 0
    )
    study = yaml.safe_load((folder / "study.yaml").read_text())
    study["trial"] |= {
        "command": ["python", "reporting_trainer.py", "--config", "{config}"],
        "warmup_steps": 0, "measure_steps": 4, "confirm_steps": 4, "repeats": 1,
        "startup_deadline": "30s", "deadline": "30s",
    }  # fmt: skip
    study["study"]["trials"] = 3
    study["space"] |= {"recompute": ["none", "full", [2]], "data_workers": 2, "prefetch": 1}
    (folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGISTER_PATH", str(folder / "modules"))
        assert main(["search", str(folder / "study.yaml"), "--out", str(folder / "study")]) == 0
    return folder


def different(tree, base):
    """Return the dotted keys of leaves in which two trees differ."""
    keys = {*dotted_keys(tree), *dotted_keys(base)}
    leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    missing = object()

    def at(content, key):
        try:
            return get_key(content, key, source="x")
        except ConfigError:
            return missing

    return {key for key in leaves if at(tree, key) != at(base, key)}


def test_a_trial_has_our_callback_and_nothing_of_it_leaves_its_folder(project):
    trials = sorted((project / "study" / "trials").glob("*/repeat_0"))
    assert len(trials) == 3
    for trial in trials:
        tree = yaml.safe_load((trial / "config.yaml").read_text())
        types = [entry["type"] for entry in tree["callbacks"]]
        assert types == ["MFLossMonitor", "TuneCallback"]  # and saves no checkpoint
        assert (tree["output_dir"], tree["seed"]) == ("./output", 1)
        assert tree["train_dataset"]["data_loader"]["dataset_dir"] == str(project / "data")
        assert json.loads((trial / "trial.json").read_text())["outcome"] == "ok"
        # The user's own modules are found beside ours.
        assert {"mine.py", "mindtune_callback.py"} <= set(
            json.loads((trial / "stdout.log").read_text().splitlines()[0])
        )


LOGGING = """
import time
for step in range(1, 100000):
    print(f"2025-03-04 12:10:00,123 - mindformers./output/log[mindformers/core/callback/callback.py:"
          f"564] - INFO - {{ Epoch:[  1/  1], step:[{step:5d}/100000], loss:[2.500/2.500], "
          f"per_step_time: {20 + step}ms, lr: 0.1, overflow cond: False, loss_scale: 1.0", flush=True)
    time.sleep(0.02)
"""


def test_without_the_callback_a_trial_ends_once_its_log_holds_its_steps(project):
    study = yaml.safe_load((project / "study.yaml").read_text())
    (project / "logging_trainer.py").write_text(LOGGING)
    study["study"] |= {"name": "logged", "trials": 1}
    study["trial"] |= {
        "callback": None, "command": ["python", "logging_trainer.py", "--config", "{config}"],
        "warmup_steps": 1, "measure_steps": 3,
    }  # fmt: skip
    (project / "logged.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    out = project / "logged"
    assert main(["search", str(project / "logged.yaml"), "--out", str(out)]) == 0
    folder = out / "trials" / "0000" / "repeat_0"
    record = json.loads((folder / "trial.json").read_text())
    assert (record["outcome"], record["wall_s"] < 20) == ("ok", True)
    assert "ended with its planned steps done" in record["message"]
    assert json.loads((folder / "result.json").read_text())["step_time_s"] == [0.022, 0.023, 0.024]
    assert "TuneCallback" not in (folder / "config.yaml").read_text()


def test_repeats_of_a_trial_have_seeds_of_their_own(project):
    seeds = {
        path.parent.name: yaml.safe_load(path.read_text())["seed"]
        for path in (project / "study" / "trials" / "0000").glob("repeat_*/config.yaml")
    }
    assert seeds["repeat_0"] == 1
    assert seeds["repeat_1"] == 2


def test_the_exported_yaml_differs_in_the_tuned_keys_and_carries_the_study(project, capsys):
    out = project / "tuned" / "best.yaml"
    code = main(["export", str(project / "study"), "--mindformers", str(project / "base.yaml"),
                 "--out", str(out)])  # fmt: skip
    assert code == 0
    assert "comments of" in capsys.readouterr().out
    tree = yaml.safe_load(out.read_text())
    base = yaml.safe_load((project / "base.yaml").read_text())
    best = tree.pop("mindtune")
    assert different(tree, base) == {"recompute_config.recompute"}
    assert tree["recompute_config"]["recompute"] is True  # the fastest
    assert best["knobs"]["recompute"] == "full"
    assert best["provenance"]["study"] == "base"
    assert set(best["overrides"]) >= {"recompute_config.recompute", "runner_config.batch_size"}


def test_the_head_of_an_export_is_a_comment_whatever_the_yaml_is_called():
    for name in ("base.yaml", "new\nline.yaml", "a\u2028b\x07.yaml", "\u6a21\u578b.yaml"):
        assert yaml.safe_load(tuned_header(Path(name)) + "a: 1\n") == {"a": 1}
    assert "\u6a21\u578b.yaml" in tuned_header(Path("\u6a21\u578b.yaml"))


def test_a_run_takes_the_exported_yaml_and_gets_our_callback(project):
    best, out = project / "best.yaml", project / "run"
    assert main(["export", str(project / "study"), "--mindformers", str(project / "base.yaml"),
                 "--out", str(best)]) == 0  # fmt: skip
    assert main(["run", str(best), "--out", str(out), "--mode", "observe"]) == 0
    tree = yaml.safe_load((out / "config.yaml").read_text())
    assert "mindtune" not in tree
    assert [entry["type"] for entry in tree["callbacks"]] == [
        "MFLossMonitor", "CheckpointMonitor", "TuneCallback",
    ]  # fmt: skip
    # A run writes where the user wants it.
    assert tree["output_dir"] == "/jobs/llama/output"
    assert tree["train_dataset"]["data_loader"]["dataset_dir"] == str(project / "data")


def test_the_plain_export_starts_the_same_run(project):
    best, out = project / "plain.yaml", project / "plain_run"
    assert main(["export", str(project / "study"), "--out", str(best)]) == 0
    assert yaml.safe_load(best.read_text())["callback"] == "mindformers"
    assert main(["run", str(best), "--out", str(out)]) == 0
    tree = yaml.safe_load((out / "config.yaml").read_text())
    assert [entry["type"] for entry in tree["callbacks"]][-1] == "TuneCallback"


def test_a_block_of_the_user_keeps_what_the_study_does_not_say(project):
    tree = yaml.safe_load((project / "base.yaml").read_text())
    own = {"rewind": {"enabled": False}, "policies": {"clipping": {"enabled": False}}, "knobs": {}}
    (project / "own.yaml").write_text(yaml.safe_dump({**tree, "mindtune": own}))
    out = project / "kept.yaml"
    assert main(["export", str(project / "study"), "--mindformers", str(project / "own.yaml"),
                 "--out", str(out)]) == 0  # fmt: skip
    block = yaml.safe_load(out.read_text())["mindtune"]
    assert block["rewind"] == {"enabled": False}
    assert block["policies"]["clipping"] == {"enabled": False}
    assert block["knobs"]["recompute"] == "full"


def test_an_earlier_export_gives_its_run_settings_and_nothing_that_its_study_found(project):
    tree = yaml.safe_load((project / "base.yaml").read_text())
    earlier = {
        "schema": 1, "command": ["python", "old.py"], "launcher": "msrun", "devices_per_node": 4,
        "learned": {"step_time_s": 9.0, "loss_scale_max": 1.0}, "knobs": {"recompute": "none"},
        "policies": {"clipping": {"enabled": False}}, "provenance": {"study": "another", "trial": 1},
        "alerts": {"urls": ["env:ALERTS"]}, "watchdog": {"enabled": False}, "out_dir": "runs/mine",
        "model_signals": {"every": 50}, "rewind": {"enabled": False}, "mode": "act",
    }  # fmt: skip
    (project / "earlier.yaml").write_text(yaml.safe_dump({**tree, "mindtune": earlier}))
    out = project / "again.yaml"
    assert main(["export", str(project / "study"), "--mindformers", str(project / "earlier.yaml"),
                 "--out", str(out)]) == 0  # fmt: skip
    block = yaml.safe_load(out.read_text())["mindtune"]
    for key in ("alerts", "watchdog", "out_dir", "model_signals", "rewind", "mode"):
        assert block[key] == earlier[key]
    assert block.get("policies", {}) == {}
    assert block["provenance"]["study"] == "base"
    assert block["learned"].get("loss_scale_max") is None
    assert block.get("devices_per_node") is None
    assert set(LiveConfig.model_fields) - {"policies", "learned"} == set(_RUN_SETTINGS)


def test_export_refuses_a_yaml_that_trains_another_batch_or_lacks_a_key(project, capsys):
    out = project / "refused.yaml"
    tree = yaml.safe_load((project / "base.yaml").read_text())
    tree["use_parallel"] = True  # then micro_batch_interleave_num counts
    tree["micro_batch_interleave_num"] = 2
    for changed, told in (
        (tree, "must train global_batch_size = 4 samples"),
        (
            {**tree, "recompute_config": {}},
            "'recompute_config.recompute' of `overrides` must exist in",
        ),
        ({"lr": 1}, "must be a MindFormers YAML"),
    ):
        (project / "other.yaml").write_text(yaml.safe_dump(changed))
        code = main(["export", str(project / "study"), "--out", str(out),
                     "--mindformers", str(project / "other.yaml")])  # fmt: skip
        said = " ".join(capsys.readouterr().err.split())
        assert (code, out.exists()) == (2, False)
        assert told in said


def test_a_command_that_names_the_folder_itself_is_refused(project):
    for words in (["--register_path", "here"], ["--register_path=here"]):
        with pytest.raises(ConfigError, match="by the variable REGISTER_PATH"):
            check_command(["python", "run_mindformer.py", *words])
    study = yaml.safe_load((project / "study.yaml").read_text())
    study["trial"]["command"] += ["--register_path", "modules"]
    (project / "refused_study.yaml").write_text(yaml.safe_dump(study))
    with pytest.raises(ConfigError, match="must leave --register_path out"):
        load_study(project / "refused_study.yaml")


def test_a_callback_that_is_there_is_not_added_again(tmp_path):
    own = {"type": "TuneCallback", "auto_register": "tune.TuneCallback"}
    tree = {"callbacks": [own], "output_dir": "output", "load_checkpoint": "ckpt",
            "parallel": {"save_file": "ckpt"}}  # fmt: skip
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "output").mkdir()
    placed = in_own_folder(tree, folders=[tmp_path / "none", tmp_path])
    assert with_callback(placed)["callbacks"] == [own]
    assert placed == {**tree, "load_checkpoint": str(tmp_path / "ckpt")}
    assert with_callback({})["callbacks"][0]["type"] == "TuneCallback"
    with pytest.raises(ConfigError, match="must be a list of entries"):
        with_callback({"callbacks": "MFLossMonitor"})


@pytest.mark.parametrize("resume", [True, "1-100.ckpt"])
def test_a_trial_begins_at_step_0_and_a_run_where_the_user_wants_it(tmp_path, resume):
    tree = {"load_checkpoint": "/jobs/ckpt", "resume_training": resume, "seed": 3}
    trial = in_own_folder(tree, folders=[tmp_path], repeat=0)
    assert (trial["load_checkpoint"], trial["resume_training"]) == ("", False)
    assert in_own_folder(tree, folders=[tmp_path]) == tree
    assert "load_checkpoint" not in in_own_folder({"seed": 3}, folders=[tmp_path], repeat=0)


def test_a_trial_loads_the_checkpoint_that_the_study_names(project):
    study = yaml.safe_load((project / "study.yaml").read_text())
    tree = yaml.safe_load((project / "base.yaml").read_text())
    tree |= {"load_checkpoint": str(project / "data"), "resume_training": True}
    (project / "resumed.yaml").write_text(yaml.safe_dump(tree))
    study["trial"]["base_config"] = "resumed.yaml"
    for named, loaded in ((None, ""), ("modules", str(project / "modules"))):
        study["trial"]["load_checkpoint"] = named
        (project / "resumed_study.yaml").write_text(yaml.safe_dump(study))
        setup = load_study(project / "resumed_study.yaml")
        folder = project / "resumed"
        folder.mkdir(exist_ok=True)
        plan = TrialPlan(number=0, warmup_steps=1, measure_steps=1, deadline_s=1.0)
        written = setup.config.write(folder, setup.knobs(setup.base), plan)
        trial = yaml.safe_load(written.read_text())
        assert (trial["load_checkpoint"], trial["resume_training"]) == (loaded, False)


def test_compiled_modules_land_beside_the_links_and_not_with_the_user(tmp_path):
    own = tmp_path / "own"
    (own / "__pycache__").mkdir(parents=True)
    (own / "mine.py").write_text("")
    together = register_folder(tmp_path / "trial", str(own))
    subprocess.run([sys.executable, "-c", "import mine, mindtune_callback"], check=False,
                   env={"PATH": os.environ["PATH"], "PYTHONPATH": str(together)})  # fmt: skip
    assert list((own / "__pycache__").iterdir()) == []
    assert list((together / "__pycache__").glob("mine.*.pyc"))


def test_the_folder_to_register_from_is_ours_alone_where_the_user_has_none(tmp_path):
    ours = register_folder(tmp_path)
    assert (ours / "mindtune_callback.py").is_file()
    assert list(tmp_path.iterdir()) == []
    assert register_folder(tmp_path, str(ours)) == ours
    with pytest.raises(ConfigError, match="must name a folder"):
        register_folder(tmp_path, str(tmp_path / "missing"))
