"""msrun's command line on each node: a production run without `mindtune run`."""

from __future__ import annotations

import shlex

from mindtune.controller.contract import BestConfig
from mindtune.controller.trials.commands import CONFIG_PLACEHOLDER
from mindtune.controller.trials.hosts import Hosts
from mindtune.controller.trials.slurm import num_nodes
from mindtune.controller.trials.trial_config import knob_environment
from mindtune.search.layout import num_ranks

__all__ = ["launch_lines"]

_PORT = 8118
"""msrun's own default."""
_MEETING_S = 600
"""msrun's own default for the ranks to find together."""


def launch_lines(best: BestConfig, *, config: str = CONFIG_PLACEHOLDER) -> list[str]:
    """Return one line per node, in a shell's spelling; none where msrun is not what starts it.

    Args:
        best: the config; its command is relative to its own folder.
        config: file that stands for `{config}` in it.
    """
    ranks = num_ranks(best.knobs)
    if best.launcher != "msrun" or ranks == 1 or not best.command[0].startswith("python"):
        return []
    nodes = num_nodes(ranks, best.devices_per_node)
    hosts = Hosts.of(best.hosts, ())
    master = "127.0.0.1" if hosts is None or nodes == 1 else hosts.master
    variables = [f"{name}={value}" for name, value in knob_environment(best.knobs).items()]
    command = [word.replace(CONFIG_PLACEHOLDER, config) for word in best.command]
    return [
        shlex.join(
            [
                *(["env", *variables] if variables else []),
                "msrun",
                f"--worker_num={ranks}",
                f"--local_worker_num={ranks // nodes}",
                f"--master_addr={master}",
                f"--master_port={_PORT}",
                *([] if nodes == 1 else [f"--node_rank={node}"]),
                "--log_dir=msrun_log",
                "--join=True",
                f"--cluster_time_out={_MEETING_S}",
                *command,
            ]
        )
        for node in range(nodes)
    ]
