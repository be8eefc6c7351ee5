"""Start one node's ranks of a trial, inside a Slurm job.

Started by srun once per node as `python -m mindtune.controller.trials.slurm_node DIR RANKS
PER_NODE PORT TIMEOUT DEVICE COMMAND...`. It leaves what the node is (node_facts.py) and becomes
the only rank, or that node's msrun: the first node runs the scheduler besides, and the others meet
it there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mindtune.controller.trials.commands import msrun_command
from mindtune.controller.trials.node_facts import leave_facts

__all__ = ["main", "node_command"]


def node_command(
    command: list[str],
    *,
    num_ranks: int,
    ranks_per_node: int,
    node: int,
    master: str,
    rank_dir: Path,
    port: int,
    cluster_timeout_s: float,
) -> list[str]:
    """Return what runs the ranks of node `node`; every node has as many (see `check_ranks`)."""
    if num_ranks == 1:
        return [
            sys.executable, "-m", "mindtune.controller.trials.rank_process", str(rank_dir),
            *command,
        ]  # fmt: skip
    return msrun_command(
        command,
        num_ranks=num_ranks,
        rank_dir=rank_dir,
        port=port,
        cluster_timeout_s=cluster_timeout_s,
        local_ranks=min(ranks_per_node, num_ranks),
        master=master,
        node=node,
    )


def _first_node() -> str:
    """Return the address of the first node of this job."""
    nodes = os.environ["SLURM_STEP_NODELIST"]
    listed = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()[0]


def main() -> None:
    """Become what runs this node's ranks."""
    rank_dir, num_ranks, per_node, port, timeout, device = sys.argv[1:7]
    node = int(os.environ["SLURM_NODEID"])
    is_alone = os.environ.get("SLURM_STEP_NUM_NODES", "1") == "1"
    (Path(rank_dir) / f"begun.node{node}").touch()
    leave_facts(Path(rank_dir), node, device)
    command = node_command(
        sys.argv[7:],
        num_ranks=int(num_ranks),
        ranks_per_node=int(per_node),
        node=node,
        master="127.0.0.1" if is_alone else _first_node(),
        rank_dir=Path(rank_dir),
        port=int(port),
        cluster_timeout_s=float(timeout),
    )
    os.execv(command[0], command)  # noqa: S606 - what srun was asked to start


if __name__ == "__main__":
    main()
