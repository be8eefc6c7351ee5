"""Find, measure and end the processes of a trial.

A trial's processes are found in two ways that do not depend on each other: as descendants of the
supervisor (which adopts orphans, so a double fork does not escape) and by a mark in their
environment (which survives the supervisor's own death). Process groups are of no use here:
msrun starts every rank in a session of its own. Linux only; standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Process", "adopt_orphans", "descendants", "die_with_parent", "end_processes",
           "identify", "is_running", "marked", "peak_rss_bytes", "rss_bytes"]  # fmt: skip

_PROC = Path("/proc")
_SCAN_PAUSE_S = 0.05
_KILL_LIMIT_S = 30.0
"""Longest time to go on sending SIGKILL: a process in uninterruptible I/O dies only after it."""


# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have this process killed when its parent ends: for `preexec_fn` of a child."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


class Process(NamedTuple):
    """A process, told apart from a later one with the same id by its start time."""

    pid: int
    start_ticks: int
    """Clock ticks since boot."""


class _Stat(NamedTuple):
    state: str
    parent: int
    start_ticks: int


def _stat(pid: int) -> _Stat | None:
    """Return the needed fields of /proc/PID/stat, or None when the process is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The command name may hold spaces and brackets, so fields count from the last bracket:
    # state is field 3 of proc(5), ppid field 4, starttime field 22.
    fields = text[text.rindex(b")") + 2 :].split()
    return _Stat(fields[0].decode(), int(fields[1]), int(fields[19]))


def identify(pid: int) -> Process | None:
    """Return the living process of an id; None: there is none."""
    stat = _stat(pid)
    return None if stat is None or stat.state in "ZX" else Process(pid, stat.start_ticks)


def is_running(process: Process) -> bool:
    """Tell whether a process has not ended."""
    return identify(process.pid) == process


def _alive() -> dict[int, _Stat]:
    """Return every process that can still run; zombies only wait to be reaped."""
    found = {}
    for name in os.listdir(_PROC):  # noqa: PTH208 - names only, many times a second
        if name.isdecimal() and (stat := _stat(int(name))) and stat.state not in "ZX":
            found[int(name)] = stat
    return found


def descendants(root: int) -> set[Process]:
    """Return all living descendants of process `root`, without `root` itself."""
    alive = _alive()
    children: dict[int, list[int]] = {}
    for pid, stat in alive.items():
        children.setdefault(stat.parent, []).append(pid)
    found: set[Process] = set()
    open_pids = [root]
    while open_pids:
        for pid in children.get(open_pids.pop(), ()):
            found.add(Process(pid, alive[pid].start_ticks))
            open_pids.append(pid)
    return found


def marked(entry: str, *, named: str | None = None) -> set[Process]:
    """Return all living processes that were started with `entry` ("NAME=value") set.

    The calling process is left out. Processes of other users are not seen.

    Args:
        entry: of the environment.
        named: variable that they have besides, whatever its value; None: none.
    """
    wanted = entry.encode()
    prefix = b"" if named is None else f"{named}=".encode()
    found = set()
    for pid, stat in _alive().items():
        if pid == os.getpid():
            continue
        try:
            environment = (_PROC / str(pid) / "environ").read_bytes()
        except OSError:
            continue
        entries = environment.split(b"\0")
        if wanted in entries and any(other.startswith(prefix) for other in entries):
            found.add(Process(pid, stat.start_ticks))
    return found


def _send(process: Process, number: int) -> None:
    stat = _stat(process.pid)
    if stat is not None and stat.start_ticks == process.start_ticks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def end_processes(
    find: Callable[[], set[Process]],
    *,
    grace_s: float,
    between: Callable[[], bool] = lambda: False,
) -> int:
    """End every process that `find` returns: SIGTERM, `grace_s` seconds, then SIGKILL.

    Killing goes on until `find` returns nothing, so processes that are started meanwhile end too.

    Args:
        find: looks the processes up afresh.
        grace_s: time to end by themselves; 0 kills at once.
        between: called between two looks, to collect ended children; true cuts the grace short.

    Returns:
        The number of processes that are left: 0 but for those that no signal reaches.
    """
    # Collected before the first signal: once a parent is gone its children are harder to find.
    targets = find()
    if grace_s > 0:
        for process in targets:
            _send(process, signal.SIGTERM)
        end = time.monotonic() + grace_s
        while targets and time.monotonic() < end:
            time.sleep(_SCAN_PAUSE_S)
            if between():
                break
            targets = find()
    end = time.monotonic() + _KILL_LIMIT_S
    while targets and time.monotonic() < end:
        for process in targets:
            _send(process, signal.SIGKILL)
        time.sleep(_SCAN_PAUSE_S)
        between()
        targets = find()
    return len(targets)


def _status_bytes(pid: int, key: bytes) -> int:
    """Return a kB entry of /proc/PID/status in bytes; 0 when the process is gone."""
    try:
        text = (_PROC / str(pid) / "status").read_bytes()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process now; 0 when it is gone."""
    return _status_bytes(pid, b"VmRSS:")


def peak_rss_bytes(pid: int) -> int:
    """Return the high-water mark of a process's resident memory; 0 when it is gone."""
    return _status_bytes(pid, b"VmHWM:")
