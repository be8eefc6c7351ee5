"""How much memory a trial may use on this machine, and whether the kernel killed for it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["kernel_oom_kills", "memory_limit_bytes"]

_GROUPS = Path("/sys/fs/cgroup")


def _entry(path: Path, key: str) -> int | None:
    """Return the first number behind `key` in a file of "key number" lines."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(key):
            return int(line.split()[1])
    return None


def _group_limits() -> list[int]:
    """Return the memory limits of this process's control groups (cgroups(7), v1 and v2)."""
    candidates = [_GROUPS / "memory.max", _GROUPS / "memory/memory.limit_in_bytes"]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            candidates.append(_GROUPS / group.lstrip("/") / "memory.max")
        elif "memory" in controllers.split(","):
            candidates.append(_GROUPS / "memory" / group.lstrip("/") / "memory.limit_in_bytes")
    limits = []
    for path in candidates:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            limits.append(int(text))
    return limits


def memory_limit_bytes() -> int | None:
    """Return the machine's memory or the control group's limit, whichever is less.

    None where /proc is not readable.
    """
    total_kb = _entry(Path("/proc/meminfo"), "MemTotal:")
    if total_kb is None:
        return None
    return min([total_kb * 1024, *_group_limits()])


def kernel_oom_kills() -> int:
    """Return the out-of-memory kills since boot, machine and control groups together.

    0 where the kernel (before 4.13) does not count them.
    """
    return _entry(Path("/proc/vmstat"), "oom_kill ") or 0
