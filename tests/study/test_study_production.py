"""From a study to a production run: export, merge, run, and how it ended."""

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from mindtune.controller.contract import (
    BestConfig,
    FaultPlan,
    RunResult,
    dump_yaml,
    read_document,
)
from mindtune.controller.device.hardware import describe_hardware
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.settings import load_settings
from mindtune.controller.trials.export import export
from mindtune.controller.trials.production import (
    _tell_of_other_hardware,
    read_best_config,
    run_best_config,
)
from mindtune.controller.trials.study_runner import run_study
from mindtune.policies.engine import build_engine
from mindtune.policies.errors import PolicyError
from mindtune.policies.facts import RunFacts
from mindtune.policies.settings import PolicySettings
from mindtune.policies.signals import Observation
from mindtune.search.errors import SearchError

RUN = """
import sys
from pathlib import Path
from mindtune.controller.trials.production import run_best_config
sys.exit(run_best_config(Path(sys.argv[1]), Path(sys.argv[2])))
"""
MAIN = "from mindtune.controller.cli import main; main()"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, make_tiny):
    """A finished study of two configs, once for all tests of this file."""
    study = make_tiny(tmp_path_factory.mktemp("finished"))
    study.write(
        space={"micro_batch_size": [1, 4], "recompute": "full"},
        trial={"repeats": 1},
        policies={"gradient_norm": {"mode": "observe"}},
    )
    run_study(study.study_file, study.out)
    return study


@pytest.fixture
def project(finished, make_tiny, tmp_path):
    """A copy of the finished study, free to be changed."""
    copy = make_tiny(tmp_path)
    shutil.copytree(finished.folder, copy.folder, dirs_exist_ok=True)
    return copy


def set_ending(project, ending):
    path = project.folder / "base.yaml"
    base = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**base, "ending": ending}))


def test_best_config_carries_what_a_run_needs(project):
    best = read_document(BestConfig, project.out / "best_config.yaml")
    assert best.command == ["python", "../tiny_trial.py", "--config", "{config}"]
    assert best.base_config == "../base.yaml"
    assert best.overrides == {"training.micro_batch_size": 4, "training.recompute": True}
    assert best.knobs == {"micro_batch_size": 4, "recompute": "full", "micro_batch_num": 4}
    assert best.policies["gradient_norm"].mode == "observe"
    assert best.learned.step_time_s == pytest.approx(0.007)
    assert best.learned.data_share == pytest.approx(0.1)
    assert best.learned.peak_memory_bytes == 200_000_000
    assert best.learned.grad_norm.samples == 8
    assert best.provenance.study == "tiny"
    assert best.provenance.trial == 1
    assert best.provenance.value == pytest.approx(13 / 7)
    assert best.provenance.baseline_value == pytest.approx(1.0)
    assert "mindtune" in best.provenance.versions
    assert best.provenance.created.endswith("+00:00")
    assert best.provenance.model_extra["hardware"] == describe_hardware("cpu")


def test_a_run_on_other_hardware_says_what_holds_no_longer(project, caplog):
    best = project.out / "best_config.yaml"
    content = yaml.safe_load(best.read_text())

    def said(**origin):
        caplog.clear()
        moved = {**content, "provenance": {**content["provenance"], **origin}}
        best.write_text(yaml.safe_dump(moved))
        _tell_of_other_hardware(read_best_config(best).best)
        return caplog.text

    assert said() == ""
    assert said(hardware=None) == ""  # as in a file from before it was kept
    assert "the study ran on another machine, this machine is" in said(hardware="another machine")
    assert "hold no longer" in said(hardware="8 of them", device="Ascend910B-A2")
    caplog.clear()
    assert run_best_config(best, project.folder / "run") == 0
    assert "share of data wait and peak memory hold no longer" in caplog.text


