"""Optuna's dashboard, started as users do, opens the storage of a study."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mindtune.controller.trials.study_runner import run_study

PROGRAM = shutil.which("optuna-dashboard") or str(
    Path(sys.executable).with_name("optuna-dashboard")
)


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/{path}", timeout=10) as answer:
        return json.load(answer)


@pytest.mark.parametrize(
    "backend", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
)
def test_the_dashboard_shows_trials_knobs_and_values(tiny, backend, request, monkeypatch):
    url = f"sqlite:///{tiny.out / 'study.db'}"
    name = f"board_{backend}"
    tiny.write(
        trial={"repeats": 1},
        study={"trials": 4, "name": name},
        space={"micro_batch_size": [1, 4], "recompute": ["none", "full"]},
        behaviour={"1-none": "oom"},
    )
    if backend == "postgres":
        url = request.getfixturevalue("postgres_url")
        monkeypatch.setenv("STUDY_DATABASE", url)
        run_study(tiny.study_file, tiny.out, storage="env:STUDY_DATABASE")
    else:
        run_study(tiny.study_file, tiny.out)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dashboard = subprocess.Popen(
        [PROGRAM, "--host", "127.0.0.1", "--port", str(port), url],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while True:
            try:
                studies = get(port, "studies")["study_summaries"]
                break
            except urllib.error.URLError:
                assert dashboard.poll() is None
                assert time.monotonic() < end, "the dashboard does not answer"
                time.sleep(0.1)
        number = next(study["study_id"] for study in studies if study["study_name"] == name)
        study = get(port, f"studies/{number}")
    finally:
        dashboard.terminate()
        dashboard.wait(10)
    trials = study["trials"]
    params = [{p["name"]: p["param_external_value"] for p in trial["params"]} for trial in trials]
    shown = {
        (own["micro_batch_size"], own["recompute"]): (trial["state"], trial.get("values"))
        for own, trial in zip(params, trials, strict=True)
    }
    assert shown[("1", "full")] == ("Complete", [1.0])
    assert shown[("4", "none")] == ("Complete", [pytest.approx(3.25)])
    assert shown[("1", "none")][0] == "Pruned"
    attributes = [{a["key"]: a["value"] for a in trial["user_attrs"]} for trial in trials]
    assert "step_time_s" in attributes[0]
    assert {entry["outcome"] for entry in attributes} == {"ok", "oom"}
    assert "sesame" not in json.dumps(study)
