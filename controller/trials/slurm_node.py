"""Start one node's ranks of a trial, inside a Slurm job.

Started by srun once per node as `python -m mindtune.controller.trials.slurm_node DIR RANKS
PER_NODE PORT TIMEOUT COMMAND...`. It becomes that node's msrun: the first node runs the scheduler
besides, and the others meet it there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mindtune.controller.trials.commands import msrun_command

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
    """Return msrun for the ranks of node `node`; every node has as many (see `check_ranks`)."""
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
    """Become this node's msrun."""
    rank_dir, num_ranks, per_node, port, timeout = sys.argv[1:6]
    node = int(os.environ["SLURM_NODEID"])
    is_alone = os.environ.get("SLURM_STEP_NUM_NODES", "1") == "1"
    (Path(rank_dir) / f"begun.node{node}").touch()
    command = node_command(
        sys.argv[6:],
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
