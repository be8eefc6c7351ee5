"""Start a command as a trial and wait for its end.

The command runs under a supervisor (see supervisor.py), so nothing of it is left when this
process dies, is interrupted, or when a deadline passes.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mindtune.controller.contract import ENV_MARK
from mindtune.controller.trials.commands import free_port, msrun_command, trial_environment
from mindtune.controller.trials.failure_text import read_tail
from mindtune.controller.trials.preflight import check_launcher, check_ranks
from mindtune.controller.trials.process_tree import end_processes, marked
from mindtune.controller.trials.protocol import SupervisorReport, SupervisorSpec
from mindtune.controller.trials.slurm import cancel_job, srun_command

__all__ = ["LaunchReport", "launch", "launch_logs", "starts_ranks"]

_POLL_S = 0.25
_SUPERVISOR_GRACE_S = 2.0
_LONGEST_MEETING_S = 1800.0
"""Longest time for the ranks to find together, where the launch itself has no limit."""
_RANK_DIR = "ranks"
_RANK_LEFTOVERS = (_RANK_DIR, "ranks.attempt1")
_LEFTOVERS = ("result*.json", "trial.json", "signals.csv", "decisions.jsonl",
              "model_signals.jsonl", "stdout.log", "stderr.log", *_RANK_LEFTOVERS)  # fmt: skip
"""A production run that goes on keeps its records."""
_RUN_FAILURE_GRACE_S = 60.0
"""Time for a production run that has recorded a failure or a policy's stop to end by itself."""
_STARTUP_FAILURES = (
    "Building networking for MS_SCHED failed",
    "The total number of timed out node",
    "Failed to init the tcp server",
)
"""What MindSpore's scheduler logs when the ranks did not find together: a machine too busy, or a
port that was taken in the meantime."""


@dataclass(frozen=True, kw_only=True)
class LaunchReport:
    """How a launch ended and where its logs are."""

    trial_dir: Path
    num_ranks: int
    supervised: SupervisorReport
    logs: dict[str, tuple[Path, ...]]
    """Name of a process as in `supervised.exit_codes` -> its logs, most telling first."""
    stop_reason: str | None = None
    """What `should_stop` gave; None: it did not stop the trial."""
    attempts: int = 1
    """2 if the ranks did not find together the first time."""


