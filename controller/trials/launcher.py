"""Start a command as a trial and wait for its end.

The command runs under a supervisor on each host (see supervisors.py), so nothing of it is left
when this process dies, is interrupted, or when a deadline passes.
"""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mindtune.controller.contract import ENV_MARK
from mindtune.controller.trials.commands import free_port, msrun_command, trial_environment
from mindtune.controller.trials.failure_text import read_tail
from mindtune.controller.trials.hosts import Hosts, shared_mark
from mindtune.controller.trials.preflight import check_launcher, check_ranks
from mindtune.controller.trials.protocol import SupervisorReport, SupervisorSpec
from mindtune.controller.trials.slurm import num_nodes, srun_command
from mindtune.controller.trials.supervisors import Supervised, run_supervisors

__all__ = ["LaunchReport", "launch", "launch_logs", "starts_ranks"]

_SILENCE_LIMIT_S = 300.0
"""After which another host takes this process for gone, as members of a study do (crew.py)."""
_LONGEST_MEETING_S = 1800.0
"""Longest time for the ranks to find together, where the launch itself has no limit."""
_RANK_DIR = "ranks"
_RANK_LEFTOVERS = (_RANK_DIR, "ranks.attempt1")
_RESULTS = ("result.json", "result.rank*.json")
"""What ranks leave of a launch. Not result*.json: a run keeps the results of its segments."""
_LEFTOVERS = ("result*.json", "trial.json", "signals.csv", "decisions.jsonl",
              "model_signals.jsonl", "stdout.log", "stderr.log", *_RANK_LEFTOVERS)  # fmt: skip
"""A production run that goes on keeps its records."""
_RUN_FAILURE_GRACE_S = 60.0
"""Time for a production run that has recorded a failure to end by itself."""
_STARTUP_FAILURES = (
    "Building networking for MS_SCHED failed",
    "The total number of timed out node",
    "Failed to init the tcp server",
)
"""What MindSpore's scheduler logs when the ranks did not find together: a machine too busy, or a
port that was taken in the meantime."""
_MEETING_GIVEN_UP = "Failed to initialize distributed job cluster"
"""What a rank says that has waited for the others in vain."""


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
    hosts: Hosts | None = None,
    device: str = "cpu",
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
        ranks_per_node: ranks that Slurm, or msrun on `hosts`, is to start on each node; None: all
            on one.
        hosts: where msrun's ranks run if one node has not room for them; None: all here.
        device: `cluster.device` of the study, which the nodes that Slurm gives are asked for.
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
    check_ranks(launcher, num_ranks, ranks_per_node, num_hosts=len(hosts.names) if hosts else 1)
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
        supervised, reason = run_supervisors([Supervised(spec=spec)], should_stop, interrupt)
        return _report(spec, supervised, reason, attempts=1)
    nodes = num_nodes(num_ranks, ranks_per_node)

    def start(remaining_s: float) -> tuple[SupervisorReport, str | None]:
        rank_dir.mkdir(exist_ok=True)
        now = replace(spec, startup_deadline_s=remaining_s)
        common: dict[str, Any] = {
            "num_ranks": num_ranks,
            "rank_dir": rank_dir,
            "port": free_port(),
            # Half of the time, so that a second attempt has a chance.
            "cluster_timeout_s": min(remaining_s / 2, _LONGEST_MEETING_S),
        }
        if spec.job_name is not None:
            limit_s = remaining_s + deadline_s
            wrapped = srun_command(
                command, ranks_per_node=ranks_per_node, job_name=spec.job_name,
                time_limit_s=limit_s, device=device, environ=spec.environment, **common,
            )  # fmt: skip
            launches = [Supervised(spec=replace(now, command=wrapped))]
            return run_supervisors(launches, should_stop, interrupt)
        if hosts is None or nodes == 1:
            launches = [Supervised(spec=replace(now, command=msrun_command(command, **common)))]
            return run_supervisors(launches, should_stop, interrupt)
        with shared_mark(rank_dir) as shared:
            launches = [
                _on_host(
                    replace(
                        now,
                        command=msrun_command(
                            command, local_ranks=num_ranks // nodes, master=hosts.master,
                            node=node, **common,
                        ),
                    ),
                    hosts, node, shared,
                )
                for node in range(nodes)
            ]  # fmt: skip
            return run_supervisors(launches, should_stop, interrupt)

    recorded = _recorded_bytes(trial_dir)
    supervised, reason = start(startup_deadline_s)
    remaining_s = startup_deadline_s - supervised.wall_s
    if remaining_s <= 0 or not _failed_to_meet(supervised, rank_dir, recorded=recorded):
        return _report(spec, supervised, reason, attempts=1)
    _set_attempt_aside(rank_dir)
    again, reason = start(remaining_s)
    again = replace(again, wall_s=supervised.wall_s + again.wall_s)
    return _report(spec, again, reason, attempts=2)


