"""Opens logs: their files, their format, their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers.detect import Detection, detect
from mindtune.controller.records.log_readers.fields import Names
from mindtune.controller.records.log_readers.formats import AUTO, READERS, format_named, listing
from mindtune.controller.records.log_readers.lines import STANDARD_INPUT, is_stream, spool
from mindtune.controller.records.log_readers.reader import LogFormat
from mindtune.controller.records.log_readers.several import LOOKED_FOR, logs_in, rank_of, writers
from mindtune.controller.records.log_readers.stream import LogStream
from mindtune.policies.signals import Observation

__all__ = ["LogRecords", "OpenLogs", "open_log", "open_several", "read_log"]

_DESCRIPTORS = (Path("/dev/fd"), Path("/proc/self/fd"))
"""Where a shell puts what `<(command)` prints."""
_SHOWN = 5
"""Files named that were not read."""


@dataclass(frozen=True)
class LogRecords:
    """What a log tells."""

    format: str
    """Name of the format."""
    records: int
    """Data lines understood."""
    observations: tuple[Observation, ...]
    """One per step and segment, in the order of their first line."""


@dataclass(frozen=True)
class OpenLogs:
    """The logs of one run."""

    streams: tuple[LogStream, ...]
    """One per rank; or one after the other, where they differ in their format."""
    ranks: tuple[int, ...] | None = None
    """Rank of each, where they are of the same steps."""
    notes: tuple[str, ...] = ()
    """What to say of files that were not read."""


def read_log(path: Path) -> LogRecords | None:
    """Return what a log tells; None where no reader understands a line of it.

    Raises:
        ConfigError: if the file cannot be read.
    """
    found = detect(path)
    if found is None:
        return None
    stream = LogStream(path, found.format)
    observations = tuple(stream)
    return LogRecords(found.format.name, stream.records, observations)


def open_log(
    path: Path,
    format: str = AUTO,  # noqa: A002 - the option's word
    names: Names | None = None,
) -> LogStream:
    """Return the observations of a log, or of a run's folder.

    Args:
        path: a log, a folder that holds one, or `-` for standard input.
        format: name of a reader, or `auto`.
        names: which of the log's names stand for which signals; None: those that are known.

    Raises:
        ConfigError: if there is no such format or file, if no reader understands it, if the format
            has fixed names and others are given, or if the folder holds the logs of several ranks.
    """
    logs = open_several([path], format, names)
    if len(logs.streams) > 1:
        raise ConfigError(
            f"{path} must hold the log of one process, but holds those of {len(logs.streams)}; "
            "name one of them."
        )
    return logs.streams[0]


def open_several(
    paths: Sequence[Path],
    format: str = AUTO,  # noqa: A002 - the option's word
    names: Names | None = None,
) -> OpenLogs:
    """Return the observations of a run, from its log, its logs or its folder.

    Args:
        paths: one log or folder, or several logs: of ranks, or one after the other; `-` alone is
            standard input.
        format: name of a reader, or `auto`.
        names: which of the log's names stand for which signals; None: those that are known.

    Raises:
        ConfigError: if there is no such format or file, if no reader understands one of them, or
            if the format has fixed names and others are given.
    """
    chosen = None if format == AUTO else format_named(format)
    if names is not None and chosen is not None and chosen.mapped is None:
        able = ", ".join(entry.name for entry in READERS if entry.mapped is not None)
        raise ConfigError(
            f"--map must go with a format that takes names ({able}), but the names of "
            f"{chosen.name} are fixed; leave out --map or give another --format."
        )
    if len(paths) == 1 and not paths[0].is_dir():
        return OpenLogs((_open_one(_existing(paths[0]), chosen, names),))
    found: dict[Path, Detection | None] = {}
    for path in logs_in(paths[0]) if len(paths) == 1 else map(_file, paths):
        found[path] = None if chosen is not None else detect(path, names)
        if chosen is None and found[path] is None and len(paths) > 1:
            raise _unknown(path, names)
    if not found:
        raise ConfigError(
            f"{paths[0]} must be the folder of a run, with one of {', '.join(LOOKED_FOR)} in it, "
            "but it has none of these; name the log itself."
        )
    if chosen is None and len(paths) == 1:
        return _in_folder(paths[0], found, names)
    return _put_together(found, chosen, names)


def _existing(path: Path) -> Path:
    if path == STANDARD_INPUT or path.parent in _DESCRIPTORS:
        return path
    if not path.exists():
        raise ConfigError(f"{path} must be a log or the folder of a run, but it does not exist.")
    if is_stream(path):
        raise ConfigError(
            f"{path} must be a file, since a log is read twice, but it is a pipe; write what "
            "comes out of it into a file first, or give it as standard input (`-`)."
        )
    return path


def _file(path: Path) -> Path:
    if path == STANDARD_INPUT:
        raise ConfigError("standard input must be the only log, but others are given too.")
    if path.is_dir():
        raise ConfigError(
            f"several logs must be files, but {path} is a folder; name the logs in it."
        )
    return _existing(path)


def _open_one(path: Path, chosen: LogFormat | None, names: Names | None) -> LogStream:
    kept, given = None, path
    if is_stream(path):
        kept = spool(path)
        path = Path(kept.name)
    if chosen is not None:
        return LogStream(path, chosen, names=names, kept=kept)
    found = detect(path, names)
    if found is None:
        raise _unknown(given, names)
    return LogStream(path, found.format, detection=found, names=names, kept=kept)


def _in_folder(folder: Path, found: dict[Path, Detection | None], names: Names | None) -> OpenLogs:
    """Read those files of a folder that have the format which tells most."""
    told: Counter[str] = Counter()
    for detection in found.values():
        if detection is not None:
            told[detection.format.name] += 1 + detection.losses
    if not told:
        raise _unknown(folder, names)
    best = told.most_common(1)[0][0]
    of_best = {p: entry for p, entry in found.items() if entry and entry.format.name == best}
    other = [path for path in found if path not in of_best]
    logs = _put_together(of_best, None, names)
    return OpenLogs(logs.streams, logs.ranks, _not_read(other, len(found), best))


def _put_together(
    found: Mapping[Path, Detection | None], chosen: LogFormat | None, names: Names | None
) -> OpenLogs:
    formats: dict[Path, LogFormat] = {}
    for path, entry in found.items():
        if chosen is not None:
            formats[path] = chosen
        elif entry is not None:
            formats[path] = entry.format
    if len({entry.name for entry in formats.values()}) > 1:
        return OpenLogs(tuple(
            LogStream(path, entry, detection=found[path], names=names)
            for path, entry in formats.items()
        ))  # fmt: skip
    chains = writers(list(formats), next(iter(formats.values())))
    streams = tuple(
        LogStream(chain, formats[chain[0]], detection=found[chain[0]], names=names)
        for chain in chains
    )
    if len(streams) == 1:
        return OpenLogs(streams)
    numbers = [(rank_of(chain[0]) or (0,))[-1] for chain in chains]
    unique = len(set(numbers)) == len(numbers)
    return OpenLogs(streams, tuple(numbers) if unique else tuple(range(len(chains))))


def _not_read(other: Sequence[Path], files: int, best: str) -> tuple[str, ...]:
    if not other:
        return ()
    shown = ", ".join(path.name for path in other[:_SHOWN])
    more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
    told = f"{len(other)} of {files} files tell of no step in the format {best}"
    return (f"{told} and were not read: {shown}{more}.",)


def _unknown(path: Path, names: Names | None) -> ConfigError:
    mapped = "" if names is None else " Of these, those with fixed names take no --map."
    name = "standard input" if path == STANDARD_INPUT else path
    return ConfigError(
        f"{name} must be a training log of a known format, but no reader understands a "
        f"line of it; known are:\n{listing()}\nGive --format if one of them should fit, name its "
        f"values by --map, or write them to a CSV with a header such as step,loss,grad_norm."
        f"{mapped}"
    )
