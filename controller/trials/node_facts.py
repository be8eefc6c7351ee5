"""What a node is, told on the node itself.

Started as `python -m mindtune.controller.trials.node_facts DEVICE`; prints one line of JSON.
Another host, or a node that Slurm gives, need not be like the machine that searches.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mindtune.controller.device.hardware import describe_hardware
from mindtune.controller.trials.memory_limit import memory_limit_bytes
from mindtune.controller.versions import installed_versions

__all__ = ["NodeFacts", "leave_facts", "main", "node_facts", "read_facts"]

_PACKAGES = ("mindtune", "mindspore")


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A machine that runs ranks."""

    hardware: str
    """As `describe_hardware` gives it."""
    memory_limit_bytes: int | None = None
    """Memory of the machine or of the control group, whichever is less."""
    versions: dict[str, str] = field(default_factory=dict)


def node_facts(device: str) -> NodeFacts:
    """Return what this machine is.

    Args:
        device: `cluster.device` of the study; `cpu` for the host.
    """
    return NodeFacts(
        hardware=describe_hardware(device),
        memory_limit_bytes=memory_limit_bytes(),
        versions=installed_versions(_PACKAGES),
    )


def leave_facts(rank_dir: Path, node: int, device: str) -> None:
    """Write this machine's facts where those who judge the trial find them."""
    partial = rank_dir / f".node{node}.json"
    partial.write_text(json.dumps(asdict(node_facts(device))))
    partial.replace(rank_dir / f"node{node}.json")


def read_facts(rank_dir: Path) -> list[NodeFacts]:
    """Return what the nodes of a trial have left, in their order."""
    paths = sorted(rank_dir.glob("node*.json"), key=lambda path: (len(path.name), path.name))
    return [NodeFacts(**json.loads(path.read_text())) for path in paths]


def main() -> None:
    """Print this machine's facts."""
    sys.stdout.write(json.dumps(asdict(node_facts(sys.argv[1]))) + "\n")


if __name__ == "__main__":
    main()