def launch(
    command: Sequence[str],
    *,
    trial_dir: Path,
    startup_deadline_s: float,
    deadline_s: float,
    num_ranks: int = 1,
    launcher: Literal["none", "msrun", "slurm"] = "none",
    ranks_per_node: int | None = None,
    env: Mapping[str, str] | None = None,
    hidden: Collection[str] = (),
    should_stop: Callable[[], str | None] | None = None,
    interrupt: threading.Event | None = None,
    stop_grace_s: float = 10.0,
    in_trial: bool = True,
) -> LaunchReport:
    """Run `command` in `trial_dir` until it ends or is ended.

    Records of an earlier launch in the same folder are removed first. Safe to call from several
    threads at once, in folders of their own. An exception or a Ctrl-C in here ends the whole
    tree before it goes on.

    Args:
        command: program and arguments, ready to run (see `resolve_command`).
        trial_dir: the trial's folder; the command's working directory.
        startup_deadline_s: longest time until the first progress, which is a line in signals.csv
            or a result.json. A trial that writes no signals.csv must end within this time.
        deadline_s: longest time from there to the end.
        num_ranks: ranks that msrun is to start; 1 starts the plain command.
        launcher: what to put in front of the command.
        ranks_per_node: ranks that Slurm is to start on each node; None: all on one.
        env: variables on top of this process's own.
        hidden: variables of this process that the command does not get, unless `env` has them.
        should_stop: asked four times a second; a text stops the trial for that reason (pruned).
        interrupt: ends the trial within 5 s once it is set (interrupted): Ctrl-C reaches the main
            thread alone, which sets it for launches in other threads.
        stop_grace_s: time between SIGTERM and SIGKILL in an ordinary stop.
        in_trial: whether the command is told that it is a trial; a production run is not.

    Raises:
        ConfigError: the launcher cannot be used.
    """
    check_launcher(launcher)
    check_ranks(launcher, num_ranks, ranks_per_node)
    trial_dir = trial_dir.resolve()
    trial_dir.mkdir(parents=True, exist_ok=True)
    _clear(trial_dir, _LEFTOVERS if in_trial else _RANK_LEFTOVERS)
    with_slurm = launcher == "slurm"
    with_ranks = starts_ranks(launcher, num_ranks)
    rank_dir = trial_dir / _RANK_DIR
    mark = f"{ENV_MARK}={uuid.uuid4().hex}"
    spec = SupervisorSpec(
        command=list(command),
        trial_dir=str(trial_dir),
        environment=trial_environment(
            env or {}, trial_dir=trial_dir if in_trial else None, mark=mark, hidden=hidden
        ),
        mark=mark,
        parent_pid=os.getpid(),
        startup_deadline_s=startup_deadline_s,
        deadline_s=deadline_s,
        rank_dir=str(rank_dir) if with_ranks else None,
        num_ranks=num_ranks,
        job_name=f"mindtune_{uuid.uuid4().hex[:12]}" if with_slurm else None,
        stop_grace_s=stop_grace_s,
        is_trial=in_trial,
    )
    if not in_trial:
        spec = replace(spec, failure_grace_s=_RUN_FAILURE_GRACE_S)
    if not with_ranks:
        supervised, reason = _run_supervisor(spec, should_stop, interrupt)
        return _report(spec, supervised, reason, attempts=1)

    def start(remaining_s: float) -> tuple[SupervisorReport, str | None]:
        rank_dir.mkdir(exist_ok=True)
        # Half of the time, so that a second attempt has a chance.
        meeting_s = min(remaining_s / 2, _LONGEST_MEETING_S)
        if spec.job_name is None:
            wrapped = msrun_command(
                command,
                num_ranks=num_ranks,
                rank_dir=rank_dir,
                port=free_port(),
                cluster_timeout_s=meeting_s,
            )
        else:
            wrapped = srun_command(
                command,
                num_ranks=num_ranks,
                ranks_per_node=ranks_per_node,
                rank_dir=rank_dir,
                port=free_port(),
                cluster_timeout_s=meeting_s,
                job_name=spec.job_name,
                time_limit_s=remaining_s + deadline_s,
            )
        return _run_supervisor(
            replace(spec, command=wrapped, startup_deadline_s=remaining_s),
            should_stop,
            interrupt,
        )

    supervised, reason = start(startup_deadline_s)
    remaining_s = startup_deadline_s - supervised.wall_s
    if remaining_s <= 0 or not _failed_to_meet(supervised, rank_dir / "scheduler.log"):
        return _report(spec, supervised, reason, attempts=1)
    first_dir = rank_dir.rename(trial_dir / "ranks.attempt1")
    for path in trial_dir.glob("result*.json"):
        path.rename(first_dir / path.name)
    again, reason = start(remaining_s)
    again = replace(again, wall_s=supervised.wall_s + again.wall_s)
    return _report(spec, again, reason, attempts=2)


def _clear(trial_dir: Path, patterns: Sequence[str]) -> None:
    """Remove what an earlier, interrupted launch left; it would be taken for this one's."""
    for pattern in patterns:
        for path in trial_dir.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _failed_to_meet(supervised: SupervisorReport, scheduler_log: Path) -> bool:
    """Tell whether the ranks did not find together though none of them had failed.

    A rank that dies makes the scheduler log the same lines, so the scheduler must have been the
    first to end.
    """
    own_exits = [name for name in supervised.own_exits if name != "command"]
    if own_exits[:1] != ["scheduler"] or (scheduler_log.parent.parent / "signals.csv").exists():
        return False
    log = read_tail(scheduler_log)
    return supervised.exit_codes["scheduler"] != 0 and any(
        line in log for line in _STARTUP_FAILURES
    )


