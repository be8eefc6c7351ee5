"""Both experiments through their own programs, at a very small size."""

import os
import subprocess
import sys

import pytest

from mindtune.controller.contract import read_document
from mindtune.experiments.fault_injection.rows import read_rows
from mindtune.experiments.overhead.report import MEANINGS, OverheadReport
from mindtune.experiments.overhead.signal_report import SIGNALS

pytestmark = pytest.mark.mindspore


def run(module, arguments, cwd):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MINDTUNE_")
    }
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def test_one_seed_of_three_faults(tmp_path):
    """A fault in the gradients, one that no scale cures, and one that only a watchdog sees."""
    arguments = ["--out", "out", "--seeds", "1", "--steps", "20", "--guards", "guarded"]
    chosen = [*arguments, "--faults", "nan_gradient,overflow_storm,hang"]
    done = run("mindtune.experiments.fault_injection", chosen, tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert [key[0] for key in rows] == ["nan_gradient", "overflow_storm", "hang"]
    nan, storm, hang = rows.values()
    assert all(row.detection_delay == 0 for row in rows.values())
    assert all(row.false_actions == {} for row in rows.values())
    assert (nan.outcome, nan.updates_skipped, nan.steps_above) == ("ok", 1, 0)
    assert nan.validation_loss < 5.2
    # From 1024 down to 16; halving would take 6 updates.
    assert storm.outcome == "ok"
    assert 1 <= storm.updates_skipped <= 6
    assert storm.actions["SetLossScale"] >= 1
    assert (hang.outcome, hang.steps, hang.findings["hang"]) == ("crash", 9, 1)
    stacks = tmp_path / "out" / "runs" / "hang-guarded-1" / "run" / "stacks.txt"
    assert "enter_step" in stacks.read_text()
    again = run("mindtune.experiments.fault_injection", chosen, tmp_path)
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
    assert set(report.signals) == set(SIGNALS)
    assert report.signals["loss"].host_ms.count == 6
    # The thread reads the device; the step takes what is there.
    assert report.signals["device"].host_ms.median < 0.1 * report.step_time_s["bare"].median * 1e3
    assert 0.1 < report.over_checked["act"].median < 10
    assert (tmp_path / "out" / "overhead.md").read_text() in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "overhead.json",
        "overhead.md",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
