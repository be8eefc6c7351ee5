"""NVIDIA devices through NVML (`pynvml` of the package `nvidia-ml-py`)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindtune.controller.device.reading import DeviceReading, ProbeError
from mindtune.controller.device.visible import local_device_id, visible_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["GpuDescription", "NvmlProbe", "list_gpus"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class GpuDescription:
    """One NVIDIA device of this machine; None where the driver does not say."""

    index: int
    name: str
    uuid: str | None
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None
    driver: str | None
    instances: tuple[str, ...] = ()
    """UUIDs of its MIG instances, which CUDA then shows in its place; empty: it is not divided."""


class NvmlProbe:
    """Reads one NVIDIA device.

    Utilization is the mean of the driver's own samples since the read before. Where the driver
    keeps none, or has no new one, its current figure stands for it, an average over its last
    sampling period (1/6 s to 1 s, NVML reference, `nvmlUtilization_t`).

    A field that the device does not support is None and is not asked for again. After any other
    error the next read connects to the driver anew.

    Args:
        device_id: Number among the visible devices; None: from the launcher's variables.
        environ: Environment that holds `CUDA_VISIBLE_DEVICES` (numbers, full or shortened UUIDs).
            Numbers are taken in NVML's order, which is CUDA's with
            `CUDA_DEVICE_ORDER=PCI_BUS_ID` and on machines with devices of one kind.

    Raises:
        ProbeError: No library, no driver, or no such device.
    """

    min_period_s = 0.2

    def __init__(
        self, *, device_id: int | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        environ = os.environ if environ is None else environ
        number = local_device_id(environ) if device_id is None else device_id
        self._entry = visible_entry(_VISIBLE, environ, number) or str(number)
        self._nvml = _import_pynvml()
        self._handle: Any = None
        self._unsupported: set[str] = set()
        self._last_sample_us = 0
        self.name = "nvml"
        self._connect()
        self.name = f"nvml:{self._entry} ({self._text(self._nvml.nvmlDeviceGetName)})"

    def read(self) -> DeviceReading:
        """Reads the device once.

        Raises:
            ProbeError: The driver or the device is gone, for now or for good.
        """
        nvml = self._nvml
        try:
            if self._handle is None:
                self._connect()
            memory = self._ask("memory", nvml.nvmlDeviceGetMemoryInfo)
            temperature = self._ask(
                "temperature",
                lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            )
            milliwatts = self._ask("power", nvml.nvmlDeviceGetPowerUsage)
            return DeviceReading(
                device_utilization=self._utilization(),
                device_memory_used_bytes=None if memory is None else int(memory.used),
                device_memory_total_bytes=None if memory is None else int(memory.total),
                device_temperature_c=None if temperature is None else float(temperature),
                device_power_w=None if milliwatts is None else milliwatts / 1000.0,
            )
        except nvml.NVMLError as error:
            self.close()
            raise ProbeError(f"{self.name}: {error}") from error

    def close(self) -> None:
        """Frees the driver; harmless when called twice."""
        if self._handle is None:
            return
        self._handle = None
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            # The driver is gone already, so there is nothing left to free.
            return

    def _connect(self) -> None:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise ProbeError(f"NVML does not start: {error}") from error
        try:
            self._handle = _handle_of(self._nvml, self._entry)
            # What the driver recorded before now belongs to no interval of ours.
            self._utilization_samples()
        except self._nvml.NVMLError as error:
            self._nvml.nvmlShutdown()
            self._handle = None
            raise ProbeError(f"NVIDIA device {self._entry}: {error}") from error
        except ProbeError:
            self._nvml.nvmlShutdown()
            raise

    def _text(self, query: Callable[[Any], Any]) -> str:
        value = self._ask("name", query)
        return "unnamed" if value is None else str(value)

    def _ask(self, field: str, query: Callable[[Any], Any]) -> Any:
        if field in self._unsupported:
            return None
        try:
            return query(self._handle)
        except self._nvml.NVMLError as error:
            if not _is_unsupported(self._nvml, error):
                raise
            self._unsupported.add(field)
            return None

    def _utilization(self) -> float | None:
        samples = self._utilization_samples()
        if samples:
            return min(sum(samples) / len(samples) / 100.0, 1.0)
        rates = self._ask("utilization", self._nvml.nvmlDeviceGetUtilizationRates)
        return None if rates is None else min(rates.gpu / 100.0, 1.0)

    def _utilization_samples(self) -> list[int]:
        """Percentages that the driver sampled since the last call; empty where it has none."""
        nvml = self._nvml
        try:
            answer = self._ask(
                "samples",
                lambda handle: nvml.nvmlDeviceGetSamples(
                    handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._last_sample_us
                ),
            )
        except nvml.NVMLError_NotFound:
            return []
        if answer is None:
            return []
        # Some drivers pad the buffer with entries whose time stamp is 0.
        fresh = [sample for sample in answer[1] if sample.timeStamp > self._last_sample_us]
        if fresh:
            self._last_sample_us = max(sample.timeStamp for sample in fresh)
        return [int(sample.sampleValue.uiVal) for sample in fresh]


def list_gpus() -> list[GpuDescription]:
    """All NVIDIA devices of this machine, in NVML's order.

    Raises:
        ProbeError: No library or no driver.
    """
    nvml = _import_pynvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ProbeError(f"NVML does not start: {error}") from error
    try:
        driver = _or_none(nvml, nvml.nvmlSystemGetDriverVersion)
        devices = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = _or_none(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
            capability = _or_none(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
            devices.append(
                GpuDescription(
                    index=index,
                    name=str(_or_none(nvml, nvml.nvmlDeviceGetName, handle) or "unnamed"),
                    uuid=_or_none(nvml, nvml.nvmlDeviceGetUUID, handle),
                    memory_bytes=None if memory is None else int(memory.total),
                    compute_capability=None if capability is None else tuple(capability),
                    driver=driver,
                    instances=_instances(nvml, handle),
                )
            )
    except nvml.NVMLError as error:
        raise ProbeError(f"NVML: {error}") from error
    else:
        return devices
    finally:
        nvml.nvmlShutdown()


def _instances(nvml: Any, device: Any) -> tuple[str, ...]:
    """UUIDs of a device's MIG instances; empty: it is not divided."""
    mode = _or_none(nvml, nvml.nvmlDeviceGetMigMode, device)
    if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return ()
    found = []
    for index in range(_or_none(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, device) or 0):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index)
        except nvml.NVMLError_NotFound:
            continue  # numbers may have gaps
        found.append(str(nvml.nvmlDeviceGetUUID(instance)))
    return tuple(found)


