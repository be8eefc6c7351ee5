"""The command line: what each command prints and exits with."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console
from rich.table import Table

from mindtune.controller.cli.app import main
from mindtune.controller.cli.commands import COMMANDS
from mindtune.controller.cli.console import out as console_out
from mindtune.controller.cli.progress import StudyProgress
from mindtune.controller.contract import DoctorOutput, ExplainOutput, SpaceOutput, StudyFile, parse
from mindtune.controller.demo import demo as demo_module
from mindtune.controller.trials.progress import TrialEnded

PROGRAM = """\
import json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["MINDTUNE_TRIAL_DIR"])
config = pathlib.Path(sys.argv[1]).read_text()
pathlib.Path(__file__).with_name("launched").open("a").write("x")
result = {"outcome": "ok", "step_time_s": [0.01] * 5, "tokens_per_step": 64, "effective": {}}
(folder / "result.json").write_text(json.dumps(result))
"""


@pytest.fixture
def project(tmp_path):
    """Write a small project of a user: program, base config and study file."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "base.yaml").write_text("batch: 4\nranks: 1\n")
    study = {
        "schema": 1,
        "study": {"name": "tiny", "trials": 2},
        "trial": {
            "command": ["python", "train.py", "{config}"], "base_config": "base.yaml",
            "warmup_steps": 0, "measure_steps": 5, "confirm_steps": 5, "repeats": 1,
            "startup_deadline": "20s", "deadline": "20s",
        },
        "cluster": {"num_devices": 1, "device_memory": "1GB"},
        "training": {"global_batch_size": 8},
        "space": {"data_parallel": [1, 2], "micro_batch_size": [2, 4, 3]},
        "overrides": {"batch": "micro_batch_size", "ranks": "data_parallel"},
    }  # fmt: skip
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    return tmp_path


def change(project, **changes):
    """Return the study file with changed keys, `section__key=value`; None removes the key."""
    path = project / "study.yaml"
    study = yaml.safe_load(path.read_text())
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        if not key:
            study[section] = value
        elif value is None:
            del study[section][key]
        else:
            study[section][key] = value
    path.write_text(yaml.safe_dump(study))
    return path


def test_space_counts_every_config_once(project, capsys):
    assert main(["space", str(project / "study.yaml"), "--json"]) == 0
    printed = capsys.readouterr().out
    document = parse(SpaceOutput, json.loads(printed), source="space")
    assert (document.total, document.feasible) == (6, 2)
    assert document.total == document.feasible + sum(r.count for r in document.rejected)
    assert [c.config for c in document.configs] == [
        {"data_parallel": 1, "micro_batch_size": 2},
        {"data_parallel": 1, "micro_batch_size": 4},
    ]
    fired = {r.rule: r.count for r in document.rejected if r.count}
    assert fired == {"degrees_fill_cluster": 3, "micro_batch_identity": 1}


