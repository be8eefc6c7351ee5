"""Put Slurm in front of a command: srun waits for devices, starts one process per node, and ends.

Theory of operation. srun is started in the foreground, under the supervisor as any command. It
runs `slurm_node` once per node, which starts that node's ranks. Inside an allocation (sbatch,
salloc) the trial is a step of it, else a job. It bears a name of its own, by which it is
cancelled: killing srun alone may leave it running. Partition, account, devices and cores are the
user's own, by srun's variables (SLURM_PARTITION, SLURM_ACCOUNT, SLURM_GRES, SRUN_CPUS_PER_TASK
...). The trial's folder has to be on a file system that all nodes share. Standard library only:
the supervisor cancels too.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["cancel_job", "cancellation", "num_nodes", "srun_command"]

_ANSWER_S = 3.0
"""Longest wait for Slurm's controller where a tree has to be over within 5 s."""


def num_nodes(num_ranks: int, ranks_per_node: int | None) -> int:
    """Return on how many nodes the ranks run; None: all on one."""
    return math.ceil(num_ranks / (ranks_per_node or num_ranks))


def srun_command(
    command: Sequence[str],
    *,
    num_ranks: int,
    ranks_per_node: int | None,
    rank_dir: Path,
    port: int,
    cluster_timeout_s: float,
    job_name: str,
    time_limit_s: float,
    device: str,
    environ: Mapping[str, str],
) -> list[str]:
    """Return `command` under srun.

    Args:
        command: program and arguments, ready to run.
        num_ranks: ranks in all.
        ranks_per_node: ranks of each node, where there are several; None: all are on one.
        rank_dir: where logs and exit files of the ranks appear.
        port: TCP port of msrun's scheduler on the first node.
        cluster_timeout_s: longest time for the ranks to find together.
        job_name: name that the job is cancelled by.
        time_limit_s: Slurm ends the job after it, whatever becomes of this machine; inf: never.
        device: `cluster.device` of the study, which the nodes are asked for.
        environ: of srun.
    """
    nodes = num_nodes(num_ranks, ranks_per_node)
    srun = [
        "srun", f"--job-name={job_name}", f"--nodes={nodes}", f"--ntasks={nodes}",
        "--ntasks-per-node=1", "--export=ALL", "--kill-on-bad-exit=0", "--unbuffered",
        "--input=none",
    ]  # fmt: skip
    # The step that a search itself runs in holds what its own steps would wait for.
    if "SLURM_STEP_ID" in environ:
        srun.append("--overlap")
    # What sbatch was asked for is no longer srun's default (Slurm 22.05 on).
    if "SRUN_CPUS_PER_TASK" not in environ and "SLURM_CPUS_PER_TASK" in environ:
        srun.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    # Inside an allocation the limit is that of the job.
    if math.isfinite(time_limit_s) and "SLURM_JOB_ID" not in environ:
        srun.append(f"--time={math.ceil(time_limit_s / 60) + 1}")
    if num_ranks == 1:
        srun.append(f"--output={_escaped(rank_dir / 'worker_0.log')}")
    return [
        *srun, sys.executable, "-m", "mindtune.controller.trials.slurm_node", str(rank_dir),
        str(num_ranks), str(ranks_per_node or num_ranks), str(port), f"{cluster_timeout_s:.0f}",
        device, *command,
    ]  # fmt: skip


def _escaped(path: Path) -> str:
    """Return a path in which srun replaces nothing: `%` and backslash are its own."""
    return str(path).replace("\\", "\\\\").replace("%", "%%")


_CANCELLED = re.compile(
    r"^slurmstepd(?:-\S+)?: error: \*\*\* (?:JOB|STEP) .*\bCANCELLED AT .*\*\*\*$"
    r"|^srun: error: Node failure on .*$"
    r"|^srun: .*\bJob allocation \S+ has been revoked.*$"
    r"|^srun: Force Terminated job.*$",
    re.MULTILINE,
)
"""As Slurm's sources print it (slurmstepd/req.c and mgr.c, libsrun/allocate.c, launch.c): by
`scancel`, preemption, a node's failure or a time limit."""


def cancellation(errors: str) -> str:
    """Return the line that says that Slurm or a person cancelled the job; empty: none does."""
    found = [line[0].strip() for line in _CANCELLED.finditer(errors)]
    return max(found, key=len, default="")  # the longest names the cause


def cancel_job(name: str) -> None:
    """Cancel the job of a name, or the step of a name in the job that this process is in."""
    _ask("scancel", "--quiet", f"--name={name}")
    own = os.environ.get("SLURM_JOB_ID")
    if own is not None:
        steps = _ask("squeue", "--noheader", "--steps", f"--jobs={own}", "--format=%i %j")
        for line in steps.splitlines():
            step, _, called = line.strip().partition(" ")
            if called == name:
                _ask("scancel", "--quiet", step)


def _ask(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_ANSWER_S, check=False,
        )  # fmt: skip
        return done.stdout
    return ""
