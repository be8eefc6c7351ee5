"""The text of a log, in pieces of bounded size, whatever file it is in."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from mindtune.controller.errors import ConfigError

__all__ = ["read_lines", "timestamp"]

_LONGEST = 1 << 20
"""Characters; a longer line comes in pieces, so that one without an end needs no memory."""
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x08\x00]")
"""Colours, cursor moves and titles of a terminal."""
_GZIP = b"\x1f\x8b"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_TIME = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_HEAD = 120
"""Characters in which a line's own time stands."""


def read_lines(path: Path, *, on_damage: Callable[[], None] | None = None) -> Iterator[str]:
    """Yield the lines of a log without colours, with line ends; longer ones in pieces.

    Compressed by gzip, UTF-8 or UTF-16, with a byte order mark or without; bytes that are no text
    are replaced. A carriage return ends a line, as in a progress bar.

    Args:
        path: the log.
        on_damage: called where a compressed log breaks off: it is still being written, or damaged.

    Raises:
        ConfigError: if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            yield from _pieces(_text(file))
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
            if on_damage is not None:
                on_damage()
            return
        if isinstance(error, io.UnsupportedOperation):
            raise ConfigError(
                f"{path} must be a file, since a log is read twice, but it is a pipe; write what "
                "comes out of it into a file first."
            ) from None
        reason = error.strerror or str(error)
        raise ConfigError(f"{path} must be a readable log, but: {reason}.") from None


def _text(file: IO[bytes]) -> io.TextIOWrapper:
    file.seek(0)  # refused by a pipe, which would be waited for
    start = file.read(2)
    file.seek(0)
    raw: IO[bytes] | gzip.GzipFile = file
    if start == _GZIP:
        raw = gzip.GzipFile(fileobj=file)
        start = b""
    encoding = "utf-16" if start in _UTF16 else "utf-8-sig"
    return io.TextIOWrapper(
        raw,
        encoding=encoding,
        errors="replace",
        newline=None,
    )


def _pieces(text: io.TextIOWrapper) -> Iterator[str]:
    while piece := text.readline(_LONGEST):
        if "\x1b" in piece or "\x00" in piece or "\x08" in piece:
            piece = _TERMINAL.sub("", piece)
        yield piece


def timestamp(line: str) -> float | None:
    """Return the time at which a line says it was written, in seconds; None: it says none."""
    found = _TIME.search(line, 0, _HEAD)
    if found is None:
        return None
    *parts, fraction = found.groups()
    try:
        moment = datetime(*(int(part) for part in parts), tzinfo=timezone.utc)  # type: ignore[arg-type,misc]
    except ValueError:
        return None
    return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
