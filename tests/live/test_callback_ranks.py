"""TuneCallback on two ranks: one set of records, equal decisions."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.mindspore, pytest.mark.msrun]

HERE = Path(__file__).parent


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    beside = Path(sys.executable).with_name("msrun")
    msrun = str(beside) if beside.exists() else shutil.which("msrun")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MINDTUNE_")
    }
    command = [
        msrun, "--worker_num", "2", "--local_worker_num", "2", "--master_port", str(free_port()),
        "--log_dir", "logs", "--join", "True", str(HERE / "ranks_callback.py"),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=folder,
        env={
            **environment,
            "NOBODY_LISTENS": "json://127.0.0.1:9",
            "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    logs = "".join(path.read_text(errors="replace")[-4000:] for path in folder.glob("logs/w*.log"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + logs
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_only_rank_0_tells_people(ranks):
    assert [seen["run"]["tells"] for seen in ranks] == [True, False]


def test_both_ranks_decide_and_act_alike(ranks):
    first, second = (seen["run"] for seen in ranks)
    assert first["scales"] == second["scales"]
    assert first["engine"] == second["engine"]
    assert first["actions"] == second["actions"] > 0
    assert len(set(first["scales"])) > 1
    assert first["weights"] == second["weights"]


def test_only_rank_0_writes(ranks):
    assert ranks[0]["run"]["out_dir"] == "run"
    assert ranks[1]["run"]["out_dir"] == "None"
    rows = ranks[0]["rows"]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert {row["global_batch_size"] for row in rows} == {16}
    assert {row["tokens"] for row in rows} == {64}


def test_rank_0_records_what_only_rank_1_saw(ranks):
    rows = ranks[0]["rows"]
    # The loss is the mean over both ranks, and only rank 1 has spoiled targets.
    assert rows[30]["loss"] > 1000
    # Rank 1 waited before step 20; times travel with the next step.
    assert rows[20]["data_time_s"] > 0.45
    assert rows[20]["step_time_s"] > 0.45
    assert all(row["data_time_s"] < 0.45 for row in rows[21:])


def test_times_of_the_first_step_come_with_the_second(ranks):
    rows = ranks[0]["rows"]
    assert [row["phase"] for row in rows[:4]] == ["compile", "compile", "train", "train"]
    assert rows[0]["step_time_s"] is None
    assert rows[1]["step_time_s"] > rows[2]["step_time_s"] > 0


def test_a_trial_reports_the_slowest_ranks_times(ranks):
    result = ranks[0]["trial_result"]
    assert result["outcome"] == "ok"
    assert len(result["loss"]) == 3
    assert len(result["step_time_s"]) == 3
    # Step 20 is the first measured one, in which rank 1 waits; rank 0 writes the result.
    assert result["step_time_s"][0] > 0.45
    assert (result["effective"]["data_parallel"], result["samples_per_step"]) == (2, 16)
    assert ranks[0]["trial_files"] == [
        "conditions.json", "decisions.jsonl", "knobs.yaml", "result.json", "signals.csv", "state",
    ]  # fmt: skip
    assert len(ranks[0]["trial"]["scales"]) == len(ranks[1]["trial"]["scales"]) == 22


def test_a_foreign_step_on_several_ranks_only_observes(ranks):
    assert [seen["foreign"]["actions"] for seen in ranks] == [0, 0]
    advice = {entry["requested"]: entry["reason"] for entry in ranks[0]["foreign_decisions"]}
    assert "could decide differently" in advice["ranks_not_agreed"]


def test_all_ranks_resume_from_one_state_or_none_does(ranks):
    first, second = (seen["resumed"] for seen in ranks)
    assert first == second
    assert first["step"] == 63
    assert first["knobs"]["learning_rate_scale"] == ranks[0]["run"]["scales"][-1] < 1
    assert [seen["apart"]["step"] for seen in ranks] == [3, 3]
