"""Device slots: which devices of this machine each of several trials gets.

Trials that run side by side must not share a device. A user's own CUDA_VISIBLE_DEVICES or
ASCEND_RT_VISIBLE_DEVICES is the pool that slots are cut from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindtune.controller.device.npu_smi import list_npus
from mindtune.controller.device.nvml import list_gpus
from mindtune.controller.device.reading import ProbeError
from mindtune.controller.device.visible import visible_entries

__all__ = ["DevicePool", "device_pool", "device_slots"]

_HOST = "cpu"
_GPU = "CUDA_VISIBLE_DEVICES"
_NPU = "ASCEND_RT_VISIBLE_DEVICES"


@dataclass(frozen=True)
class DevicePool:
    """The devices that this process may use."""

    variable: str
    """Environment variable that makes devices visible."""
    devices: tuple[str, ...]
    """As they are written in it: numbers or UUIDs."""


def device_pool(device: str, environ: Mapping[str, str]) -> DevicePool | None:
    """Return the devices of this machine; None: trials run on the host.

    Args:
        device: `cluster.device` of the study; `cpu` for the host.
        environ: the environment.
    """
    if device.lower() == _HOST:
        return None
    for variable, look in ((_NPU, _num_npus), (_GPU, _num_gpus)):
        named = environ.get(variable)
        devices = (
            tuple(map(str, range(look()))) if named is None else tuple(visible_entries(named))
        )
        if devices:
            return DevicePool(variable, devices)
    return None


def device_slots(pool: DevicePool, per_trial: int) -> list[dict[str, str]]:
    """Return the environment of each trial that may run at the same time.

    Args:
        pool: the devices.
        per_trial: devices of one trial.

    Returns:
        One mapping per slot; slots share no device. Empty: a trial needs more than there are.
    """
    return [
        {pool.variable: ",".join(pool.devices[first : first + per_trial])}
        for first in range(0, len(pool.devices) - per_trial + 1, per_trial)
    ]


def _num_gpus() -> int:
    try:
        return len(list_gpus())
    except ProbeError:
        return 0


def _num_npus() -> int:
    try:
        return len(list_npus())
    except ProbeError:
        return 0
