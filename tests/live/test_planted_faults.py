"""Every kind of fault in real trainings: it acts in its steps, as what it claims to be."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mindspore

HERE = Path(__file__).parent


def run(folder, mode, *scenarios):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MINDTUNE_")
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "single_faults.py"), mode, *scenarios],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "seen.json").read_text()) | {"log": done.stderr}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph")
    return run(folder, "graph", "numeric", "around", "full", "refused", "loop", "half")


@pytest.fixture(scope="module")
def pynative(tmp_path_factory):
    return run(tmp_path_factory.mktemp("pynative"), "pynative", "numeric")


@pytest.fixture(params=["graph", "pynative"])
def numeric(request):
    """Rows by step, of the run with the faults and of the one without."""
    seen = request.getfixturevalue(request.param)["numeric"]
    return [{row["step"]: row for row in seen[name]["rows"]} for name in ("planted", "calm")]


def test_before_the_first_fault_every_bit_is_that_of_a_run_without_a_plan(numeric):
    planted, calm = numeric
    for step in range(1, 6):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert planted[step][name] == calm[step][name], (step, name)


def test_spikes_scale_what_they_name_in_their_steps_alone(numeric):
    planted, calm = numeric
    # The weights are still those of the calm run.
    assert planted[6]["loss"] == pytest.approx(50 * calm[6]["loss"], rel=1e-5)
    assert planted[6]["grad_norm"] == pytest.approx(50 * calm[6]["grad_norm"], rel=1e-5)
    assert [planted[step]["loss"] > 15 for step in (7, 8, 9, 10)] == [False, True, True, False]
    assert [planted[step]["grad_norm"] > 50 for step in range(6, 13)] == [
        True, False, True, False, True, True, False,
    ]  # fmt: skip


def test_nan_in_the_loss_or_in_one_gradient_skips_that_update_and_no_other(numeric):
    planted, _ = numeric
    assert planted[13]["loss"] == planted[13]["grad_norm"] == "nan"
    assert math.isfinite(planted[15]["loss"])
    assert (planted[15]["grad_norm"], planted[16]["grad_norm"]) == ("nan", "inf")
    skipped = [step for step, row in planted.items() if row["update_skipped"]]
    assert skipped == [13, 15, 16, 30, 35, 36]


def test_shift_drift_and_poison_change_the_norm_by_their_factor(numeric):
    planted, calm = numeric
    ratio = {step: planted[step]["grad_norm"] / calm[step]["grad_norm"] for step in range(18, 27)}
    assert planted[25]["grad_norm"] > 3000
    assert planted[25]["loss"] > 1000
    assert planted[26]["grad_norm"] < 50
    # Factors of 2, 4 and 8 on norms that scatter by less than 4 themselves.
    assert ratio[21] < ratio[22] < ratio[23]
    assert ratio[20] < 2 < ratio[18]


def test_a_jump_of_the_learning_rate_acts_below_the_policies_own_scale(numeric):
    planted, calm = numeric
    for step in (26, 27, 28, 29):
        factor = 10.0 if step in (27, 28) else 1.0
        # Skipped updates do not move the schedule, which falls by less than 1 % in all these steps.
        assert planted[step]["learning_rate"] == pytest.approx(
            factor * calm[step]["learning_rate"], rel=0.01
        )
        assert planted[step]["learning_rate_scale"] == 1.0


def test_a_storm_ends_at_the_scale_that_it_allows_or_never(numeric):
    planted, _ = numeric
    scales = {step: planted[step]["loss_scale"] for step in range(30, 38)}
    assert [scales[step] for step in (30, 31, 33)] == [8.0, 4.0, 4.0]
    assert [planted[step]["overflow"] for step in range(30, 38)] == [1, 0, 0, 0, 0, 1, 1, 0]
    assert all(math.isfinite(planted[step]["loss"]) for step in (30, 35, 36))


def test_a_run_with_faults_says_so_wherever_it_is_looked_at(graph):
    planted, calm = (graph["numeric"][name] for name in ("planted", "calm"))
    assert len(planted["result"]["planted_faults"]) == 12
    assert planted["files"] == sorted([*calm["files"], "faults.yaml"])
    first = planted["decisions"][0]
    assert (first["policy"], first["requested"]) == ("sensors", "planted_faults")
    assert "This is no real run: faults are planted on purpose (spike from step 6" in graph["log"]
    assert "step 13: planted nan_loss begins" in graph["log"]
    assert calm["result"]["planted_faults"] == []
    assert planted["hooks"] == calm["hooks"] == 0


def test_a_plain_rate_jumps_and_comes_back(graph):
    rates = [row["learning_rate"] for row in graph["around"]["rows"][:6]]
    assert rates == pytest.approx([0.05, 0.05, 0.5, 0.5, 0.05, 0.05])


def test_waits_are_measured_as_what_they_are(graph):
    rows = {row["step"]: row for row in graph["around"]["rows"]}
    slow_data, slow_rank, hang = (4, 5), (8, 9), (12,)
    for step in slow_data:
        # Once a step, though it has two micro-batches.
        assert 0.4 <= rows[step]["data_time_s"] <= rows[step]["step_time_s"] < 0.8
    for step in (*slow_rank, *hang):
        assert rows[step]["data_time_s"] < 0.3
        assert rows[step]["step_time_s"] >= 0.4
    assert rows[12]["step_time_s"] >= 0.8


def test_readings_are_those_of_the_plan(graph):
    rows = {row["step"]: row for row in graph["around"]["rows"]}
    assert [step for step, row in rows.items() if row["device_utilization"] == 0.02] == [6, 7]
    assert {row["device_memory_total_bytes"] for row in rows.values()} == {4 * 2**30}
    used = [rows[step]["device_memory_used_bytes"] for step in range(4, 10)]
    grown = [later - earlier for earlier, later in itertools.pairwise(used)]
    assert grown == [8 * 2**20] * 4 + [0]


def test_a_full_device_ends_the_run_as_one(graph):
    seen = graph["full"]
    assert "do not fit into the device of 1.0 GB" in seen["error"]
    assert (seen["result"]["outcome"], seen["result"]["steps"]) == ("oom", 3)
    assert seen["result"]["peak_memory_bytes"] < 1.4 * 2**30


def test_what_a_run_cannot_have_is_refused_before_anything_is_written(graph):
    seen = graph["refused"]
    assert "below the number of ranks = 1, but got 1" in seen["rank"]["error"]
    assert "must be 0..3 or the name of a weight" in seen["name"]["error"]
    assert "at most the" in seen["memory"]["error"]
    assert "wrap the network in mindtune.controller.TrainStep" in seen["foreign"]["error"]
    assert seen["left"] == []


def test_a_hand_written_loop_has_them_too(graph):
    rows = {row["step"]: row for row in graph["loop"]["rows"]}
    assert rows[3]["grad_norm"] == "nan"
    assert math.isfinite(rows[3]["loss"])
    assert rows[5]["data_time_s"] >= 0.3
    assert len(graph["loop"]["result"]["planted_faults"]) == 2


def test_a_gradient_in_bfloat16_is_poisoned_and_stays_one(graph):
    assert graph["half"]["type"] == "BFloat16"
    assert graph["half"]["norm"] == pytest.approx(200, rel=0.01)
