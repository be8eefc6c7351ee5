"""Which physical device this process works on, from the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindtune.controller.device.reading import ProbeError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["local_device_id", "visible_entries", "visible_entry"]

# First match wins. `msrun` sets DEVICE_ID to the local rank; the others are set by torchrun-like
# launchers, Open MPI, MPICH and Slurm.
_LOCAL_RANK_VARIABLES = (
    "DEVICE_ID",
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)


_UUID_STARTS = ("GPU-", "MIG-")


def local_device_id(environ: Mapping[str, str]) -> int:
    """Number of this process's device among those visible to it; 0 where nothing says so."""
    for name in _LOCAL_RANK_VARIABLES:
        value = environ.get(name, "").strip()
        if value.isdecimal():
            return int(value)
    return 0


def visible_entries(text: str) -> list[str]:
    """Entries of a visibility list; as in CUDA, it ends at the first that is no device.

    So `-1`, `none` or Slurm's `NoDevFiles` make none visible. A device that is named twice is one.
    """
    entries: dict[str, None] = {}
    for entry in text.split(","):
        stripped = entry.strip()
        if not stripped.isdecimal() and not stripped.startswith(_UUID_STARTS):
            break
        entries[stripped] = None
    return list(entries)


def visible_entry(variable: str, environ: Mapping[str, str], device_id: int) -> str | None:
    """Entry number `device_id` of a visibility list such as `CUDA_VISIBLE_DEVICES`.

    Args:
        variable: Name of the environment variable.
        environ: The environment.
        device_id: Position in the list, from 0.

    Returns:
        The entry as written (a number or a UUID); None where the variable is not set, so that
        every device is visible.

    Raises:
        ProbeError: The list has no such entry.
    """
    text = environ.get(variable)
    if text is None:
        return None
    entries = visible_entries(text)
    if device_id >= len(entries):
        raise ProbeError(
            f"{variable}={text!r} makes {len(entries)} device(s) visible, but this process uses "
            f"number {device_id} (from 0); list more devices or start fewer processes."
        )
    return entries[device_id]
