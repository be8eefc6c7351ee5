"""From what MindSpore's profiler has written to shares of a step.

On CPU it leaves `cpu_op_execute_timestamp_*.txt`: per operator a line of `name;kind;` and its runs
as `start,duration,thread`, in nanoseconds since the epoch and milliseconds (seen with MindSpore
2.10.0, graph and PyNative mode). On Ascend its analysis leaves `step_trace_time.csv` with the
microseconds of each step that went into computing, communication and both at once, and
`communication.json` with what each operator sent (as `ascend_step_trace_time_viewer.py` and
`ascend_communication_viewer.py` in `mindspore/profiler/analysis/viewer` write them; no Ascend was
at hand).
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "KernelRun",
    "Shares",
    "Span",
    "kernel_shares",
    "read_ascend_shares",
    "read_cpu_kernels",
]

Span = tuple[float, float]
"""Begin and end in seconds."""

_COMMUNICATION = re.compile(
    r"(?:_(?:MiniStep|MicroStep|Host))?AllGatherV?|AllReduce|Reduce|(?:_Host)?ReduceScatterV?|"
    r"Broadcast|_AllSwap|AlltoAll(?:V|VC)?|NeighborExchange(?:V2)?|Collective(?:Scatter|Gather)|"
    r"Barrier|Send|Receive|BatchISendIRecv|(?:InnerComm|DistComm|hcom_).*"
)
"""Kernels of MindSpore's `ops/operations/comm_ops.py`, of its `mint.distributed`, and of HCCL."""
_NUMBER = re.compile(r"[-_]op\d*$")


class KernelRun(NamedTuple):
    """One run of a kernel."""

    kind: str
    begin_s: float
    end_s: float


class Shares(NamedTuple):
    """Shares of the profiled time; None: not told."""

    compute: float | None = None
    communication: float | None = None
    overlap: float | None = None
    """Of the communication."""
    busy: float | None = None
    """Any of the two."""
    kernels: tuple[tuple[str, float], ...] = ()
    bytes_per_s: float | None = None
    """What this rank sent per second of sending."""


def read_cpu_kernels(folder: Path) -> list[KernelRun]:
    """Return what ran, from the files below a folder; lines that cannot be read are left out."""
    runs: list[KernelRun] = []
    for file in sorted(folder.rglob("cpu_op_execute_timestamp_*.txt")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            runs += _runs(line)
    return runs


def _runs(line: str) -> Iterator[KernelRun]:
    name, _, rest = line.partition(";")
    kind = _NUMBER.sub("", name.rsplit("/", 1)[-1])
    for run in rest.rpartition(";")[2].split():
        fields = run.split(",")
        try:
            begin_s, lasted_s = int(fields[0]) / 1e9, float(fields[1]) / 1e3
        except (ValueError, IndexError):
            continue
        yield KernelRun(kind, begin_s, begin_s + lasted_s)


def kernel_shares(runs: Iterable[KernelRun], steps: Sequence[Span], *, most: int = 5) -> Shares:
    """Return how much of the steps' time kernels took.

    Args:
        runs: In any order; those that run side by side count once, but for `kernels`.
        steps: The profiled steps; what ran outside of them does not count.
        most: Types of kernels to name.
    """
    total_s = sum(end - begin for begin, end in steps)
    computing: list[Span] = []
    exchanging: list[Span] = []
    by_kind: defaultdict[str, float] = defaultdict(float)
    for run in runs:
        parts = _inside((run.begin_s, run.end_s), steps)
        if not parts:
            continue
        by_kind[run.kind] += sum(end - begin for begin, end in parts)
        (exchanging if _COMMUNICATION.fullmatch(run.kind) else computing).extend(parts)
    if total_s <= 0 or not (computing or exchanging):
        return Shares()
    compute_s, exchange_s = _covered(computing), _covered(exchanging)
    busy_s = _covered([*computing, *exchanging])
    ordered = sorted(by_kind.items(), key=lambda entry: entry[1], reverse=True)
    both_s = compute_s + exchange_s - busy_s
    return Shares(
        compute=compute_s / total_s,
        communication=exchange_s / total_s,
        overlap=both_s / exchange_s if exchange_s > 0 else None,
        busy=busy_s / total_s,
        kernels=tuple((kind, spent / total_s) for kind, spent in ordered[:most]),
    )


def _inside(span: Span, steps: Sequence[Span]) -> list[Span]:
    cut = [(max(span[0], begin), min(span[1], end)) for begin, end in steps]
    return [(begin, end) for begin, end in cut if end > begin]


def _covered(spans: list[Span]) -> float:
    """Return the length of the union."""
    covered = reached = 0.0
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def read_ascend_shares(folder: Path, total_s: float) -> Shares | None:
    """Return what the analysis says; None as long as it has not written its table.

    Args:
        folder: What the profiler was given.
        total_s: Time of the profiled steps.
    """
    table = next(iter(sorted(folder.rglob("step_trace_time.csv"))), None)
    if table is None or total_s <= 0:
        return None
    with table.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    computing, exchanging, both = (
        sum(_number(row.get(column)) for row in rows) / 1e6 / total_s
        for column in ("Computing", "Communication", "Overlapped")
    )
    return Shares(
        compute=computing,
        communication=exchanging,
        overlap=both / exchanging if exchanging > 0 else None,
        busy=computing + exchanging - both,
        bytes_per_s=_bytes_per_s(folder),
    )


def _bytes_per_s(folder: Path) -> float | None:
    """Return the bandwidth over all operators; None: the profiler's level tells none."""
    sent_bytes = sending_s = 0.0
    for file in sorted(folder.rglob("communication.json")):
        try:
            steps = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            return None
        for groups in steps.values():
            for operators in groups.values():
                total = operators.get("Total Op Info", {})
                links = total.get("Communication Bandwidth Info", {}).values()
                sent_bytes += 1e6 * sum(link.get("Transit Size(MB)", 0.0) for link in links)
                spent = total.get("Communication Time Info", {}).get("Transit Time(ms)", 0.0)
                sending_s += spent / 1e3
    return sent_bytes / sending_s if sent_bytes and sending_s else None


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