def test_what_the_trials_taught_reaches_the_policies_of_the_run(project):
    settings = load_settings(project.out / "best_config.yaml", {})
    sections = settings.policies_with_known_scale
    assert sections["gradient_norm"].mode == "observe"
    assert sections["loss_scale"].thresholds == {"known_scale": 1024.0}
    policies = {
        name: PolicySettings(thresholds=entry.thresholds) for name, entry in sections.items()
    }

    def decided(engine):
        facts = RunFacts(reachable=frozenset({"loss_scale"}), loss_scale_dynamic=True)
        state, kinds = engine.init(facts), []
        for step in range(1, 13):
            # The tiny trials had norms of 1.0 to 1.2.
            norm, overflow = (2.5 if step == 12 else 1.0 + 0.1 * (step % 3)), float(step == 1)
            seen = Observation(
                step=step, loss=3.0, grad_norm=norm, overflow=overflow, update_skipped=overflow,
                loss_scale=2.0**24 if step == 1 else 1024.0,
            )  # fmt: skip
            found = engine.step(seen, state)
            state = found.state
            kinds += [finding.kind.value for finding in found.findings]
            if step == 1:
                kinds += [action.value for action in found.grants if action.knob == "loss_scale"]
        return kinds

    taught = decided(build_engine(policies, mode="act", prior=settings.prior))
    assert 1024.0 in taught
    assert "grad_norm_spike" in taught
    alone = decided(build_engine({}, mode="act"))
    assert 1024.0 not in alone
    assert "grad_norm_spike" not in alone


def test_any_finished_trial_can_be_exported_anywhere(project, tmp_path):
    out = tmp_path / "elsewhere" / "deep" / "base_as_it_was.yaml"
    export(project.out, out=out, trial=0)
    best = read_document(BestConfig, out)
    assert best.overrides["training.micro_batch_size"] == 1
    assert best.base_config == "../../project/base.yaml"
    assert read_best_config(out).config["training"] == {
        "micro_batch_size": 1, "recompute": True,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="trial must be one of 0, 1, but got 7"):
        export(project.out, out=out, trial=7)
    with pytest.raises(ConfigError, match="must be the folder of a study"):
        export(tmp_path, out=out)


def test_base_config_that_has_changed_since_is_not_used(project):
    set_ending(project, "stopped")
    out = project.folder / "best.yaml"
    export(project.out, out=out)
    assert read_document(BestConfig, out).base_config == "out/base_config.yaml"
    assert "ending" not in read_best_config(out).config


def test_export_refuses_a_batch_that_does_not_add_up(project):
    path = project.out / "study.yaml"
    study = yaml.safe_load(path.read_text())
    study["training"]["global_batch_size"] = 32
    path.write_text(yaml.safe_dump(study))
    out = project.folder / "best.yaml"
    with pytest.raises(ConfigError, match="must be global_batch_size = 32, but it is 16"):
        export(project.out, out=out)
    assert not out.exists()


def test_export_writes_over_exports_alone(project):
    out = project.folder / "best.yaml"
    export(project.out, out=out)
    export(project.out, out=out, trial=0)
    assert read_document(BestConfig, out).knobs["micro_batch_size"] == 1
    own = {
        name: (project.folder / name).read_bytes()
        for name in ("base.yaml", "study.yaml", "tiny_trial.py")
    }
    for name in own:
        with pytest.raises(ConfigError, match=f"--out must be .*{name}"):
            export(project.out, out=project.folder / name)
    # The base of this study may be an export itself.
    provenance = {"provenance": {"study": "earlier", "trial": 1}}
    earlier = {**yaml.safe_load(own["base.yaml"]), "mindtune": provenance}
    (project.folder / "base.yaml").write_text(yaml.safe_dump(earlier))
    with pytest.raises(ConfigError, match="another file than the YAML that it is made from"):
        export(project.out, out=project.folder / "base.yaml")
    assert yaml.safe_load((project.folder / "base.yaml").read_text()) == earlier
    assert all((project.folder / name).read_bytes() == own[name] for name in list(own)[1:])


def test_export_refuses_a_text_where_a_number_belongs(project):
    path = project.out / "summary.json"
    summary = json.loads(path.read_text())
    summary["trials"][1]["knobs"]["micro_batch_num"] = "many"
    path.write_text(json.dumps(summary))
    out = project.folder / "best.yaml"
    with pytest.raises(ConfigError, match=r"trials\.1\.knobs .*micro_batch_num must be a whole"):
        export(project.out, out=out)
    assert not out.exists()


def test_export_waits_for_no_pipe_that_a_trial_has_left(project):
    knobs = project.out / "trials" / "0001" / "repeat_1" / "knobs.yaml"
    knobs.unlink()
    os.mkfifo(knobs)
    learned = export(project.out, out=project.folder / "best.yaml").learned
    assert learned.step_time_s == pytest.approx(0.007)
    assert learned.data_share is None, "what is warm-up in the table is not known"


