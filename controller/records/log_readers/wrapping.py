"""What launchers and log collectors put in front of a program's own lines.

Containers (`2026-11-30T13:30:00.1Z stdout F `, or one JSON object per line), journald (`Nov 30
13:30:00 host unit[7]: `), torchrun (`[rank3]: `, `[default7]:`), srun (`3: `), mpirun
(`[1,3]<stdout>:`) and Ray (`(Worker pid=7) `), also several of them.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from mindtune.controller.records.log_readers.lines import timestamp

__all__ = ["Line", "unwrap"]

_DOCKER = '{"log":'
_PREFIX = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d\d:\d\d:\d\d \S{1,80} "
    r"[^:\s]{1,80}: "
    r"|\[(?:rank|default) ?(\d{1,6})\]:? ?"
    r"|\[\d{1,6},(\d{1,6})\]<std(?:out|err)>: ?"
    r"|\([\w.]{1,80} pid=\d+(?:, ip=[\d.]+)?\) "
    r"| {0,5}(\d{1,6}): (?=\S| {2})"
)
_MOST = 4
"""Prefixes that are taken from a line."""


class Line(NamedTuple):
    """A program's own line."""

    text: str
    rank: int | None
    """Rank that wrote it, where a launcher says so."""
    stamp: str
    """Text in whose beginning its time stands, if anywhere."""


def unwrap(line: str) -> Line:
    """Return a line without what others put in front of it."""
    stamp = line
    if line.startswith(_DOCKER):
        line, stamp = _from_docker(line)
    rank: int | None = None
    start = 0
    for _ in range(_MOST):
        found = _PREFIX.match(line, start)
        if found is None:
            break
        told = found[1] or found[2] or found[3]
        if told:
            rank = int(told)
        start = found.end()
    return Line(line[start:] if start else line, rank, stamp)


def _from_docker(line: str) -> tuple[str, str]:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return line, line
    text, time = told.get("log"), told.get("time")
    if not isinstance(text, str):
        return line, line
    return text, time if isinstance(time, str) and timestamp(time) is not None else text
