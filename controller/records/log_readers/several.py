"""A log in several files: which are of ranks, and which follow each other (rotated, resumed)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from mindtune.controller.records.log_readers.reader import LogFormat
from mindtune.controller.records.log_readers.stream import LogStream

__all__ = ["LOOKED_FOR", "in_time_order", "logs_in", "rank_of", "writers"]

LOOKED_FOR = ("signals.csv", "trainer_state.json", "*.log", "*.txt", "*.out", "*.jsonl",
              "event files")  # fmt: skip
"""What of a folder is read: the first of our own, the Trainer's, logs, TensorBoard's."""
_RANK = re.compile(
    r"(?:rank|worker|device|proc|process|npu|gpu|card|node)[_\-.]?(\d{1,6})(?!\d)", re.IGNORECASE
)
_STANDARD = ("stdout", "stderr")
"""Files that torchrun puts into a folder per rank that is but its number."""
_ROTATED = re.compile(r"\.(\d{1,3})(?:\.(?:gz|xz|bz2))?$")
_DIGITS = re.compile(r"(\d+)")
_NEAR_S = 60.0
"""Ranks tell of one step within a minute, the first one, which compiles, included."""
_LOGS = re.compile(
    r"\.(?:log|txt|out|err|jsonl|ndjson)(?:\.\d{1,3})?(?:\.(?:gz|xz|bz2))?$", re.IGNORECASE
)
_DEEPEST = 3
"""Folders below the given one in which logs are looked for."""
_EVENTS = "*tfevents*"


def rank_of(path: Path) -> tuple[int, ...]:
    """Return the numbers of node and rank that a path names; nothing, if it names none."""
    own = _RANK.findall(path.name)
    above = _RANK.findall(path.parent.name)
    if path.name.startswith(_STANDARD) and path.parent.name.isdigit():
        above = [path.parent.name]
    return tuple(int(part) for part in (*above, *own))


def in_time_order(paths: Iterable[Path]) -> list[Path]:
    """Return files that are named alike in the order of their numbers, others as given.

    Rotated ones come from the highest number down: `log.2, log.1, log`.
    """
    given = list(paths)
    bases = {_DIGITS.sub("", str(_base(path))) for path in given}
    return sorted(given, key=_order) if len(bases) == 1 else given


def _base(path: Path) -> Path:
    rotated = _ROTATED.search(path.name)
    return path.with_name(path.name[: rotated.start()]) if rotated else path


def _order(path: Path) -> tuple[list[tuple[int, str]], int]:
    rotated = _ROTATED.search(path.name)
    parts = _DIGITS.split(str(_base(path)))
    numbers = [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
    return numbers, -int(rotated[1]) if rotated else 0


def writers(paths: Sequence[Path], format: LogFormat) -> list[list[Path]]:  # noqa: A002
    """Return files by the rank that wrote them, those of one rank in the order of time.

    The ranks are told by the names of the files, or else by their first lines: the same step
    within a minute.

    Args:
        paths: at least one.
        format: their format.
    """
    ranks = {path: rank_of(path) for path in paths}
    if len(set(ranks.values())) > 1:
        ordered = sorted(paths, key=ranks.__getitem__)
        chains = [list(same) for _, same in groupby(ordered, key=ranks.__getitem__)]
        return [_chained(chain, format) for chain in chains]
    firsts = [_first(path, format) for path in paths]
    steps = {step for step, _ in firsts}
    times = [written_s for _, written_s in firsts if written_s is not None]
    starts_alike = len(paths) > 1 and len(steps) == 1 and len(times) == len(paths)
    if starts_alike and max(times) - min(times) <= _NEAR_S:
        return [[path] for path in in_time_order(paths)]
    return [_chained(paths, format)]


def _chained(paths: Sequence[Path], format: LogFormat) -> list[Path]:  # noqa: A002
    ordered = in_time_order(paths)
    if len(ordered) == 1:
        return ordered
    times = {path: _first(path, format)[1] for path in ordered}
    if any(time is None for time in times.values()):
        return ordered
    return sorted(ordered, key=lambda path: times[path] or 0.0)


def _first(path: Path, format: LogFormat) -> tuple[int | None, float | None]:  # noqa: A002
    """Return step and time of the first record of a file."""
    for timed in LogStream(path, format).timed_records():
        return timed.record.observation.step, timed.written_s
    return None, None


def logs_in(folder: Path) -> list[Path]:
    """Return the files of a folder that may tell of its run; nothing, if there are none.

    Our own signals.csv, the Trainer's state (of the newest checkpoint) or, where there is neither,
    every log, also in folders of ranks; else TensorBoard's event files.
    """
    own, state = (folder / name for name in LOOKED_FOR[:2])
    newest_first = in_time_order(folder.glob(f"checkpoint-*/{state.name}"))[::-1]
    for path in (own, state, *newest_first):
        if path.is_file():
            return [path]
    found = [path for path in _below(folder, _DEEPEST) if _LOGS.search(path.name)]
    return found or sorted(path for path in folder.rglob(_EVENTS) if path.is_file())


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file():
            if path.stat().st_size:
                yield path
        elif path.is_dir() and depth > 0 and not path.name.startswith("."):
            yield from _below(path, depth - 1)