def test_export_imports_nothing_heavy(project):
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from mindtune.controller.trials.export import export\n"
        f"export(Path({str(project.out)!r}), out=Path({str(project.folder / 'b.yaml')!r}))\n"
        "heavy = [m for m in ('mindspore', 'pandas', 'scipy', 'optuna') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_run_with_faults_says_so_in_its_files(project, caplog):
    best, out = project.out / "best_config.yaml", project.folder / "drill"
    plan = FaultPlan.model_validate({"faults": [{"kind": "spike", "first_step": 2}]})
    set_ending(project, "silent")
    assert run_best_config(best, out, faults=plan) == 0
    written = (out / "config.yaml").read_text()
    assert written.startswith("# NO REAL RUN: faults are planted on purpose (spike)")
    assert yaml.safe_load(written)["ending"] == "silent"
    assert read_document(FaultPlan, out / "faults.yaml") == plan
    assert json.loads((out / "seen.json").read_text())["faults"] == str(out / "faults.yaml")
    assert read_document(RunResult, out / "result.json").planted_faults == plan.faults
    with pytest.raises(ConfigError, match="is of a run with another config"):
        run_best_config(best, out)
    # A program that reads no faults has none planted, and is told of.
    set_ending(project, "ok")
    path = project.folder / "live_keys.yaml"
    best_config = yaml.safe_load(best.read_text()) | {"base_config": "base.yaml"}
    live = {"faults": [{"kind": "hang", "first_step": 2}], "watchdog": {"train_min_s": 5}}
    path.write_text(yaml.safe_dump(best_config | live))
    path.write_text(path.read_text().replace("../tiny_trial.py", "tiny_trial.py"))
    out = project.folder / "unread"
    assert run_best_config(path, out) == 0
    assert "(hang)" in (out / "config.yaml").read_text()
    assert "names no planted faults" in caplog.text


def test_run_gets_the_merged_config_and_its_environment(project):
    best, out = project.out / "best_config.yaml", project.folder / "run"
    assert run_best_config(best, out, "observe") == 0
    seen = json.loads((out / "seen.json").read_text())
    assert seen["training"] == {"micro_batch_size": 4, "recompute": True}
    assert (seen["mode"], seen["faults"]) == ("observe", None)
    assert not (out / "faults.yaml").exists()
    assert seen["best_config"] == str(best.resolve())
    assert seen["knobs"]["trial"] is None
    assert seen["knobs"]["knobs"]["micro_batch_num"] == 4
    base = yaml.safe_load((project.folder / "base.yaml").read_text())
    written = yaml.safe_load((out / "config.yaml").read_text())
    assert {**written, "training": None} == {**base, "training": None}
    assert read_document(RunResult, out / "result.json").steps == 2
    with pytest.raises(ConfigError, match="has finished; give another folder"):
        run_best_config(best, out)


@pytest.mark.parametrize(
    ("ending", "code", "outcome", "message"),
    [
        ("stopped", 1, "stopped", "as the test asked"),
        ("crash", 3, "crash", "production is down"),
        ("oom", 3, "oom", "as the test asked"),
        ("silent", 0, "ok", "left no result of its own"),
    ],
)
def test_exit_code_tells_how_the_run_ended(project, ending, code, outcome, message):
    set_ending(project, ending)
    out = project.folder / "run"
    assert run_best_config(project.out / "best_config.yaml", out) == code
    result = read_document(RunResult, out / "result.json")
    assert result.outcome == outcome
    assert message in result.message
    assert result.steps == 2