def _on_host(spec: SupervisorSpec, hosts: Hosts, node: int, shared: Path) -> Supervised:
    """Return the launch of one node's msrun: under a supervisor here, or on another host."""
    if node == 0:
        return Supervised(spec=spec)
    # Two names may stand for one machine: each supervisor ends the processes of its own mark.
    name, _, value = spec.mark.partition("=")
    own_mark = f"{value}.node{node}"
    there = replace(
        spec,
        environment={**spec.environment, name: own_mark},
        mark=f"{name}={own_mark}",
        parent_pid=None,
        is_trial=False,
        output=f"{_RANK_DIR}/node_{node}.out.log",
        errors=f"{_RANK_DIR}/node_{node}.err.log",
        silence_limit_s=_SILENCE_LIMIT_S,
    )
    module = ["mindtune.controller.trials.supervisor"]
    folder = Path(spec.trial_dir)
    return Supervised(
        spec=there,
        host=hosts.names[node],
        link=tuple(hosts.command(node, module, folder=folder, mark=shared)),
        log=folder / _RANK_DIR / f"node_{node}.shell.log",
    )


def _clear(trial_dir: Path, patterns: Sequence[str]) -> None:
    """Remove what an earlier, interrupted launch left; it would be taken for this one's."""
    for pattern in patterns:
        for path in trial_dir.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _recorded_bytes(trial_dir: Path) -> int | None:
    """Return the size of the table of steps, which a run that goes on has; None: there is none."""
    try:
        return (trial_dir / "signals.csv").stat().st_size
    except OSError:
        return None


def _set_attempt_aside(rank_dir: Path) -> None:
    """Keep logs and results of the ranks' first attempt; what earlier segments left stays."""
    first_dir = rank_dir.rename(rank_dir.with_name("ranks.attempt1"))
    for pattern in _RESULTS:
        for path in rank_dir.parent.glob(pattern):
            path.rename(first_dir / path.name)


def _failed_to_meet(
    supervised: SupervisorReport, rank_dir: Path, *, recorded: int | None = None
) -> bool:
    """Tell whether the ranks did not find together though none of them had failed.

    A rank that dies makes the scheduler log the same lines, and then the others, so the first to
    end must have been the scheduler, or a rank that gave up waiting as the scheduler did.

    Args:
        supervised: how the launch ended.
        rank_dir: where the ranks' logs are.
        recorded: size of the table of steps before it; None: there was none.
    """
    own_exits = [name for name in supervised.own_exits if name != "command"]
    if not own_exits or _recorded_bytes(rank_dir.parent) != recorded:
        return False
    first = own_exits[0]
    if first != "scheduler":
        own_log = rank_dir / f"worker_{first.removeprefix('rank')}.log"
        if _MEETING_GIVEN_UP not in read_tail(own_log):
            return False
    log = read_tail(rank_dir / "scheduler.log")
    return supervised.exit_codes.get("scheduler") != 0 and any(
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
    elsewhere = sorted((trial_dir / _RANK_DIR).glob("node_*.???.log")) if ranks else []
    return {**logs, "command": (trial_dir / "stderr.log", trial_dir / "stdout.log", *elsewhere)}


def starts_ranks(launcher: Literal["none", "msrun", "slurm"], num_ranks: int) -> bool:
    """Tell whether the launcher starts ranks, each with a log of its own."""
    return launcher == "slurm" or (launcher == "msrun" and num_ranks > 1)