def _import_pynvml() -> Any:
    try:
        import pynvml  # noqa: PLC0415 - only where NVML is asked for
    except ImportError as error:
        raise ProbeError(
            "the module pynvml is missing; install the package nvidia-ml-py."
        ) from error
    return pynvml


def _handle_of(nvml: Any, entry: str) -> Any:
    """Handle of a visible device: by number, by UUID, or by the unique start of a UUID."""
    if entry.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(entry))
    if entry.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(entry.encode())
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    matches = [h for h in handles if str(nvml.nvmlDeviceGetUUID(h)).startswith(entry)]
    if len(matches) != 1:
        raise ProbeError(
            f"{_VISIBLE} names a device by number or by the start of one UUID, but {entry!r} fits "
            f"{len(matches)} of {len(handles)} devices; `nvidia-smi -L` lists them."
        )
    return matches[0]


def _is_unsupported(nvml: Any, error: Any) -> bool:
    """Whether an error says that this device or driver never gives the value."""
    # MIG slices answer some calls with "invalid argument": the handle is of the wrong kind.
    return error.value in {
        nvml.NVML_ERROR_INVALID_ARGUMENT,
        nvml.NVML_ERROR_NOT_SUPPORTED,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        nvml.NVML_ERROR_NO_PERMISSION,
    }


def _or_none(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return query(*arguments)
    except nvml.NVMLError as error:
        if not _is_unsupported(nvml, error):
            raise
        return None
