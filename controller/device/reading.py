"""What a probe reads of one device, and the protocol that every probe follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["EMPTY_READING", "DeviceReading", "Probe", "ProbeError", "UnsupportedProbe"]


class ProbeError(Exception):
    """The driver cannot be read now; a later read may work again."""


@dataclass(frozen=True, kw_only=True)
class DeviceReading:
    """State of one device; the fields are columns of `signals.csv`, None where unsupported."""

    device_utilization: float | None = None
    """0..1, averaged over the time since the read before. NVML, npu-smi: share of time in which
    any kernel ran, not a measure of work done. Host: share of the usable cores."""
    device_memory_used_bytes: int | None = None
    device_memory_total_bytes: int | None = None
    device_temperature_c: float | None = None
    device_power_w: float | None = None


EMPTY_READING = DeviceReading()


class Probe(Protocol):
    """Reads one device. Used by one thread at a time."""

    name: str
    """What is read and through what, for records and messages."""
    min_period_s: float
    """Reading more often than this costs more than it tells."""

    def read(self) -> DeviceReading:
        """Reads the device once.

        Raises:
            ProbeError: The driver cannot be read now.
        """
        ...

    def close(self) -> None:
        """Frees the driver; harmless when called twice."""
        ...


class UnsupportedProbe:
    """Reads nothing: the device of this process has no driver that could be asked."""

    name = "none"
    min_period_s = 10.0

    def read(self) -> DeviceReading:
        """All None."""
        return EMPTY_READING

    def close(self) -> None:
        """Nothing to free."""
