"""What a study and a production run alike must hold before anything starts."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping

from mindtune.controller.contract import PolicySection
from mindtune.controller.errors import ConfigError
from mindtune.policies.engine import build_engine
from mindtune.policies.settings import PolicySettings
from mindtune.search.knobs import KnobValue

__all__ = ["check_batch", "check_launcher", "check_policies", "check_ranks"]

_BATCH_FACTORS = ("data_parallel", "micro_batch_size", "micro_batch_num")
_SLURM = ("srun", "scancel")
_MOST_DEVICES = 16
"""In one machine: 16 in the largest servers of Ascend and NVIDIA (Atlas 900 A2 and DGX-2)."""
_RANKS_PER_CORE = 8
"""Ranks without a device of their own, as in a dry run on CPUs, may share a core."""


def check_launcher(launcher: str) -> None:
    """Refuse a launcher that this process cannot put in front of a command.

    Raises:
        ConfigError: it is Slurm, and its commands are not here.
    """
    missing = [name for name in _SLURM if shutil.which(name) is None]
    if launcher == "slurm" and missing:
        raise ConfigError(
            f"launcher slurm needs {' and '.join(missing)} on the PATH, but they are not there; "
            "start it on a machine of the cluster, or use launcher none or msrun."
        )


def check_ranks(
    launcher: str, num_ranks: int, ranks_per_node: int | None = None, *, num_hosts: int = 1
) -> None:
    """Refuse ranks that the launcher cannot start.

    Args:
        launcher: as a study names it.
        num_ranks: in all.
        ranks_per_node: of a full node; None: all are on one.
        num_hosts: machines that msrun may start ranks on.

    Raises:
        ConfigError: msrun would start more than its machines have room for, or another number on
            the last node, where it would give them wrong ranks: that of its i-th process is
            node_rank x its own number of processes + i.
    """
    nodes = 1 if ranks_per_node is None else math.ceil(num_ranks / ranks_per_node)
    if ranks_per_node and nodes > 1 and (launcher == "slurm" or num_hosts > 1):
        rest = num_ranks % ranks_per_node
        if rest:
            raise ConfigError(
                f"with launcher {launcher}, ranks of several nodes must be a multiple of "
                f"devices_per_node = {ranks_per_node}, but the degrees multiply to {num_ranks}; "
                f"use {num_ranks - rest} or {num_ranks - rest + ranks_per_node} ranks, or set "
                "devices_per_node to what divides them."
            )
    if launcher != "msrun":
        return
    if nodes > num_hosts:
        raise ConfigError(
            f"msrun must start at most devices_per_node = {ranks_per_node} ranks on each machine, "
            f"but the degrees multiply to {num_ranks:.6g} and hosts names {num_hosts}: name "
            f"{nodes} machines there, this one first, or use launcher slurm."
        )
    limit = max(_MOST_DEVICES, _RANKS_PER_CORE * (os.cpu_count() or 1))
    if num_ranks / nodes > limit:
        raise ConfigError(
            f"msrun must start at most {limit} ranks on this machine ({os.cpu_count()} cores), "
            f"but the degrees multiply to {num_ranks:.6g}; correct data_parallel and the other "
            "degrees, or name further machines in hosts."
        )


def check_batch(knobs: Mapping[str, KnobValue], global_batch_size: int | None = None) -> None:
    """Refuse knobs whose product is not the global batch.

    Args:
        knobs: canonical knobs and derived values.
        global_batch_size: samples per optimizer step; None: as `knobs` say, if they do.

    Raises:
        ConfigError: they contradict each other.
    """
    told = knobs.get("global_batch_size")
    expected = told if global_batch_size is None else global_batch_size
    if expected is None or "micro_batch_size" not in knobs:
        return
    product = math.prod(int(knobs.get(name, 1)) for name in _BATCH_FACTORS)
    if product != expected or told not in (None, expected):
        raise ConfigError(
            f"{' * '.join(_BATCH_FACTORS)} must be global_batch_size = {expected}, but it is "
            f"{product if told in (None, expected) else told}; these knobs, their study file and "
            "its trials do not belong together: export the config again, or correct "
            "micro_batch_num."
        )


def check_policies(sections: Mapping[str, PolicySection]) -> None:
    """Refuse settings that no run could use.

    Raises:
        PolicyError: a policy, limit or threshold is unknown or out of range.
    """
    settings = {name: PolicySettings(**entry.model_dump()) for name, entry in sections.items()}
    build_engine(settings, mode="observe")
