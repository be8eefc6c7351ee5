"""Alerts of whole runs: of a controller, of real trainings, of `mindtune run`."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mindtune.controller.alerts.run_alerts import open_alerts
from mindtune.controller.contract import (
    AlertsSection,
    DecisionRecord,
    RunResult,
    dump_yaml,
    read_document,
)
from mindtune.controller.live.controller import LiveController
from mindtune.controller.trials.production import run_best_config
from mindtune.policies.engine import build_engine
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation

NAN = float("nan")


class NoKnobs:
    """A run none of whose knobs can be turned."""

    reachable = frozenset()

    def take_over(self, knobs):
        pass


def controller(alerts):
    made = LiveController(build_engine({}, mode="act"), NoKnobs(), alerts=alerts)
    made.start(RunFacts(reachable=frozenset()))
    return made


def open_section(tmp_path, **section):
    return open_alerts(AlertsSection(urls=["env:HOOK"], **section), folder=tmp_path / "first")


def finding(step, severity=Severity.WARNING, kind=FindingKind.PLATEAU):
    return Finding(
        step=step, last_step=step, kind=kind, severity=severity, message="Seen.", evidence={}
    )


def test_a_run_goes_on_while_nobody_answers_and_its_stop_is_told(server, tmp_path):
    server.hold()
    alerts = open_section(tmp_path)
    made = controller(alerts)
    step = 0
    while made.stop_diagnosis is None:
        step += 1
        assert step < 100
        made.step(Observation(step=step, loss=NAN if step > 5 else 2.0, grad_norm=1.0))
        if step == 6:
            server.wait_for(1)
    assert step > 6
    assert server.holds, "no alert had an answer when the run was stopped"
    server.release()
    alerts.end(RunResult(outcome="stopped", steps=step, wall_s=9.0, message=made.stop_diagnosis))
    alerts.close()
    assert server.titles()[0] == "[mindtune] finding: non_finite_loss"
    assert "[mindtune] stop" in server.titles()
    assert server.titles()[-1] == "[mindtune] end"
    for post in server.posts:
        assert post["message"].startswith(f"run first on {os.uname().nodename} ({tmp_path}/first)")
    first = server.posts[0]["message"]
    assert "step 6: non_finite_loss" in first
    assert "What to do: if it stays, go back to a checkpoint" in first
    stop = next(post for post in server.posts if post["title"] == "[mindtune] stop")
    assert f"step {step}: the run is stopped." in stop["message"]
    assert made.stop_diagnosis[:60] in stop["message"]


def test_an_incident_that_goes_on_is_told_once(server, tmp_path):
    alerts = open_section(tmp_path, min_interval=0.001)
    made = controller(alerts)
    for step in range(1, 20):
        made.report(finding(step))
    alerts.close()
    assert server.titles() == ["[mindtune] finding: plateau"]


@pytest.mark.parametrize(
    ("least", "told"),
    [("warning", 2), ("critical", 1)],
)
def test_findings_below_the_least_severity_are_not_told(server, tmp_path, least, told):
    alerts = open_section(tmp_path, min_severity=least)
    for kind, severity in zip(list(FindingKind), Severity, strict=False):
        alerts.finding(finding(1, severity, kind))
    alerts.close()
    assert len(server.posts) == told


RECORD = {"step": 4, "policy": "loss_scale", "action": "SetLossScale", "requested": 512.0,
          "before": 1024.0, "reason": "a storm"}  # fmt: skip


def test_what_was_done_is_told_and_what_was_not_is_not(server, tmp_path):
    alerts = open_section(tmp_path)
    for changes in (
        {"verdict": "observed"},
        {"verdict": "refused"},
        {"verdict": "granted"},
        {"verdict": "granted", "acted": 512.0},
        {"verdict": "granted", "outcome": "kept"},
        {"verdict": "granted", "action": "Advise", "requested": "x"},
        {"verdict": "granted", "action": "SetSkipThreshold", "requested": 12.0},
        {"verdict": "undone"},
        {"verdict": "granted", "action": "RequestStop", "requested": "x"},
    ):
        alerts.decision(DecisionRecord(**RECORD | changes), diagnosis="because of it")
    alerts.close()
    assert server.titles() == [
        "[mindtune] action: SetLossScale", "[mindtune] undone: SetLossScale", "[mindtune] stop",
    ]  # fmt: skip
    assert server.posts[2]["message"].endswith("because of it")


def test_only_what_was_asked_for_is_told(server, tmp_path):
    alerts = open_section(tmp_path, on=["hang"])
    alerts.finding(finding(1))
    alerts.decision(DecisionRecord(**RECORD, verdict="granted"), diagnosis=None)
    alerts.finding(finding(2, Severity.CRITICAL, FindingKind.HANG))
    alerts.end(RunResult(outcome="ok", steps=2, wall_s=1.0))
    alerts.close()
    assert server.titles() == ["[mindtune] hang"]


@pytest.mark.parametrize(("on", "title"), [("findings,actions,stop,hang,end", "hang"),
                                           ("end", "end")])  # fmt: skip
def test_a_hang_that_ends_the_process_is_told_first(server, secret, tmp_path, on, title):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "hanging_session.py"), on],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert server.titles() == [f"[mindtune] {title}"], "one word about it, not two"
    message = server.posts[0]["message"]
    assert "in phase train after step 3" in message
    if title == "hang":
        assert "The process ends now, with exit code 3." in message
        assert f"Python stacks in {Path('hung') / 'stacks.txt'}" in message
    result = read_document(RunResult, tmp_path / "hung" / "result.json")
    assert (result.outcome, result.steps, result.findings) == ("crash", 3, {"hang": 1})
    assert "in never_ends" in (tmp_path / "hung" / "stacks.txt").read_text()
    assert files_with(tmp_path, secret) == []
    assert secret not in done.stdout + done.stderr


# Real trainings -------------------------------------------------------------------------------


def files_with(folder, secret):
    return [path for path in Path(folder).rglob("*") if secret.encode() in read(path)]


def read(path):
    return path.read_bytes() if path.is_file() else b""


@pytest.mark.mindspore
def test_a_crash_and_a_hang_of_real_trainings_are_told(server, dead_url, secret, tmp_path):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "ending_runs.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    assert "phases train train train save train save" in done.stdout
    assert "raised True" in done.stdout

    by_run = {"crashed": [], "hung": []}
    for post in server.posts:
        by_run["crashed" if "run crashed" in post["message"] else "hung"].append(post)
    assert {post["title"] for post in by_run["crashed"]} >= {
        "[mindtune] finding: non_finite_loss", "[mindtune] end",
    }  # fmt: skip
    end = next(post for post in by_run["crashed"] if post["title"] == "[mindtune] end")
    assert end["type"] == "failure"
    assert "step 4: the run is over: crash" in end["message"]
    assert "the storage is gone" in end["message"]

    (hang,) = by_run["hung"]
    assert hang["title"] == "[mindtune] hang"
    assert "in phase train after step 6 (limit 2 s)" in hang["message"]
    assert "The process ends now, with exit code 3." in hang["message"]
    result = read_document(RunResult, tmp_path / "hung" / "result.json")
    assert (result.outcome, result.steps, result.findings) == ("crash", 6, {"hang": 1})
    assert "no heartbeat for" in result.message
    stacks = (tmp_path / "hung" / "stacks.txt").read_text()
    assert "ending_runs.py" in stacks
    assert "in train" in stacks

    log = (tmp_path / "everything.log").read_text()
    assert log.count("an alert did not reach JSON at 127.0.0.1") == 2, "once per run"
    assert files_with(tmp_path, secret) == []
    assert secret not in done.stdout + done.stderr


# mindtune run ---------------------------------------------------------------------------------

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def best_config(tmp_path):
    def write(program, **sections):
        (tmp_path / "program.py").write_text(program)
        path = tmp_path / "best_config.yaml"
        content = {"schema": 1, "command": [sys.executable, str(tmp_path / "program.py")]}
        path.write_text(dump_yaml(content | sections))
        return path

    return write


@pytest.mark.parametrize(
    ("program", "code", "kind", "text"),
    [
        (KILLED, 3, "failure", "the run is over: crash, 0 actions\ncommand ended with code -9"),
        ("raise SystemExit(0)", 0, "success", "the run is over: ok, 0 actions"),
    ],
)
def test_a_program_that_cannot_tell_is_spoken_for(
    server, secret, tmp_path, caplog, best_config, program, code, kind, text
):
    caplog.set_level(logging.DEBUG)
    best = best_config(program, alerts={"urls": ["env:HOOK"]})
    assert run_best_config(best, tmp_path / "runs" / "killed") == code
    (post,) = server.posts
    assert (post["title"], post["type"]) == ("[mindtune] end", kind)
    assert post["message"].startswith("run killed on ")
    assert text in post["message"]
    assert files_with(tmp_path, secret) == []
    assert secret not in caplog.text


def test_alerts_of_a_run_with_planted_faults_say_so(server, tmp_path, best_config):
    fault = {"kind": "nan_loss", "first_step": 3}
    best = best_config(KILLED, alerts={"urls": ["env:HOOK"]}, faults=[fault])
    assert run_best_config(best, tmp_path / "run") == 3
    start = "NO REAL RUN, faults are planted on purpose: run run on "
    assert server.posts[0]["message"].startswith(start)


@pytest.mark.parametrize("url", ["slack://T0K3N/T0K3N/T0K3N", "env:NOT_SET_ANYWHERE"])
def test_alerts_that_cannot_be_sent_end_a_run_before_it_begins(tmp_path, best_config, url):
    best = best_config("raise SystemExit(0)", alerts={"urls": [url]})
    done = subprocess.run(
        [Path(sys.executable).parent / "mindtune", "run", str(best), "--out", str(tmp_path / "r")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "export " in done.stderr
    assert "T0K3N" not in done.stderr + done.stdout
    assert not (tmp_path / "r").exists()


def test_other_alerts_make_it_no_other_run(server, tmp_path, best_config):
    out = tmp_path / "run"
    assert run_best_config(best_config(KILLED), out) == 3
    best = best_config(KILLED, alerts={"urls": ["env:HOOK"]}, watchdog={"exit_on_hang": True})
    assert run_best_config(best, out) == 3
    assert server.titles() == ["[mindtune] end"]
    assert server.posts[0]["message"].startswith("run run on ")
    assert yaml.safe_load((out / "config.yaml").read_text()) == {}


# mindtune doctor ------------------------------------------------------------------------------


def doctor(*arguments):
    return subprocess.run(
        [Path(sys.executable).parent / "mindtune", "doctor", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_doctor_names_the_form_of_each_service_and_tries_an_address(server, secret):
    done = doctor("--json", "--send-test-alert", "env:HOOK")
    assert done.returncode == 0, done.stderr
    usable = {row["feature"]: row for row in yaml.safe_load(done.stdout)["usable"]}
    assert usable["alerts"]["ok"]
    assert "WeCom wecombot://KEY" in usable["alerts"]["why"]
    assert usable["test_alert"] == {
        "feature": "test_alert", "ok": True,
        "why": f"JSON at 127.0.0.1:{server.port} (env:HOOK) took a test alert",
    }  # fmt: skip
    assert server.titles() == ["[mindtune] test"]
    assert secret not in done.stdout + done.stderr


def test_doctor_says_that_an_address_does_not_answer(dead_url, secret):
    done = doctor("--send-test-alert", dead_url)
    assert done.returncode == 1
    assert "no connection" in " ".join(done.stdout.split())
    assert secret not in done.stdout + done.stderr
    refused = doctor("--send-test-alert", f"json://{secret}@127.0.0.1")
    assert refused.returncode == 2
    assert secret not in refused.stderr
