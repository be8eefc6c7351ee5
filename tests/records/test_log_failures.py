"""A log that ends in a failure says so: memory that ran out, a hang, any other error."""

import json

import pytest

from mindtune.controller.cli.app import main
from mindtune.controller.contract import ReplayOutput, parse
from mindtune.controller.records.log_readers.endings import failure_in

TRACEBACK = """Traceback (most recent call last):
  File "pretrain_gpt.py", line 118, in <module>
    pretrain(train_valid_test_datasets_provider, model_provider)
"""
TORCH_OOM = (
    TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
    " a total capacity of 79.15 GiB of which 1.12 GiB is free.\n"
)
MINDSPORE_OOM = TRACEBACK + "RuntimeError: Allocate memory failed\n"
NCCL = (
    "[rank3]:[E1130 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=8113, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds\n"
    + TRACEBACK
    + "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.\n"
)
KILLED = "slurmstepd: error: Detected 1 oom_kill event in StepId=417.0.\n"
BUG = TRACEBACK + "KeyError: 'input_ids'\n"


def steps(first, count):
    return "".join(
        f"iter {step}: loss {4 - 0.01 * step + 0.02 * (step % 3):.4f}, time 512.30ms, mfu 31.20%\n"
        for step in range(first, first + count)
    )


def replayed(path, text, capsys, *arguments):
    path.write_text(text)
    assert main(["replay", str(path), "--json", *arguments]) == 0
    return parse(ReplayOutput, json.loads(capsys.readouterr().out), source="replay")


@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        (TORCH_OOM, "memory_pressure", "CUDA out of memory"),
        (MINDSPORE_OOM, "memory_pressure", "Allocate memory failed"),
        (KILLED, "memory_pressure", "oom_kill event"),
        (NCCL, "hang", "Watchdog caught"),
    ],
)
def test_a_run_that_lost_its_memory_or_stood_still_is_faulty(tmp_path, capsys, end, kind, words):
    found = replayed(tmp_path / "train.log", steps(1, 60) + end, capsys)
    assert found.verdict == "faulty"
    assert [(one.step, one.kind, one.severity) for one in found.findings] == [
        (60, kind, "critical")
    ]
    assert found.diagnoses
    assert any("after step 60" in note and words in note for note in found.notes)


def test_any_other_error_is_told_and_judges_no_training(tmp_path, capsys):
    found = replayed(tmp_path / "train.log", steps(1, 60) + BUG, capsys)
    assert (found.verdict, found.findings) == ("healthy", [])
    told = [note for note in found.notes if "after step 60" in note]
    assert len(told) == 1
    assert "KeyError: 'input_ids'" in told[0]
    assert main(["replay", str(tmp_path / "train.log")]) == 0
    assert "KeyError: 'input_ids'" in capsys.readouterr().out


@pytest.mark.parametrize("end", [TORCH_OOM, NCCL, BUG])
def test_a_failure_that_the_run_survived_is_none(tmp_path, capsys, end):
    found = replayed(tmp_path / "train.log", steps(1, 60) + end + steps(61, 20), capsys)
    assert (found.verdict, found.findings, found.steps) == ("healthy", [], 80)
    assert not any("the log ends after step" in note for note in found.notes)


@pytest.mark.parametrize(
    "line",
    [
        "Training finished, no errors.",
        "saving checkpoint at iteration 60 to /checkpoints",
        "hint: to avoid running out of memory, lower the batch size",
        "Exception handling is on",
        "0 error(s), 0 warnings",
    ],
)
def test_ordinary_last_words_are_no_failure(tmp_path, capsys, line):
    assert failure_in(line, None) is None
    found = replayed(tmp_path / "train.log", steps(1, 60) + line + "\n", capsys)
    assert (found.verdict, found.findings) == ("healthy", [])


def test_the_cause_stands_before_what_comes_of_it():
    known = None
    for line in NCCL.splitlines():
        known = failure_in(line, known)
    assert known.kind == "hang"
    for line in TORCH_OOM.splitlines():
        known = failure_in(line, known)
    assert known.kind == "oom"
    for line in (*BUG.splitlines(), *NCCL.splitlines()):
        assert failure_in(line, known) == known


def test_one_rank_without_memory_explains_the_others(tmp_path, capsys):
    for rank, end in enumerate((BUG, TORCH_OOM, NCCL)):
        (tmp_path / f"worker_{rank}.log").write_text(steps(1, 60) + end)
    paths = [str(tmp_path / f"worker_{rank}.log") for rank in range(3)]
    assert main(["replay", *paths, "--json"]) == 0
    found = parse(ReplayOutput, json.loads(capsys.readouterr().out), source="replay")
    assert found.verdict == "faulty"
    assert [one.kind for one in found.findings] == ["memory_pressure"]
