"""A guarded run that goes back, and the same run interrupted and resumed: one process per mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mindspore

HERE = Path(__file__).parent
STOPS = {
    # Before the split of the micro-batch; right after a spike; with a copy waiting to be proved; in
    # the burst of bad batches; right after a return.
    "graph": (3, 19, 42, 47, 49),
    "pynative": (20, 47),
}


@pytest.fixture(scope="module", params=["graph", "pynative"])
def seen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MINDTUNE_")
    }
    stops = STOPS[request.param]
    done = subprocess.run(
        [sys.executable, str(HERE / "single_rewind.py"), request.param, *map(str, stops)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads((folder / "seen.json").read_text(encoding="utf-8"))
    return found | {"stops": [str(stop) for stop in stops], "log": done.stderr}


def returns(run):
    return [entry for entry in run["decisions"] if entry["action"] == "Rewind"]


def test_a_burst_of_bad_batches_ends_in_a_return_to_a_healthy_state(seen):
    straight = seen["straight"]
    early, entry = returns(straight)
    # In the first steps a state is known to be good only before the first one.
    assert (early["step"], early["acted"]) == (21, 0)
    assert (entry["step"], entry["verdict"]) == (49, "granted")
    before = int(entry["acted"])
    assert 24 <= before < 45
    weights = straight["weights"]
    assert weights[49 - 1] == weights[before - 1] != weights[48 - 1]
    # The run goes on with the next data, and no step is counted twice.
    assert [row[0] for row in straight["rows"]] == [str(step) for step in range(1, 63)]
    assert all(loss != "nan" for loss in straight["losses"][49:])
    assert f"step 49: returned to the state of step {before}" in seen["log"]


def test_memory_and_disk_lead_to_the_same_run(seen):
    for name in ("losses", "weights", "decisions"):
        assert seen["memory"][name] == seen["straight"][name]
    assert len(seen["files"]) <= 4
    assert all(name.startswith("snapshot_rank0_") for name in seen["files"])


def test_in_observe_mode_nothing_is_copied(seen):
    assert seen["straight"]["copies"]
    assert seen["memory"]["copies"]
    assert not seen["observed"]["copies"]
    assert {entry["verdict"] for entry in returns(seen["observed"])} <= {"observed"}


def test_a_run_interrupted_at_any_step_decides_as_the_uninterrupted_one(seen):
    straight = seen["straight"]
    policies = {entry["policy"] for entry in straight["decisions"]}
    assert {"gradient_norm", "rewind"} <= policies
    for stop in seen["stops"]:
        resumed, after = seen[stop], int(stop)
        assert resumed["losses"] == straight["losses"][after:], stop
        assert resumed["weights"] == straight["weights"][after:], stop
        assert resumed["decisions"] == straight["decisions"], stop
        assert resumed["rows"][-len(resumed["losses"]) :] == straight["rows"][after:], stop


def test_the_split_of_the_micro_batch_survives_the_interruption(seen):
    rows = seen[seen["stops"][-1]]["rows"]
    assert {tuple(row[-3:]) for row in rows[-5:]} == {("4", "2", "8")}
