"""One bad rank of four: all act at the same step with the same action, and know the slow rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.mindspore, pytest.mark.msrun]

SCRIPT = Path(__file__).with_name("ranks_four.py")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MINDTUNE_")
    }
    command = [
        str(Path(sys.executable).with_name("msrun")), "--worker_num=4", "--local_worker_num=4",
        f"--master_port={free_port()}", "--log_dir=logs", "--join=True", str(SCRIPT),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    logs = "".join(path.read_text(errors="replace")[-3000:] for path in folder.glob("logs/w*.log"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + logs
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


def test_a_nan_on_one_rank_makes_all_four_act_alike_in_that_step(ranks):
    first = ranks[0]
    # Written again once it is known what became of it.
    granted = [entry for entry in first["records"] if entry[-1] == "granted"]
    assert granted[:1] * len(granted) == granted
    assert granted[:1] == [[7, "loss_scale", "SetLossScale", 2.0**9, "granted"]]
    for other in ranks:
        assert other["records"] == first["records"]
        assert other["scale"] == 2.0**9
        assert other["weights"] == first["weights"]


@pytest.mark.parametrize(
    ("run", "steps", "rank"),
    [
        # A busy host, after the data is there and before the step's one graph; in steps 3 and 4.
        ("late", (4, 5), 2),
        # A rank that waits for data, at 0-based call 9: steps 10 to 12; told one step later.
        ("late", (11, 12), 3),
        # A rank that computes longer, in steps of two micro-batches; the first one compiles.
        ("slow", (3, 4, 5, 6), 1),
    ],
)
def test_every_rank_knows_the_slow_rank(ranks, run, steps, rank):
    for seen in ranks:
        assert seen[run] == ranks[0][run]
    told = {step: (slow, ratio) for step, slow, ratio in ranks[0][run]}
    for step in steps:
        slow, ratio = told[step]
        assert slow == rank
        assert ratio > 1.5
