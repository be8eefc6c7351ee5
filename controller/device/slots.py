"""Device slots: which devices of this machine each of several trials gets.

Trials that run side by side must not share a device. A user's own CUDA_VISIBLE_DEVICES or
ASCEND_RT_VISIBLE_DEVICES is the pool that slots are cut from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from mindtune.controller.device.npu_smi import list_npus
from mindtune.controller.device.nvml import list_gpus
from mindtune.controller.device.reading import ProbeError
from mindtune.controller.device.visible import visible_entries

__all__ = ["DevicePool", "device_pool", "device_slots"]

_HOST = "cpu"
_GPU = "CUDA_VISIBLE_DEVICES"
_NPU = "ASCEND_RT_VISIBLE_DEVICES"
_ASCEND = "ascend"
"""In the names of Ascend devices, as `cluster.device` and the table of peaks have them."""
_INSTANCE = "MIG-"


@dataclass(frozen=True)
class DevicePool:
    """The devices that this process may use."""

    variable: str
    """Environment variable that makes devices visible."""
    devices: tuple[str, ...]
    """As they are written in it: numbers, or UUIDs of GPUs or of MIG instances."""


def device_pool(device: str, environ: Mapping[str, str]) -> DevicePool | None:
    """Return the devices of this machine; None: trials run on the host, or there are none.

    Args:
        device: `cluster.device` of the study; `cpu` for the host.
        environ: the environment.
    """
    if device.lower() == _HOST:
        return None
    # A profile may set a list for devices of another kind than those of the study.
    kinds = {_NPU: _npus, _GPU: _gpus}
    for variable in [_NPU] if _ASCEND in device.lower() else [_GPU, _NPU]:
        named, present = environ.get(variable), kinds[variable]()
        devices = present if named is None else _named(variable, named, present)
        if devices:
            return DevicePool(variable, devices)
    return None


def _named(variable: str, text: str, present: tuple[str, ...]) -> tuple[str, ...]:
    """Return the user's own list, up to the first number that is no device's, as drivers do."""
    entries = visible_entries(text)
    if variable == _NPU:
        # CANN takes numbers alone, and only in ascending order (its reference of the variable).
        entries = sorted(takewhile(str.isdecimal, entries), key=int)
    count = len(present)
    beyond = [entry.isdecimal() and int(entry) >= count > 0 for entry in entries]
    return tuple(entries[: beyond.index(True)] if True in beyond else entries)


def device_slots(pool: DevicePool, per_trial: int) -> list[dict[str, str]]:
    """Return the environment of each trial that may run at the same time.

    Args:
        pool: the devices.
        per_trial: devices of one trial.

    Returns:
        One mapping per slot; slots share no device. Empty: a trial needs more than there are.
    """
    devices = pool.devices
    if per_trial > 1:
        # A process of CUDA sees one MIG instance, whatever the list holds.
        devices = tuple(entry for entry in devices if not entry.startswith(_INSTANCE))
    return [
        {pool.variable: ",".join(devices[first : first + per_trial])}
        for first in range(0, len(devices) - per_trial + 1, per_trial)
    ]


def _gpus() -> tuple[str, ...]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES takes them: of a divided one its instances."""
    try:
        found = list_gpus()
    except ProbeError:
        return ()
    return tuple(name for gpu in found for name in gpu.instances or (str(gpu.index),))


def _npus() -> tuple[str, ...]:
    try:
        return tuple(map(str, range(len(list_npus()))))
    except ProbeError:
        return ()
