"""Processor time in which MindSpore's worker threads only wait: busy to the kernel, idle in fact.

A worker of MindSpore's thread pool (`KernelThread_*`, `ActorThread_*`) that has run out of work
calls `sched_yield` in a loop before it sleeps. A batch far too small for the machine therefore
looks as busy as a full one. What gives the loop away is its share of system time, since kernels
compute in user mode. On 2 cores of an AMD EPYC (MindSpore 2.10.0, reference workload),
`KernelThread_0` used in user / system mode, as shares of a core:

| batch | user | system |
| --- | --- | --- |
| 1 sample of 32 bytes, hidden size 128 | 0.24 | 0.40 |
| 1 sample of 32 bytes, hidden size 256 | 0.39 | 0.45 |
| 4 samples of 128 bytes | 0.48 | 0.36 |
| 16 samples of 128 bytes | 0.64 | 0.13 |
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["WorkerThreads"]

_PROC = Path("/proc")
_WORKERS = ("KernelThread_", "ActorThread_")
# The first row of the table holds hardly any work, and bounds the user time of the loop's own
# calls: 0.24 / 0.40. Too small a factor makes an idle machine look busier, never the reverse.
_USER_PER_SYSTEM = 0.6


class WorkerThreads:
    """Time that the workers of one process spent in waiting loops; nothing where nobody can tell.

    Workers that start later are not seen: make a new one for them.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self._tasks = _PROC / str(pid) / "task"
        self._ticks_per_s = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
        try:
            threads = [entry.name for entry in self._tasks.iterdir()]
        except OSError:
            threads = []
        self._workers = tuple(
            thread
            for thread in threads
            if (_read(self._tasks / thread / "comm") or "").startswith(_WORKERS)
        )

    def waited_s(self) -> dict[str, float]:
        """Processor seconds that each worker has spent in the loop since it started."""
        waited = {}
        for thread in self._workers:
            # The name stands in brackets, and may hold spaces and brackets itself.
            fields = (_read(self._tasks / thread / "stat") or "").rpartition(")")[2].split()
            if len(fields) > 12:
                user, system = int(fields[11]), int(fields[12])
                ticks = system + min(_USER_PER_SYSTEM * system, user)
                waited[thread] = ticks / self._ticks_per_s
        return waited


def _read(path: Path) -> str | None:
    """Text of a kernel file; None where the thread has ended or the system has no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