def _report(
    spec: SupervisorSpec, supervised: SupervisorReport, reason: str | None, *, attempts: int
) -> LaunchReport:
    trial_dir = Path(spec.trial_dir)
    ranks = 0 if spec.rank_dir is None else spec.num_ranks
    return LaunchReport(
        trial_dir=trial_dir,
        num_ranks=spec.num_ranks,
        supervised=supervised,
        logs=launch_logs(trial_dir, ranks),
        stop_reason=reason,
        attempts=attempts,
    )


def launch_logs(trial_dir: Path, ranks: int) -> dict[str, tuple[Path, ...]]:
    """Return name of a process -> its logs, most telling first.

    Args:
        trial_dir: folder of the trial.
        ranks: those that the launcher starts; 0: it starts the plain command.
    """
    logs: dict[str, tuple[Path, ...]] = {}
    if ranks:
        rank_dir = trial_dir / _RANK_DIR
        logs = {f"rank{n}": (rank_dir / f"worker_{n}.log",) for n in range(ranks)}
        logs["scheduler"] = (rank_dir / "scheduler.log",)
    return {**logs, "command": (trial_dir / "stderr.log", trial_dir / "stdout.log")}


def starts_ranks(launcher: Literal["none", "msrun", "slurm"], num_ranks: int) -> bool:
    """Tell whether the launcher starts ranks, each with a log of its own."""
    return launcher == "slurm" or (launcher == "msrun" and num_ranks > 1)


def _run_supervisor(
    spec: SupervisorSpec,
    should_stop: Callable[[], str | None] | None,
    interrupt: threading.Event | None,
) -> tuple[SupervisorReport, str | None]:
    """Run one supervisor to its end; return its report and the reason of a stop."""
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "mindtune.controller.trials.supervisor"],
        # `-m` puts the working directory in front of the path: not the user's, whose files may
        # be called like modules of Python.
        cwd=spec.trial_dir,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C in a terminal reaches this process, which then tells the supervisor.
        start_new_session=True,
    )
    assert supervisor.stdin is not None  # noqa: S101 - opened by PIPE above
    assert supervisor.stdout is not None  # noqa: S101 - opened by PIPE above
    answer, reason = b"", None
    try:
        with contextlib.suppress(BrokenPipeError):
            supervisor.stdin.write(spec.to_line().encode() + b"\n")
            supervisor.stdin.flush()
        answer_fd = supervisor.stdout.fileno()
        while True:
            if select.select([answer_fd], [], [], _POLL_S)[0]:
                received = os.read(answer_fd, 1 << 16)
                if not received:
                    break
                answer += received
            elif interrupt is not None and interrupt.is_set():
                with contextlib.suppress(BrokenPipeError):
                    supervisor.stdin.close()
            elif reason is None and should_stop is not None:
                reason = should_stop()
                if reason is not None:
                    with contextlib.suppress(BrokenPipeError):
                        supervisor.stdin.write(b"stop\n")
                        supervisor.stdin.flush()
    finally:
        # End of file: the supervisor, if it is still there, ends the tree within 5 s.
        with contextlib.suppress(BrokenPipeError):
            supervisor.stdin.close()
        supervisor.wait()
        supervisor.stdout.close()
    if answer.endswith(b"\n"):
        report = SupervisorReport.from_line(answer.decode())
        return report, reason if report.ended_by == "stop" else None
    # The supervisor itself was killed: nobody else ends its tree.
    if spec.job_name is not None:
        cancel_job(spec.job_name)
    left = end_processes(lambda: marked(spec.mark), grace_s=_SUPERVISOR_GRACE_S)
    return (
        SupervisorReport(
            ended_by="terminated",
            processes_left=left,
            error=f"the trial's supervisor was ended with code {supervisor.returncode}",
        ),
        None,
    )
