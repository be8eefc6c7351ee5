"""Read the peak of MindSpore's memory pool from the log that it writes at exit.

With `MS_SUBMODULE_LOG_v="{PRE_ACT:1}"` every MindSpore process logs, when it ends normally, a
line `... PRE_ACT(PID,...) ... Common mem pool info: ... peak used mem:534M, ...`. It is the
measure to search with: exactly linear in the batch and falling with recompute, where resident
memory on CPU is dominated by graph compilation. A killed process has no such line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from mindtune.controller.trials.failure_text import read_tail

__all__ = ["log_environment", "pool_peaks", "worst_pool_peak"]

_MODULE = "PRE_ACT"
_LINE = re.compile(
    r"^\[INFO\] PRE_ACT\((?P<pid>\d+),.*mem pool info:.*?peak used mem:(?P<peak>\d+)M",
    re.MULTILINE,
)
_MEBIBYTE = 1 << 20


def log_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make MindSpore log its pool, given those that are set already.

    Log levels that the user chose for other modules are kept.
    """
    levels = environment.get("MS_SUBMODULE_LOG_v", "").strip().strip("{}").strip()
    kept = [entry for entry in levels.split(",") if entry and not entry.startswith(_MODULE + ":")]
    return {"MS_SUBMODULE_LOG_v": "{" + ",".join([*kept, f"{_MODULE}:1"]) + "}"}


def pool_peaks(text: str) -> dict[int, int]:
    """Return process id -> peak of its pool in bytes (MindSpore rounds to 2^20)."""
    peaks: dict[int, int] = {}
    for match in _LINE.finditer(text):
        pid = int(match["pid"])
        peaks[pid] = max(peaks.get(pid, 0), int(match["peak"]) * _MEBIBYTE)
    return peaks


def worst_pool_peak(logs: Iterable[Path], *, num_ranks: int) -> int | None:
    """Return the largest pool peak over the ranks, in bytes.

    None when fewer than `num_ranks` processes logged one, or when the largest is below 2^20
    bytes: some ranks' figures are not the worst rank's, and an unused pool is no measurement.
    """
    peaks: dict[int, int] = {}
    for path in logs:
        peaks.update(pool_peaks(read_tail(path)))
    worst = max(peaks.values(), default=0)
    return worst if len(peaks) >= num_ranks and worst > 0 else None
