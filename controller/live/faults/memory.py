"""A leak that really holds memory, within a limit that the plan states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import psutil

from mindtune.controller.contract.fault_plan import MemoryClimb
from mindtune.controller.device import DeviceReading
from mindtune.controller.device.host import host_memory_bytes
from mindtune.controller.errors import ConfigError
from mindtune.controller.units import format_size

__all__ = ["Leak"]


class Leak:
    """What a planted `memory_climb` has taken so far.

    Raises:
        ConfigError: The machine has less memory free than the fault may take.
    """

    def __init__(self, fault: MemoryClimb) -> None:
        free = min(int(psutil.virtual_memory().available), host_memory_bytes())
        if fault.total > free:
            raise ConfigError(
                "total of memory_climb must leave this machine in peace, so at most the "
                f"{format_size(free)} that are free, but got {format_size(fault.total)}; state "
                "a smaller device."
            )
        self._fault = fault
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._before: int | None = None

    def grow(self) -> None:
        """Take another step's memory, and touch all of it.

        Raises:
            MemoryError: It does not fit into the device that the plan states.
        """
        if self._before is None:
            self._before = _resident_bytes()
        needed = self.used_bytes + self._fault.per_step
        if needed > self._fault.total:
            raise MemoryError(
                f"planted memory_climb: {format_size(needed)} do not fit into the device of "
                f"{format_size(self._fault.total)} that the plan states"
            )
        # Ones: pages of zeros would not be there before they are written.
        self._chunks.append(np.ones(self._fault.per_step, np.uint8))

    @property
    def used_bytes(self) -> int:
        """Memory of the process before the fault, and what the fault has taken."""
        before = _resident_bytes() if self._before is None else self._before
        return before + sum(chunk.nbytes for chunk in self._chunks)

    def reading(self, reading: DeviceReading) -> DeviceReading:
        """Return a reading of the device that the plan states."""
        return replace(
            reading,
            device_memory_used_bytes=self.used_bytes,
            device_memory_total_bytes=self._fault.total,
        )


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
