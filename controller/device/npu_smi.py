"""Ascend devices through the driver's tool `npu-smi`.

The tool prints a table with two rows per die: NPU number, name, health, power, temperature; then
chip number, bus, AI-core load and memory. Layouts seen in public reports, all read here:

- Atlas A2 (npu-smi 23 to 26): `| 0  910B3 | OK | 92.0  39  0 / 0 |` and
  `| 0 | 0000:C1:00.0 | 0  0 / 0  3314 / 65536 |` (memory, then HBM);
- Atlas A3: two dies per NPU, the second with `-` for power, the chip cell `| 1     1 |`;
- 910A before hugepages were shown: no third pair in the first row;
- 310P: one memory pair, `NA` for power, bus and load.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindtune.controller.device.reading import DeviceReading, ProbeError
from mindtune.controller.device.visible import local_device_id, visible_entry

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NpuDescription", "NpuSmiProbe", "list_npus", "parse_npu_smi"]

_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_MEBIBYTE = 2**20
_TIMEOUT_S = 10.0
_CELL_ID = re.compile(r"\d+(?:\s+\d+)?")
_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")
_BUS = re.compile(r"(?:[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]|NA|N/A|-)")


@dataclass(frozen=True, kw_only=True)
class NpuDescription:
    """One die as `npu-smi info` shows it; MindSpore counts each die as a device."""

    npu: int
    chip: int
    name: str
    health: str
    reading: DeviceReading
    """On cards with two dies the power of the card stands at its first die."""


class NpuSmiProbe:
    """Reads one Ascend device by running `npu-smi info`.

    Utilization is the tool's own momentary AI-core figure. The tool starts a process and asks
    every device of the machine, hence the long least period.

    Args:
        device_id: Number among the visible devices; None: from the launcher's variables.
        environ: Environment that holds `ASCEND_RT_VISIBLE_DEVICES`. Its numbers are positions in
            the table, which lists the dies that this container or machine has.
        command: The tool.
        timeout_s: After this the tool is killed and the read fails.

    Raises:
        ProbeError: No tool, no driver, or no such device.
    """

    min_period_s = 2.0

    def __init__(
        self,
        *,
        device_id: int | None = None,
        environ: Mapping[str, str] | None = None,
        command: str = "npu-smi",
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        environ = os.environ if environ is None else environ
        number = local_device_id(environ) if device_id is None else device_id
        entry = visible_entry(_VISIBLE, environ, number) or str(number)
        if not entry.isdecimal():
            raise ProbeError(
                f"{_VISIBLE} lists device numbers, but got {entry!r}; use numbers like 0,1."
            )
        self._position = int(entry)
        self._command = command
        self._timeout_s = timeout_s
        self.name = f"npu-smi:{self._position}"
        self.name = f"npu-smi:{self._position} ({self._device().name})"

    def read(self) -> DeviceReading:
        """Runs the tool once.

        Raises:
            ProbeError: The tool failed, hung, or does not show the device.
        """
        return self._device().reading

    def close(self) -> None:
        """Nothing to free."""

    def _device(self) -> NpuDescription:
        devices = list_npus(command=self._command, timeout_s=self._timeout_s)
        if self._position >= len(devices):
            raise ProbeError(
                f"{self.name}: npu-smi shows {len(devices)} device(s), so there is no number "
                f"{self._position} (from 0); check {_VISIBLE} and the device id."
            )
        return devices[self._position]


def list_npus(*, command: str = "npu-smi", timeout_s: float = _TIMEOUT_S) -> list[NpuDescription]:
    """All dies that `npu-smi info` shows, in its order.

    Raises:
        ProbeError: The tool is missing, failed, hung, or printed no device.
    """
    if shutil.which(command) is None:
        raise ProbeError(f"{command} is not on PATH; it comes with the Ascend driver.")
    try:
        done = subprocess.run(
            [command, "info"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"{command} info gave no answer within {timeout_s:g} s.") from error
    except OSError as error:
        raise ProbeError(f"{command} info does not start: {error}") from error
    text = done.stdout.decode(errors="replace")
    devices = parse_npu_smi(text)
    if not devices:
        message = (text + done.stderr.decode(errors="replace")).strip()[:200]
        raise ProbeError(
            f"{command} info shows no device (exit code {done.returncode}): {message}"
        )
    return devices


def parse_npu_smi(text: str) -> list[NpuDescription]:
    """Reads the device table of `npu-smi info`; rows that do not fit are passed over.

    Args:
        text: What the tool printed.

    Returns:
        One entry per die, in the order printed; empty where there is no table.
    """
    devices: list[NpuDescription] = []
    card: list[str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|") or len(cells) != 3:
            # Rules, and the table of processes, which has more columns.
            continue
        # A chip's row first: the cell `0     0` of an A3 die has the form of `0     910B3`.
        if card is not None and _CELL_ID.fullmatch(cells[0]) and _BUS.fullmatch(cells[1]):
            devices.append(_device(card, cells))
            card = None
        elif re.fullmatch(r"\d+\s+\S+", cells[0]):
            card = cells
    return devices


def _device(card: list[str], chip: list[str]) -> NpuDescription:
    npu, name = card[0].split()
    power, temperature = [*card[2].split(), "", ""][:2]
    load = chip[2].split()[:1]
    pairs = [(int(used), int(total)) for used, total in _PAIR.findall(chip[2])]
    # Device memory is the last pair with a size: HBM where there is one (the pair before it is
    # the control CPU's DDR), else the one pair of cards without HBM.
    sized = [pair for pair in pairs if pair[1] > 0]
    used, total = sized[-1] if sized else (None, None)
    percent = _number(load[0]) if load else None
    return NpuDescription(
        npu=int(npu),
        chip=int(chip[0].split()[0]),
        name=name,
        health=card[1],
        reading=DeviceReading(
            device_utilization=None if percent is None else min(percent / 100.0, 1.0),
            device_memory_used_bytes=None if used is None else used * _MEBIBYTE,
            device_memory_total_bytes=None if total is None else total * _MEBIBYTE,
            device_temperature_c=_number(temperature),
            device_power_w=_number(power),
        ),
    )


def _number(text: str) -> float | None:
    """A printed number; None for `NA`, `-` and the like."""
    return float(text) if re.fullmatch(r"\d+(?:\.\d+)?", text) else None
