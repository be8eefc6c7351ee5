"""The host as a device: this process tree on the cores and the memory it may use."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from mindtune.controller.device.reading import DeviceReading, ProbeError
from mindtune.controller.device.spinning import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["HostProbe", "cpu_name", "host_memory_bytes", "usable_cores"]

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
# Walking every process of a machine costs milliseconds, and data workers live for a whole run.
_TREE_REFRESH_S = 5.0
# The kernel counts processor time in ticks of 10 ms: over less than a few of them the share is
# noise, and right after the start it is 0.
_SHORTEST_S = 0.05
# An idle machine's own work is a few percent; another training takes a third and more.
_OTHERS = 0.15
# Names of the package sensor in Linux' hwmon: Intel, AMD, Arm boards.
_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")


class HostProbe:
    """Reads this process with its children.

    Utilization is their processor time between two reads over what the usable cores could have
    given them: wall time x cores, less what other processes took. A process that shares busy cores
    is not idle for want of work, and other ranks of the same run are others here. What MindSpore's
    workers spend in waiting loops is no work (`spinning.py`), unless others take more than
    `_OTHERS` of the cores: then workers wait for one that has lost its core, and a larger batch
    would not help. Time of children that ended in between is lost. Memory is their resident set
    (pages shared between them count once each) against the machine's memory or the container's
    limit. Power: None.

    Args:
        pid: Root of the process tree; None: this process.
        clock: Wall time in seconds.
    """

    name = "host"
    min_period_s = 0.1

    def __init__(
        self, *, pid: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = psutil.Process(pid)
        self._clock = clock
        self._cores = usable_cores()
        self._total_bytes = host_memory_bytes()
        self._has_sensor = _package_temperature() is not None
        self._tree: list[psutil.Process] = []
        self._tree_time = -_TREE_REFRESH_S
        self._workers: dict[psutil.Process, WorkerThreads] = {}
        self._busy_s = _busy_s()
        self._read_time = self._clock()
        self._cpu_s, _ = self._measure(self._read_time)
        self._waited_s = self._waiting()
        self.name = f"host ({self._cores:g} cores)"

    def read(self) -> DeviceReading:
        """Reads the process tree once.

        Raises:
            ProbeError: The root process is gone.
        """
        now = self._clock()
        cpu_s, memory_bytes = self._measure(now)
        waited_s = self._waiting()
        # A process seen for the first time has no earlier value: it counts from the next read.
        used_s = sum(total - self._cpu_s.get(process, total) for process, total in cpu_s.items())
        if now - self._read_time < _SHORTEST_S:
            return self._reading(None, memory_bytes)
        busy_s = _busy_s()
        capacity_s = (now - self._read_time) * self._cores
        others_s = max(busy_s - self._busy_s - used_s, 0.0)
        # At least what was used: the two are counted in ticks and not at the same moment.
        given_s = max(capacity_s - others_s, used_s)
        idle_s = sum(
            total - self._waited_s.get(worker, total) for worker, total in waited_s.items()
        )
        self._cpu_s, self._busy_s, self._read_time = cpu_s, busy_s, now
        self._waited_s = waited_s
        if others_s > _OTHERS * capacity_s:
            idle_s = 0.0
        worked_s = max(used_s - idle_s, 0.0)
        return self._reading(worked_s / given_s if given_s > 0 else None, memory_bytes)

    def _reading(self, utilization: float | None, memory_bytes: int) -> DeviceReading:
        return DeviceReading(
            device_utilization=utilization,
            device_memory_used_bytes=memory_bytes,
            device_memory_total_bytes=self._total_bytes,
            device_temperature_c=_package_temperature() if self._has_sensor else None,
        )

    def close(self) -> None:
        """Nothing to free."""

    def _measure(self, now: float) -> tuple[dict[psutil.Process, float], int]:
        """Processor seconds of each process of the tree, and their resident bytes."""
        try:
            if now - self._tree_time >= _TREE_REFRESH_S:
                self._tree = [self._root, *self._root.children(recursive=True)]
                self._tree_time = now
                self._workers = {process: WorkerThreads(process.pid) for process in self._tree}
        except psutil.NoSuchProcess as error:
            raise ProbeError(f"process {self._root.pid} is gone") from error
        costs = {process: _cost(process) for process in self._tree}
        if costs[self._root] is None:
            raise ProbeError(f"process {self._root.pid} is gone")
        alive = {process: cost for process, cost in costs.items() if cost is not None}
        cpu_s = {process: seconds for process, (seconds, _) in alive.items()}
        return cpu_s, sum(resident for _, resident in alive.values())

    def _waiting(self) -> dict[tuple[psutil.Process, str], float]:
        """Processor seconds that each worker thread of the tree only waited."""
        return {
            (process, thread): seconds
            for process, workers in self._workers.items()
            for thread, seconds in workers.waited_s().items()
        }


def _busy_s() -> float:
    """Processor seconds that anybody used on this process's cores; 0 under a quota of its own.

    Under a quota the share is guaranteed: what others do on the machine takes nothing away.
    """
    if not hasattr(os, "sched_getaffinity") or usable_cores() < len(os.sched_getaffinity(0)):
        return 0.0
    per_core = psutil.cpu_times(percpu=True)
    cores = [per_core[core] for core in os.sched_getaffinity(0) if core < len(per_core)]
    # Linux counts the time of guests in `user` as well.
    return sum(t.user + t.nice + t.system + t.irq + t.softirq + t.steal for t in cores)


def usable_cores() -> float:
    """Cores that this process may use: its affinity, less where a container or job has a quota."""
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    limits = [float(affinity)]
    for folder in _cgroups("cpu"):
        quota = _read_words(folder / "cpu.max") or [
            word
            for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            for word in _read_words(folder / name)
        ]
        if len(quota) == 2 and all(word.isdecimal() and int(word) > 0 for word in quota):
            limits.append(int(quota[0]) / int(quota[1]))
    return min(limits)


def host_memory_bytes() -> int:
    """Memory of the machine, or the limit of a container or batch job where that is smaller."""
    limits = [int(psutil.virtual_memory().total)]
    for folder in _cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            words = _read_words(folder / name)
            if len(words) == 1 and words[0].isdecimal() and int(words[0]) > 0:
                limits.append(int(words[0]))
    return min(limits)


def _cgroups(controller: str) -> Iterator[Path]:
    """Yield the control groups whose limits hold for this process, the innermost first.

    Of version 2 there is one tree, of version 1 one per controller. Inside a container the own
    path may be the host's and not be there: the container's limits then stand at the root.
    """
    try:
        lines = _OWN_CGROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP
        inner = Path(path.lstrip("/"))
        yield from (root / part for part in (inner, *inner.parents) if part != Path())
        yield root


def cpu_name() -> str:
    """Model name of the processor, as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return "unnamed processor"


def _cost(process: psutil.Process) -> tuple[float, int] | None:
    """Processor seconds and resident bytes; None where the process has ended or is another's."""
    try:
        with process.oneshot():
            times = process.cpu_times()
            return times.user + times.system, int(process.memory_info().rss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _read_words(path: Path) -> list[str]:
    """Words of a one-line kernel file; empty where there is no such file."""
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _package_temperature() -> float | None:
    """Temperature of the processor in degrees Celsius; None where there is no sensor."""
    if not hasattr(psutil, "sensors_temperatures"):
        return None
    sensors = psutil.sensors_temperatures()
    for name in _SENSORS:
        if sensors.get(name):
            return float(sensors[name][0].current)
    return None
