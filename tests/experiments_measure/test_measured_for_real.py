"""Both experiments through their own programs, at a very small size."""

import os
import subprocess
import sys

import pytest

from mindtune.controller.contract import read_document
from mindtune.experiments.fault_injection.rows import read_rows
from mindtune.experiments.overhead.report import MEANINGS, OverheadReport

pytestmark = pytest.mark.mindspore


def run(module, arguments, cwd):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MINDTUNE_")
    }
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def test_two_faults_guarded_and_unguarded(tmp_path):
    arguments = ["--out", "out", "--faults", "healthy,loss_scale", "--seeds", "1", "--steps", "10"]
    done = run("mindtune.experiments.fault_injection", arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert len(rows) == 5
    healthy, watched = rows[("healthy", "guarded", 1)], rows[("healthy", "unguarded", 1)]
    assert healthy.actions == healthy.proposed == watched.actions == watched.proposed == {}
    assert healthy.validation_loss == watched.validation_loss
    guarded, fixed = rows[("loss_scale", "guarded", 1)], rows[("loss_scale", "unguarded", 1)]
    assert {found.samples for found in rows.values() if found.fault == "loss_scale"} == {80}
    # At the scale given every float16 gradient overflows, so nothing is learnt at all.
    assert fixed.updates_skipped == fixed.steps == 10
    assert fixed.actions == {}
    assert 1 <= guarded.updates_skipped < 10
    assert guarded.actions["SetLossScale"] >= 1
    assert guarded.validation_loss < fixed.validation_loss
    assert rows[("loss_scale", "dynamic", 1)].actions == {}
    again = run("mindtune.experiments.fault_injection", arguments, tmp_path)
    assert again.returncode == 0
    assert "row 1" not in again.stderr
    assert read_rows(tmp_path / "out" / "rows.jsonl") == rows


def test_overhead_of_two_rounds(tmp_path):
    arguments = ["--out", "out", "--rounds", "2", "--block", "2", "--layers", "1", "--batch", "1"]
    done = run("mindtune.experiments.overhead", arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    report = read_document(OverheadReport, tmp_path / "out" / "overhead.json")
    assert set(report.step_time_s) == set(MEANINGS)
    assert all(times.count == 4 for times in report.step_time_s.values())
    assert report.actions == 0
    assert report.decision_us.count == 4096
    assert 0.1 < report.over_checked["act"].median < 10
    assert (tmp_path / "out" / "overhead.md").read_text() in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "overhead.json",
        "overhead.md",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
