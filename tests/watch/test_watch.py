"""A live view reads what others write, whatever state the files are in."""

import contextlib
import fcntl
import io
import math
import os
import pty
import re
import shutil
import subprocess
import sys
import time

import pytest
from rich.console import Console

from mindtune.controller.cli.app import main
from mindtune.controller.contract import (
    DecisionRecord,
    KnobsFile,
    RunPlan,
    RunResult,
    TrialPlan,
    TrialRecord,
    write_json,
    write_yaml,
)
from mindtune.controller.records import DecisionWriter, RunFolder, SignalWriter
from mindtune.controller.trials.summary import Measurement, StudySummary, TrialSummary
from mindtune.controller.watch.run_status import RunWatcher
from mindtune.controller.watch.sparkline import sparkline
from mindtune.controller.watch.study_status import StudyWatcher
from mindtune.controller.watch.tail import Tail
from mindtune.controller.watch.views import run_line, run_view, study_view
from mindtune.policies.signals import Observation

NOW = 1_900_000_000.0


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


def write_steps(run, first, last, **signals):
    writer = SignalWriter(run.signals)
    for step in range(first, last + 1):
        values = {"loss": 3.0 - step / 100, "step_time_s": 0.5, "grad_norm": 1.0, **signals}
        writer.write(Observation(step=step, phase="train", **values))
    writer.close()


def watcher(run, age_s=0.0):
    clock = NOW + age_s
    for path in run.path.iterdir():
        os.utime(path, (NOW, NOW))
    return RunWatcher(run.path, clock=lambda: clock)


def test_lines_come_once_and_only_whole(tmp_path):
    path = tmp_path / "t.csv"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_text("step,loss\n1,2.0\n2,1")
    assert tail.lines() == ["1,2.0\n"]
    assert (tail.head, tail.started_over) == ("step,loss\n", True)
    with path.open("a") as file:
        file.write(".5\n3,1")
    assert tail.lines() == ["2,1.5\n"]
    assert not tail.started_over
    path.write_text("step,loss\n1,9.0\n")
    assert tail.lines() == ["1,9.0\n"]
    assert tail.started_over, "a file that was cut is read again"
    path.unlink()
    assert tail.lines() == []


