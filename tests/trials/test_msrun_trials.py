"""Two real ranks under msrun."""

import socket
import sys
from pathlib import Path

import pytest

from mindtune.controller.contract import KnobsFile, TrialPlan, write_yaml
from mindtune.controller.trials import launcher
from mindtune.controller.trials.launcher import launch
from mindtune.controller.trials.outcome import record_outcome
from mindtune.controller.trials.process_tree import marked

pytestmark = [pytest.mark.mindspore, pytest.mark.msrun]


def run(folder, how):
    trial_dir = folder / "a trial"
    plan = TrialPlan(number=0, warmup_steps=0, measure_steps=1, deadline_s=60)
    write_yaml(trial_dir / "knobs.yaml", KnobsFile(knobs={"data_parallel": 2}, trial=plan))
    program = Path(__file__).with_name("rank_program.py")
    report = launch(
        [sys.executable, str(program), how],
        trial_dir=trial_dir,
        startup_deadline_s=150,
        deadline_s=60,
        num_ranks=2,
        launcher="msrun",
    )
    assert report.supervised.processes_left == 0
    assert not marked(f"MINDTUNE_TRIAL_DIR={trial_dir}")
    return report, record_outcome(report, knobs={"data_parallel": 2})


def test_a_rank_that_raises_ends_the_trial_long_before_msrun_does(tmp_path):
    report, outcome = run(tmp_path, "raise")
    assert outcome.record.outcome == "crash"
    assert outcome.record.message == "rank 1: ValueError: rank 1 fails\non purpose"
    assert report.supervised.ended_by == "rank_failed"
    failed_at = (tmp_path / "a trial" / "result.rank1.json").stat().st_mtime
    ended_at = (tmp_path / "a trial" / "trial.json").stat().st_mtime
    # msrun itself comes back 29 - 37 s after a rank's exception.
    assert ended_at - failed_at < 15.0
    assert outcome.record.memory_source == "rss"
    assert report.attempts == 1


def test_ranks_that_do_not_meet_start_again_and_the_worst_ranks_memory_counts(
    tmp_path, monkeypatch
):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        ports = [launcher.free_port(), held.getsockname()[1]]
        monkeypatch.setattr(launcher, "free_port", ports.pop)
        report, outcome = run(tmp_path, "succeed")
    assert report.attempts == 2
    assert outcome.record.outcome == "ok"
    assert outcome.result.loss == 4.0
    assert outcome.record.exit_codes["rank0"] == 0
    assert outcome.record.exit_codes["rank1"] == 0
    # Rank 1 holds two blocks of 32 MiB at once, rank 0 two of 4 MiB.
    assert outcome.record.memory_source == "pool"
    assert 64 << 20 <= outcome.record.peak_memory_bytes < 80 << 20
