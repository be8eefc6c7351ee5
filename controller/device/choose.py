"""Chooses the probe for a MindSpore device target."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mindtune.controller.device.reading import (
    DeviceReading,
    Probe,
    ProbeError,
    UnsupportedProbe,
)
from mindtune.controller.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DeferredProbe", "ProbeChoice", "choose_probe"]


class ProbeChoice(NamedTuple):
    """A probe and the reason for it."""

    probe: Probe
    why: str


def choose_probe(
    device_target: str,
    *,
    device_id: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> ProbeChoice:
    """Opens the probe that fits a device target.

    Where the driver cannot be asked, the probe reads nothing: the host's load must not stand for
    that of a device.

    Args:
        device_target: `CPU`, `GPU` or `Ascend`, MindSpore's names, in any case.
        device_id: Number among the visible devices; None: from the launcher's variables.
        environ: Environment with the visibility lists; None: this process's.

    Raises:
        ConfigError: There is no such device target.
    """
    target = device_target.lower()
    if target not in {"cpu", "gpu", "ascend"}:
        raise ConfigError(
            f"device_target must be CPU, GPU or Ascend, but got {device_target!r}; "
            "use the name that mindspore.set_device takes."
        )
    try:
        if target == "gpu":
            from mindtune.controller.device.nvml import NvmlProbe  # noqa: PLC0415 - loads a driver

            nvml = NvmlProbe(device_id=device_id, environ=environ)
            return ProbeChoice(nvml, f"device target GPU, read by {nvml.name}")
        if target == "ascend":
            from mindtune.controller.device.npu_smi import NpuSmiProbe  # noqa: PLC0415 - as above

            npu = NpuSmiProbe(device_id=device_id, environ=environ)
            return ProbeChoice(npu, f"device target Ascend, read by {npu.name}")
    except ProbeError as error:
        return ProbeChoice(UnsupportedProbe(), f"device signals are not available: {error}")
    from mindtune.controller.device.host import HostProbe  # noqa: PLC0415 - only where used

    host = HostProbe()
    return ProbeChoice(host, f"device target CPU, read by {host.name}")


class DeferredProbe:
    """Opens the probe for a device target with the first read, in the thread that reads.

    A driver that hangs does so from its first call on, which must not be made by the thread that
    trains.

    Args:
        device_target: As of `choose_probe`.
    """

    name = "device probe"
    min_period_s = 0.1

    def __init__(self, device_target: str) -> None:
        self._device_target = device_target
        self._probe: Probe | None = None

    def read(self) -> DeviceReading:
        """Read the device once.

        Raises:
            ProbeError: The driver cannot be read now.
        """
        if self._probe is None:
            self._probe = choose_probe(self._device_target).probe
            self.name, self.min_period_s = self._probe.name, self._probe.min_period_s
        return self._probe.read()

    def close(self) -> None:
        """Free the driver, where it was opened."""
        if self._probe is not None:
            self._probe.close()