def test_space_limit_cuts_the_list_and_never_the_counts(project, capsys):
    assert main(["space", str(project / "study.yaml"), "--json", "--limit", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["total"], document["feasible"], len(document["configs"])) == (6, 2, 1)


def test_space_explains_one_config(project, capsys):
    arguments = ["space", str(project / "study.yaml"), "--explain"]
    assert main([*arguments, "data_parallel=2", "--json"]) == 0
    document = parse(ExplainOutput, json.loads(capsys.readouterr().out), source="explain")
    assert not document.feasible
    assert document.rejected[0].rule == "degrees_fill_cluster"
    assert document.config["micro_batch_size"] == 4, "unnamed knobs come from the base config"
    assert main([*arguments, "micro_batch_size=2"]) == 0
    assert "feasible" in capsys.readouterr().out
    assert main([*arguments, "micro_batch_size"]) == 2
    assert "must be knob=value pairs" in capsys.readouterr().err


def test_space_shows_a_person_only_what_tells_configs_apart(project, capsys):
    assert main(["space", str(project / "study.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "every feasible config has data_parallel=1\n" in shown
    assert "\n micro_batch_size=2 " in shown
    assert shown.partition("every feasible config")[2].count("data_parallel=1") == 1
    path = change(project, space={"data_parallel": [1], "micro_batch_size": [2]})
    assert main(["space", str(path)]) == 0
    assert "the only one" in capsys.readouterr().out


def test_space_tells_a_newcomer_rule_count_reason_and_example(project, capsys):
    assert main(["space", str(project / "study.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "6 configs, 2 feasible; rules reject 67% before anything runs\n" in shown
    rejected = shown.partition("\n3 rejected by degrees_fill_cluster\n")[2]
    joined = " ".join(rejected.split())
    assert joined.startswith("data_parallel x model_parallel")
    assert (
        "must be num_devices = 1, but 2 x 1 x 1 x 1 = 2 e.g. data_parallel=2, micro_batch"
        in joined
    )
    assert "other rules reject nothing here; --json lists them" in shown


def test_space_counts_the_advice_and_its_constraint_rejects(project, capsys):
    space = {"data_parallel": [1], "model_parallel": [1, 2], "micro_batch_size": [4]}
    changes = {"cluster": {"num_devices": 2, "devices_per_node": 1, "allow_idle": True}}
    path = change(project, space=space, overrides={}, **changes)
    assert main(["space", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "tensor_parallel_inside_node speaks against 1 of the feasible configs" in shown
    assert main(["space", str(path), "--json"]) == 0
    document = parse(SpaceOutput, json.loads(capsys.readouterr().out), source="space")
    assert {a.rule: a.count for a in document.advice}["tensor_parallel_inside_node"] == 1
    path = change(project, space=space, overrides={}, **changes,
                  constraints={"tensor_parallel_inside_node": True})  # fmt: skip
    assert main(["space", str(path), "--json"]) == 0
    document = parse(SpaceOutput, json.loads(capsys.readouterr().out), source="space")
    assert {r.rule: r.count for r in document.rejected}["tensor_parallel_inside_node"] == 1
    assert document.feasible == 1


def test_brackets_of_the_user_are_printed_as_they_stand(capsys):
    table = Table("reason", box=None)
    table.add_row("[bold] :rocket: [/] of [a, b]")
    console_out().print(table)
    assert "[bold] :rocket: [/] of [a, b]" in capsys.readouterr().out


def test_progress_shows_the_first_line_of_a_message_and_no_time_once_done():
    text = io.StringIO()
    ended = TrialEnded(
        phase="search", number=3, repeat=0, outcome="crash", message="first\nsecond",
        value=None, mfu=None, stability=None, step_time_s=None, peak_memory_bytes=None,
        wall_s=2.0, best_number=1, time_left_s=0.0,
    )  # fmt: skip
    with StudyProgress(Console(file=text)) as progress:
        progress(ended)
        progress(replace(ended, time_left_s=0.4))
        progress(replace(ended, time_left_s=90.0))
    line = "trial 3 crash, took 2 s: first; best so far: trial 1"
    assert text.getvalue().splitlines() == [
        f"{line}, done", f"{line}, almost done", f"{line}, about 1 min 30 s left",
    ]  # fmt: skip


def test_ctrl_c_ends_the_trial_and_exits_130(project):
    """What it had started is gone, and the next start goes on from there."""
    ended = project / "ended"
    (project / "train.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(project / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    search = subprocess.Popen(
        [sys.executable, "-c", "from mindtune.controller.cli import main; main()", "search", project / "study.yaml",
         "--out", ended],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (project / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        search.send_signal(signal.SIGINT)
        _, err = search.communicate(timeout=30)
    finally:
        search.kill()
    assert search.returncode == 130
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    assert not Path("/proc", (project / "pid").read_text()).exists()
    record = json.loads((ended / "trials" / "0000" / "repeat_0" / "trial.json").read_text())
    assert record["outcome"] == "interrupted"


def test_an_empty_space_names_what_emptied_it_and_exits_1(project, capsys):
    path = change(project, space={"data_parallel": [2], "micro_batch_size": [2]})
    assert main(["space", str(path)]) == 1
    assert "degrees_fill_cluster" in capsys.readouterr().out
    assert main(["space", str(path), "--json"]) == 1
    document = parse(SpaceOutput, json.loads(capsys.readouterr().out), source="space")
    assert document.emptied_by.startswith("no config of 1 is feasible: degrees_fill_cluster alone")
    assert main(["search", str(path), "--out", str(project / "out")]) == 1
    assert "no config of 1 is feasible: degrees_fill_cluster" in capsys.readouterr().err
    assert not (project / "out").exists()


WRONG = [
    ("unknown key", {"trial__comand": ["x"]}, "unknown key 'comand' at trial; allowed: command,"),
    ("wrong unit", {"cluster__device_memory": "1 parsec"}, "must be a size such as 58.5GB"),
    ("impossible cluster", {"cluster__num_devices": 0}, "cluster.num_devices"),
    ("missing script", {"trial__command": ["python", "nothere.py", "{config}"]}, "nothere.py"),
    ("missing program", {"trial__command": ["no-such-program"]}, "no-such-program"),
    ("missing base", {"trial__base_config": "other.yaml"}, "other.yaml"),
    ("misspelt override", {"overrides": {"bath": "micro_batch_size"}}, "bath"),
    ("unknown knob", {"space": {"batch": [1]}}, "knob names must be one of"),
    ("unknown policy", {"policies": {"nonsense": {}}}, "nonsense"),
    ("unknown threshold", {"policies": {"gradient_norm": {"thresholds": {"x": 1}}}}, "x"),
    ("unset storage", {"study__storage": "env:MINDTUNE_TEST_UNSET"}, "MINDTUNE_TEST_UNSET"),
    ("nonsense storage", {"study__storage": "nonsense"}, "study.storage must be null"),
]


@pytest.mark.parametrize(("changes", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_input_is_one_clear_message_and_leaves_nothing(project, capsys, changes, message):
    path = change(project, **changes)
    before = sorted(project.rglob("*"))
    assert main(["search", str(path), "--out", str(project / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert sorted(project.rglob("*")) == before


def test_a_folder_that_cannot_be_written_is_refused(project, capsys):
    (project / "out").write_text("a file is in the way")
    assert main(["search", str(project / "study.yaml"), "--out", str(project / "out")]) == 2
    assert "must be a writable folder" in capsys.readouterr().err
    assert (project / "out").read_text() == "a file is in the way"


def test_search_exports_reports_and_goes_on(project, capsys):
    out = project / "out"
    assert main(["search", str(project / "study.yaml"), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert f"best config: {out / 'best_config.yaml'}" in captured.out
    assert "trial 0 ok" in captured.err
    assert "rejected by degrees_fill_cluster" in captured.err
    launched = (project / "launched").read_text()
    assert main(["search", str(project / "study.yaml"), "--out", str(out)]) == 0
    assert (project / "launched").read_text() == launched, "a finished trial runs once"
    again = capsys.readouterr().err
    assert "2 of them already measured" in again
    assert "took" not in again, "what was not launched is not shown"
    assert "left" not in again
    html = (out / "report.html").read_text()
    assert "Study tiny" in html
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert main(["export", str(out), "--out", str(project / "b.yaml"), "--trial", "1"]) == 0
    assert yaml.safe_load((project / "b.yaml").read_text())["provenance"]["trial"] == 1
    assert main(["export", str(out), "--out", str(project / "c.yaml"), "--trial", "9"]) == 2
    assert "trial must be one of 0, 1, but got 9" in capsys.readouterr().err
    assert not (project / "c.yaml").exists()


def test_a_search_in_which_nothing_ends_ok_says_so_and_exits_3(project, capsys):
    (project / "train.py").write_text("raise RuntimeError('down')\n")
    assert main(["search", str(project / "study.yaml"), "--out", str(project / "out")]) == 3
    captured = capsys.readouterr()
    assert captured.err.endswith("no config ended ok; see the messages above\n")
    assert "best config" not in captured.out


def test_a_demo_in_which_nothing_ends_ok_says_how_to_begin_anew(monkeypatch, capsys):
    ended = SimpleNamespace(run_dir=None, exit_code=3)
    monkeypatch.setattr(demo_module, "run_demo", lambda *_args, **_options: ended)
    assert main(["demo"]) == 3
    assert capsys.readouterr().err.endswith("begin anew in another folder, with --out\n")


def test_names_that_are_no_text_are_shown_spelled_out(tmp_path, capsys):
    assert main(["init", str(tmp_path / "a\udcff.yaml")]) == 0
    assert r"a\udcff.yaml" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["ascii", "gbk"])
def test_a_terminal_without_some_characters_is_written_to(tmp_path, encoding):
    run = tmp_path / "\u8fd0\u884c\u00e9\U0001f600"
    run.mkdir()
    (run / "signals.csv").write_text("step,loss\n1,2.5\n")
    rules = [{"name": "\u00e9\U0001f600", "signal": "loss", "statistic": "max", "max": 3}]
    (tmp_path / "gate.yaml").write_text(yaml.safe_dump({"schema": 1, "rules": rules}))
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    program = [sys.executable, "-c", "from mindtune.controller.cli import main; main()"]

    def told(*arguments):
        return subprocess.run(
            [*program, *arguments], env=environment, check=True, capture_output=True
        ).stdout.decode(encoding)

    assert "\\U0001f600" in told("report", str(run))
    gate = told("gate", str(run), "--rules", str(tmp_path / "gate.yaml"), "--json")
    assert json.loads(gate)["checks"][0]["rule"] == rules[0]["name"]


def test_a_closed_standard_output_is_no_failure(project):
    command = "from mindtune.controller.cli import main; main()"
    arguments = [sys.executable, "-c", command, "space", str(project / "study.yaml"), "--json"]
    ended = subprocess.run(
        arguments, check=False, stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1)
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("options", [["--json"], []])
def test_output_that_nobody_reads_ends_quietly_as_programs_do(project, options):
    """As `| head` leaves it: 1 would be a finding, 2 a wrong use."""
    command = "from mindtune.controller.cli import main; main()"
    space = subprocess.Popen(
        [sys.executable, "-c", command, "space", str(project / "study.yaml"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    space.stdout.close()
    assert (space.stderr.read(), space.wait()) == (b"", 141)


def test_a_corrupt_database_is_refused_and_kept(project, capsys):
    out = project / "out"
    assert main(["search", str(project / "study.yaml"), "--out", str(out)]) == 0
    database = out / "study.db"
    database.write_bytes(b"this is no database" * 100)
    capsys.readouterr()
    assert main(["search", str(project / "study.yaml"), "--out", str(out), "--trials", "2"]) == 2
    assert "study.db" in capsys.readouterr().err
    assert database.read_bytes() == b"this is no database" * 100


def test_init_writes_a_study_that_is_valid_and_never_overwrites(tmp_path, capsys):
    path = tmp_path / "study.yaml"
    assert main(["init", str(path)]) == 0
    parse(StudyFile, yaml.safe_load(path.read_text()), source="study.yaml")
    text = path.read_text()
    assert main(["init", str(path)]) == 2
    assert "must be a new file" in capsys.readouterr().err
    assert path.read_text() == text
    assert main(["init", str(tmp_path / "study.txt")]) == 2


def test_doctor_prints_one_json_document(capsys):
    assert main(["doctor", "--json"]) == 0
    document = parse(DoctorOutput, json.loads(capsys.readouterr().out), source="doctor")
    features = {entry.feature: entry for entry in document.usable}
    assert features["device_cpu"].ok
    assert all(entry.why for entry in document.usable)
    assert main(["doctor"]) == 0
    assert "device_cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["space"], ["space", "--nonsense", "x"], ["run", "x.yaml", "--mode", "maybe"],
     ["search", "x.yaml", "--trials", "0"], ["space", "missing.yaml"], ["run", "missing.yaml"],
     ["report", "missing"], ["export", "missing", "--out", "b.yaml"],
     ["export", "missing", "--out", "b.txt"], ["report", "x" * 5000], ["init", "x" * 5000],
     ["report", "a\0b"], ["gate", "a\udcff"], ["search", "."], ["worker", "."], ["search", "/"],
     ["run", "."], ["export", ".", "--out", "b.yaml"], ["init", "."],
     ["init", "--mindformers", ".", "b.yaml"], ["space", "."]],
)  # fmt: skip
def test_wrong_use_exits_2_without_a_traceback(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_every_command_has_a_one_line_description(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, function in COMMANDS.items():
        assert f"\n  {name} " in text
        assert function.__doc__.splitlines()[0].endswith((".", "(CPU only)."))


def test_the_console_script_is_installed():
    script = shutil.which(
        "mindtune", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
    )
    assert script is not None
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "Closed-loop auto-tuning" in done.stdout


@pytest.mark.parametrize("columns", ["1", "7", "0", "-3", "wide"])
def test_a_table_keeps_its_cells_in_a_window_of_any_width(tmp_path, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    (tmp_path / "signals.csv").write_text("step,loss\n1,2.0\n")
    assert main(["gate", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "not" in text
    assert "measured" in text