def test_files_of_the_programs_own_hide_no_ending(project):
    set_ending(project, "foreign")
    out = project.folder / "run"
    assert run_best_config(project.out / "best_config.yaml", out) == 0
    assert read_document(RunResult, out / "result.json").outcome == "ok"
    assert json.loads((out / "result.unreadable.json").read_text()) == {"score": 7}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("import os; os.mkfifo('result.json'); os.mkfifo('signals.csv')", "left no result"),
        ("open('signals.csv', 'w').write('step,loss\\n-3,2.5\\n')", "left no result"),
        ("open('signals.csv', 'w').write('step,loss\\n-3,2.5\\n'); exit(4)", "with code 4"),
    ],
)
def test_odd_files_of_the_programs_own_hide_no_ending(tmp_path, spoil, message):
    best, out = tmp_path / "best.yaml", tmp_path / "run"
    best.write_text(yaml.safe_dump({"schema": 1, "command": ["python", "-c", spoil]}))
    assert run_best_config(best, out) == (3 if "exit" in spoil else 0)
    result = read_document(RunResult, out / "result.json")
    assert message in result.message
    assert result.steps == 0


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "[" * 100_000, "\xff"])
def test_a_run_folder_whose_mark_is_damaged_is_refused(tmp_path, text):
    best, out = tmp_path / "best.yaml", tmp_path / "run"
    best.write_text(yaml.safe_dump({"schema": 1, "command": ["python", "-c", "pass"]}))
    out.mkdir()
    (out / ".run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"\.run\.json"):
        run_best_config(best, out)
    assert [path.name for path in out.iterdir()] == [".run.json"]


def test_failure_after_an_ok_result_is_a_crash_that_keeps_what_was_measured(project):
    set_ending(project, "ok_then_crash")
    best, out = project.out / "best_config.yaml", project.folder / "run"
    assert run_best_config(best, out) == 3
    result = read_document(RunResult, out / "result.json")
    assert (result.outcome, result.eval_loss) == ("crash", 1.5)
    assert result.message.startswith("RuntimeError: too late")
    assert run_best_config(best, out) == 3, "it has not finished, so it may be run again"


def test_unfinished_run_goes_on_in_its_folder_and_another_does_not(project):
    set_ending(project, "crash")
    best, out = project.out / "best_config.yaml", project.folder / "run"
    assert run_best_config(best, out) == 3
    assert run_best_config(best, out) == 3
    assert (out / "result.segment_1.json").exists()
    # A run that was started before these keys existed is the same one.
    plan = read_best_config(best)
    content = plan.best.to_plain()
    for key in ("alerts", "watchdog", "callback", "devices_per_node", "hosts", "remote_shell",
                "launch"):  # fmt: skip
        assert not content.pop(key)
    old = hashlib.sha256(dump_yaml([plan.config, content]).encode()).hexdigest()
    state = json.loads((out / ".run.json").read_text())
    (out / ".run.json").write_text(json.dumps({**state, "config_hash": old}))
    assert run_best_config(best, out) == 3
    export(project.out, out=project.folder / "other.yaml", trial=0)
    with pytest.raises(ConfigError, match="of a run with another config"):
        run_best_config(project.folder / "other.yaml", out)
    with pytest.raises(ConfigError, match="it holds other files"):
        run_best_config(best, project.out)
    (project.folder / "file").touch()
    with pytest.raises(ConfigError, match="must be a writable folder"):
        run_best_config(best, project.folder / "file" / "run")


LATE = """
import json, os, signal, sys, time
from pathlib import Path
folder = Path(os.environ["MINDTUNE_RUN_DIR"])
if (folder / "waiting").exists():
    sys.exit(0)
def end(*_):
    time.sleep(0.5)
    result = {"outcome": "interrupted", "steps": 1, "wall_s": 1.0}
    (folder / "result.json").write_text(json.dumps(result))
    os._exit(1)
signal.signal(signal.SIGTERM, end)
(folder / "waiting").touch()
time.sleep(600)
"""


def test_a_killed_run_that_is_about_to_end_leaves_its_result_before_the_next_segment(tmp_path):
    best, out = tmp_path / "best.yaml", tmp_path / "run"
    (tmp_path / "late.py").write_text(LATE)
    best.write_text(yaml.safe_dump({"schema": 1, "command": ["python", "late.py"]}))
    run = start("run", best, "--out", out)
    wait_for(out / "waiting")
    run.kill()
    run.communicate()
    assert run_best_config(best, out) == 0
    assert left_of(out) == []
    assert read_document(RunResult, out / "result.json").outcome == "ok"
    assert read_document(RunResult, out / "result.segment_1.json").outcome == "interrupted"


def test_ctrl_c_ends_the_whole_run(project):
    set_ending(project, "wait")
    best, out = project.out / "best_config.yaml", project.folder / "run"
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(best), str(out)], stderr=subprocess.DEVNULL
    )
    wait_for(out / "waiting")
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=20) != 0
    assert left_of(out) == []
    assert read_document(RunResult, out / "result.json").outcome == "interrupted"