def test_of_a_long_file_the_end_is_read(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("step\n" + "".join(f"{step:07d}\n" for step in range(1000)))
    assert Tail(path, most_bytes=20).lines() == ["0000998\n", "0000999\n"]


def test_a_run_is_waited_for_runs_falls_silent_and_ends(folder):
    assert RunWatcher(folder.path).look().state == "waiting"
    write_steps(folder, 1, 10)
    running = watcher(folder).look()
    assert (running.state, len(running.steps), running.step_time_s) == ("running", 10, 0.5)
    assert running.time_left_s is None, "its files do not say how long it is to be"
    assert watcher(folder, 59).look().state == "running"
    assert watcher(folder, 61).look().state == "silent"
    folder.stacks.write_text("stacks")
    assert watcher(folder, 61).look().state == "hung"
    write_json(folder.result, RunResult(outcome="stopped", steps=10, wall_s=5, message="lost"))
    ended = watcher(folder, 61).look()
    assert (ended.state, ended.outcome, ended.message) == ("ended", "stopped", "lost")


def test_slow_steps_make_a_longer_silence_usual(folder):
    write_steps(folder, 1, 10, step_time_s=30.0)
    assert watcher(folder, 599).look().state == "running"
    assert watcher(folder, 601).look().state == "silent"


def test_a_killed_run_is_known_by_its_lock(folder):
    write_steps(folder, 1, 10)
    with (folder.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert watcher(folder, 11).look().state == "running"
    assert watcher(folder, 11).look().state == "gone"
    assert watcher(folder, 9).look().state == "running", "not looked at while signs of life come"


def test_steps_findings_and_decisions_are_followed(folder):
    write_steps(folder, 1, 40)
    view = watcher(folder)
    assert view.look().findings == ()
    write_steps(folder, 41, 43, loss=math.nan)
    decisions = DecisionWriter(folder.decisions)
    record = DecisionRecord(step=43, policy="rewind", action="Rewind", requested="r-1",
                            verdict="granted", reason="the loss is lost")  # fmt: skip
    decisions.write(record)
    decisions.write(record.model_copy(update={"acted": 40.0}))
    decisions.close()
    with folder.decisions.open("a") as file:
        file.write('{"step": 44, "pol')
    with folder.signals.open("a") as file:
        file.write("no row at all\n44,")
    status = view.look()
    assert len(status.steps) == 43
    assert [(run, f.kind.value, f.step, f.last_step) for run, f in status.findings] == [
        (1, "non_finite_loss", 41, 43)
    ]
    assert [r.acted for r in status.decisions] == [40.0], "the last word of a decision holds"
    assert [r.acted for r in view.look().decisions] == [40.0]


def test_a_trial_knows_its_end_and_time_left(folder):
    write_steps(folder, 1, 10)
    plan = TrialPlan(number=0, warmup_steps=5, measure_steps=15, deadline_s=60)
    write_yaml(folder.path / KnobsFile.FILE, KnobsFile(knobs={}, trial=plan))
    status = watcher(folder).look()
    assert (status.planned_steps, status.time_left_s) == (20, 5.0)
    assert "step  10 of 20 (50%)" in drawn(run_view("mine", status, plain=False))
    folder.result.write_text('{"schema": 1, "outcome": "ok", "step_time_s": 0.5}')
    assert watcher(folder).look().state == "running", "its launcher has not judged it yet"
    write_json(folder.path / "trial.json", TrialRecord(outcome="timeout", wall_s=1.0))
    assert watcher(folder).look().outcome == "timeout"


def test_a_run_with_a_plan_tells_how_long_it_takes_yet_and_by_what(folder):
    write_steps(folder, 1, 60, step_time_s=2.0)
    write_steps(folder, 61, 90)
    write_json(folder.path / RunPlan.FILE, RunPlan(steps=400, basis="epochs x batches = 4 x 100"))
    status = watcher(folder).look()
    # 60 of the last 90 steps took 2 s.
    assert (status.steps_left, status.time_left_s) == (310, 620.0)
    line = run_line(status)
    assert "step 90 of 400 (22%)" in line
    assert line.endswith(
        "time left 10 min 20 s (at the median of the last 90 steps, without evaluation and saving)"
    )
    write_steps(folder, 91, 401)
    assert "time left none, its steps are made" in run_line(watcher(folder).look())
    (folder.path / RunPlan.FILE).write_text('{"steps": 4')
    assert "time left not known, since no file says" in run_line(watcher(folder).look())


def test_without_step_times_the_steps_left_are_told(folder):
    write_steps(folder, 1, 10, step_time_s=None)
    write_json(folder.path / RunPlan.FILE, RunPlan(steps=40, basis="the program says so"))
    assert "time left not known, since the 30 steps left have no time" in run_line(
        watcher(folder).look()
    )


def test_what_comes_again_after_a_restart_is_told_again(folder, capsys):
    write_steps(folder, 1, 40)
    write_steps(folder, 41, 43, loss=math.nan)
    write_steps(folder, 30, 40)
    write_steps(folder, 41, 42, loss=math.nan)
    found = [(run, f.step, f.last_step) for run, f in watcher(folder).look().findings]
    assert found == [(1, 41, 43), (3, 41, 42)]
    assert main(["watch", str(folder.path), "--once"]) == 0
    text = capsys.readouterr().out
    assert "step 41 to 43 after restart 1: critical" in text
    assert "step 41 to 42 after restart 3: critical" in text


def test_step_times_are_shown_to_four_digits(folder):
    write_steps(folder, 1, 10, step_time_s=1.4372)
    assert "step time 1.437 s (median)" in run_line(watcher(folder).look())


def test_what_other_programs_wrote_steers_no_terminal(folder):
    write_steps(folder, 1, 10)
    result = RunResult(outcome="crash", steps=10, wall_s=5, message="\x1b]0;gone\x07\x1b[2Jlost")
    write_json(folder.result, result)
    decisions = DecisionWriter(folder.decisions)
    decisions.write(DecisionRecord(step=4, policy="mine", action="Advise", requested="a",
                                   verdict="granted", reason="\x1b[31mred"))  # fmt: skip
    decisions.close()
    text = drawn(run_view("na\x1bme", watcher(folder).look(), plain=False))
    assert "\x1b" not in text
    assert r"\x1b[31mred" in text


def drawn(view, width=100):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(view)
    return console.file.getvalue()


def test_a_run_is_drawn_with_its_course_findings_and_decisions(folder):
    more = {"learning_rate": 1e-3, "loss_scale": 1024.0, "mfu": 0.4, "tokens_per_s": 9e3}
    write_steps(folder, 1, 40, **more)
    write_steps(folder, 41, 42, loss=math.inf, **more)
    text = drawn(run_view("mine", watcher(folder).look(), plain=False))
    for part in ("mine", "running, last sign of life 0 ms ago", "step  42", "time left  not known, since",
                 "learning rate  0.001", "loss scale  1024", "MFU  40.0%", "findings (1)",
                 "step 41 to 42 after restart 1: critical: non finite loss"):  # fmt: skip
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 100
    narrow = drawn(run_view("mine", watcher(folder).look(), plain=True), width=50)
    assert narrow.isascii()
    assert max(map(len, narrow.splitlines())) <= 50


def test_a_course_shows_spikes_and_breaks():
    assert sparkline([1, 2, 3, 8], width=4) == "▁▂▃█"
    assert sparkline([1.0] * 99 + [9.0], width=10, plain=True) == "_" * 9 + "@"
    assert sparkline([1, math.nan, None, 1], width=9) == "▁x▁"
    assert sparkline([1e308, -1e308], width=9) == "█▁"
    assert sparkline([], width=9) == ""


def launch(repeat, wall_s):
    return Measurement(repeat=repeat, seed=0, outcome="ok", value=0.2, mfu=0.2, stability=1.0,
                       step_time_s=0.1, peak_memory_bytes=2**30, wall_s=wall_s)  # fmt: skip


def test_a_study_shows_trials_the_running_one_and_time_left(tmp_path):
    study = tmp_path / "study"
    running = RunFolder(study / "trials" / "0002" / "repeat_0")
    running.create()
    assert StudyWatcher(study).look().summary is None
    trials = [
        TrialSummary(number=number, knobs={"recompute": recompute}, outcome="ok", value=value,
                     measurements=[launch(0, 10.0)])
        for number, recompute, value in ((0, "full", 0.2), (1, "none", 0.3))
    ]  # fmt: skip
    summary = StudySummary(study="gpt", objective="mfu", planned=5, total=9, feasible=6,
                           trials=trials, winner=1)  # fmt: skip
    write_json(study / "summary.json", summary)
    write_steps(running, 1, 5)
    (study / "trials" / "0001" / "repeat_0.unfinished_1").mkdir(parents=True)
    view = StudyWatcher(study)
    status = view.look()
    assert [trial.number for trial in status.running] == [2]
    assert status.search_left_s == pytest.approx(30.0)
    text = drawn(study_view(status, plain=False))
    for part in ("study gpt", "2 of 5 configs measured; 6 of 9 feasible",
                 "best so far: trial 1, value 0.3, 1.50 x the base's", "about 30 s left",
                 "trial 2: step 5", "*1", "recompute=none", "the base config"):  # fmt: skip
        assert part in text, part
    narrow = drawn(study_view(status, plain=True, width=60), width=60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert "recompute=none" in narrow
    (study / "summary.json").write_text("{")
    assert view.look().summary == summary, "what cannot be read just now is as it was"


@pytest.mark.parametrize(
    ("outcome", "code"), [("ok", 0), ("stopped", 1), ("oom", 3), (None, 0)]
)  # fmt: skip
def test_once_prints_plain_lines_and_its_exit_code_is_for_scripts(folder, capsys, outcome, code):
    write_steps(folder, 1, 10)
    if outcome is not None:
        write_json(folder.result, RunResult(outcome=outcome, steps=10, wall_s=5))
    assert main(["watch", str(folder.path), "--once"]) == code
    text = capsys.readouterr().out
    assert "step 10, loss 2.9, step time 500 ms (median), gradient norm 1" in text
    assert "\x1b" not in text
    assert (f"ended: {outcome}" in text) == (outcome is not None)


def test_it_goes_on_until_the_run_has_ended(folder, capsys, monkeypatch):
    write_steps(folder, 1, 10)

    def end_meanwhile(_seconds):
        write_steps(folder, 11, 12, loss=math.nan)
        write_json(folder.result, RunResult(outcome="non_finite", steps=12, wall_s=6))

    monkeypatch.setattr(time, "sleep", end_meanwhile)
    assert main(["watch", str(folder.path)]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "step 10",
        "step 11 to 12 after restart 1: critical: non finite loss: the loss was nan",
        "step 12",
        "ended: non_finite",
    ]  # fmt: skip


def test_a_folder_that_is_removed_meanwhile_ends_it(folder, capsys, monkeypatch):
    write_steps(folder, 1, 10)
    monkeypatch.setattr(time, "sleep", lambda _seconds: shutil.rmtree(folder.path))
    assert main(["watch", str(folder.path)]) == 2
    seen = capsys.readouterr()
    assert seen.out.startswith("step 10")
    assert "is gone: it was removed or renamed while it was watched" in seen.err


def test_a_folder_that_is_none_is_refused(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "must be the folder of a run or a study" in capsys.readouterr().err


LIVE = """
import sys
from mindtune.controller.cli.app import main
code = main(["watch", sys.argv[1], "--every", "0.1"])
heavy = {"mindspore", "pandas", "scipy", "matplotlib"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


def test_on_a_terminal_it_is_drawn_anew_until_the_end_and_imports_nothing_heavy(folder):
    write_steps(folder, 1, 10)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE, str(folder.path)], stdout=theirs, stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while chunk := os.read(ours, 65536):
            seen += chunk
            if b"running" in seen and not folder.result.exists():
                write_steps(folder, 11, 20)
                result = RunResult(outcome="stopped", steps=20, wall_s=9, message="lost")
                write_json(folder.result, result)
    error = process.communicate(timeout=60)[1]
    os.close(ours)
    assert process.returncode == 1, error
    assert b"\x1b[" in seen
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    assert text.index("running") < text.index("ended: stopped: lost")
    assert "step  20" in text
