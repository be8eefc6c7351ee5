"""What the trials of this machine run on, as one line: equal lines, comparable step times."""

from __future__ import annotations

from mindtune.controller.device.host import cpu_name, usable_cores
from mindtune.controller.device.npu_smi import list_npus
from mindtune.controller.device.nvml import list_gpus
from mindtune.controller.device.reading import ProbeError

__all__ = ["describe_hardware"]

_HOST = "cpu"


def describe_hardware(device: str) -> str:
    """Return the kind of devices in this machine, not how many of them.

    Args:
        device: `cluster.device` of the study; `cpu` for the host.
    """
    if device.lower() != _HOST:
        for look in (list_gpus, list_npus):
            try:
                names = sorted({found.name for found in look()})
            except ProbeError:
                continue
            if names:
                return ", ".join(names)
    return f"{cpu_name()}, {usable_cores():g} cores"