def start(*arguments):
    """Start a command line and return its process."""
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path):
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def left_of(folder):
    """Return the processes that have a folder in their environment."""
    mark = str(folder).encode()
    processes = [path for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [path for path in processes if mark in environment_of(path)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_ended_from_outside_ends_whole_and_says_so(project, number):
    set_ending(project, "wait")
    out = project.folder / "run"
    run = start("run", project.out / "best_config.yaml", "--out", out)
    wait_for(out / "waiting")
    second = start("run", project.out / "best_config.yaml", "--out", out)
    assert f"but process {run.pid} holds it" in second.communicate(timeout=20)[1]
    assert second.returncode == 2
    run.send_signal(number)
    assert f"interrupted by {number.name}" in run.communicate(timeout=20)[1]
    assert run.returncode == 128 + number
    assert left_of(out) == []
    result = read_document(RunResult, out / "result.json")
    assert (result.outcome, result.message) == ("interrupted", f"ended by {number.name}")
    assert result.steps == 2


def test_a_search_that_is_ended_from_outside_ends_whole_and_goes_on_later(tiny):
    tiny.write(
        space={"micro_batch_size": [1, 4], "recompute": "full"},
        trial={"repeats": 1},
        base={"training": {"micro_batch_size": 1, "recompute": True}, "sleep": {"4-full": 60}},
    )
    search = start("search", tiny.study_file, "--out", tiny.out)
    wait_for(tiny.out / "trials" / "0001" / "repeat_0" / "signals.csv")
    search.send_signal(signal.SIGTERM)
    assert "interrupted by SIGTERM" in search.communicate(timeout=20)[1]
    assert search.returncode == 143
    assert left_of(tiny.out) == []
    assert json.loads((tiny.out / "summary.json").read_text())["trials"][0]["outcome"] == "ok"


def environment_of(process):
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def test_mindformers_file_is_its_own_merged_config(project):
    best = yaml.safe_load((project.out / "best_config.yaml").read_text())
    merged = read_best_config(project.out / "best_config.yaml").config
    best["command"][1] = "tiny_trial.py"
    path = project.folder / "mindformers.yaml"
    path.write_text(yaml.safe_dump({**merged, "mindtune": {**best, "base_config": None}}))
    plan = read_best_config(path)
    assert plan.config == merged
    assert plan.best.knobs == best["knobs"]
    assert run_best_config(path, project.folder / "run") == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"commnd": []}, "unknown key 'commnd'"),
        ({"base_config": "gone.yaml"}, "gone.yaml must exist"),
        ({"command": ["python", "gone.py"]}, "gone.py"),
        ({"schema": 9}, "schema"),
        ({"policies": {"gradient_nrom": {}}}, "gradient_nrom"),
        ({"knobs": {"micro_batch_size": 0}}, "micro_batch_size"),
        ({"knobs": {"micro_batch_num": "abc"}}, "micro_batch_num must be a whole number"),
        ({"knobs": {"global_batch_size": 0.5}}, "global_batch_size"),
        ({"knobs": {"micro_batch_size": 10**400}}, "at most 1000000000"),
        (
            {"knobs": {"micro_batch_size": 2, "micro_batch_num": 4, "global_batch_size": 16}},
            "must be global_batch_size = 16, but it is 8",
        ),
        ({"launcher": "msrun", "knobs": {"data_parallel": 10**6}}, "multiply to 1e[+]06; correct"),
        ({"commnd": []}, "knobs, .*provenance, mode, out_dir, rewind, model_signals, .*faults"),
    ],
)
def test_wrong_best_config_is_refused_with_nothing_written(project, change, message):
    best = yaml.safe_load((project.out / "best_config.yaml").read_text())
    path = project.out / "wrong.yaml"
    path.write_text(yaml.safe_dump({**best, **change}))
    with pytest.raises((ConfigError, PolicyError, SearchError), match=message):
        run_best_config(path, project.folder / "run")
    assert not (project.folder / "run").exists()


def test_a_disk_that_fills_up_before_the_start_leaves_nothing(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"text": "x" * 5000}))
    best = {"schema": 1, "command": ["python", "-c", "pass"], "base_config": "base.yaml"}
    (tmp_path / "best.yaml").write_text(yaml.safe_dump(best))

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    done = subprocess.run(
        [sys.executable, "-B", "-c", MAIN, "run", tmp_path / "best.yaml", "--out",
         tmp_path / "run"],
        preexec_fn=limit, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "config.yaml must be writable, but: File too large" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_command_that_no_process_can_be_started_with_is_refused(project, tmp_path):
    best = project.out / "best_config.yaml"
    content = yaml.safe_load(best.read_text())
    content["command"] = ["echo", "a\0b"]
    changed = tmp_path / "changed.yaml"
    changed.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="must hold words without NUL"):
        run_best_config(changed, tmp_path / "run")
    assert not (tmp_path / "run").exists()
