"""The text of a log, in pieces of bounded size, whatever file it is in."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers.reader import CUT

__all__ = ["STANDARD_INPUT", "is_stream", "read_lines", "spool", "timestamp"]

STANDARD_INPUT = Path("-")
_LONGEST = 1 << 20
"""Characters; a longer line comes in pieces, so that one without an end needs no memory."""
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Colours, cursor moves and titles of a terminal."""
_BACKSPACES = re.compile(r"\x08+")
_NULS = re.compile("\x00+")
_SAMPLE = 512
"""Bytes that tell the encoding of a file without a byte order mark."""
_MOST_ASCII = 0.4
"""Share of zero bytes at odd or even places from which text is UTF-16: half of them, were it all
ASCII."""
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_COMPRESSIONS: tuple[tuple[bytes, Callable[[Any], Any]], ...] = (
    (b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
    (b"BZh", bz2.BZ2File),
)
_TIME = re.compile(r"(\d{4}[-/]\d\d[-/]\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_HEAD = 120
"""Characters in which a line's own time stands."""


def read_lines(path: Path, *, on_damage: Callable[[], None] | None = None) -> Iterator[str]:
    """Yield the lines of a log without colours, with line ends; longer ones in pieces.

    Compressed by gzip, xz or bzip2; UTF-8 or UTF-16, with a byte order mark or without; bytes that
    are no text (also those of other encodings, in which numbers are the same) are replaced by
    U+FFFD. A carriage return or backspace ends a line, as in a progress bar; zero bytes, which a
    file has where a write was lost, break it off.

    Args:
        path: the log.
        on_damage: called where a compressed log breaks off: it is still being written, or damaged.

    Raises:
        ConfigError: if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            yield from _pieces(_text(file, path))
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, EOFError | zlib.error | lzma.LZMAError | gzip.BadGzipFile) or (
            type(error) is OSError and error.errno is None  # bzip2's word for damage
        ):
            if on_damage is not None:
                on_damage()
            return
        reason = error.strerror or str(error)
        raise ConfigError(f"{path} must be a readable log, but: {reason}.") from None


def is_stream(path: Path) -> bool:
    """Tell whether a log can be read once only: standard input, a pipe."""
    return path == STANDARD_INPUT or path.is_fifo() or path.is_char_device()


def spool(path: Path) -> tempfile._TemporaryFileWrapper[bytes]:
    """Return a file with all that comes out of a stream; it is gone when the object is.

    A log is read twice, first to find its format.

    Raises:
        ConfigError: if it is standard input, and closed.
    """
    kept = tempfile.NamedTemporaryFile(prefix="mindtune-log-")  # noqa: SIM115 - the caller keeps it
    if path == STANDARD_INPUT:
        if sys.stdin is None:
            kept.close()
            raise ConfigError("standard input must be a log, but it is closed; name a file.")
        shutil.copyfileobj(sys.stdin.buffer, kept)
    else:
        with path.open("rb") as stream:
            shutil.copyfileobj(stream, kept)
    kept.flush()
    return kept


def _text(file: IO[bytes], path: Path) -> io.TextIOWrapper:
    start = file.read(8)
    file.seek(0)
    if start.startswith(_ZSTANDARD):
        raise ConfigError(
            f"{path} must be a log, or one compressed by gzip, xz or bzip2, but is compressed by "
            f"zstd; give `zstd -dc {path.name} | mindtune replay -`."
        )
    raw: Any = file
    for magic, opener in _COMPRESSIONS:
        if start.startswith(magic):
            raw = opener(file)
            break
    encoding = _encoding(raw.peek(_SAMPLE)[:_SAMPLE])
    return io.TextIOWrapper(raw, encoding=encoding, errors="replace", newline=None)


def _encoding(sample: bytes) -> str:
    if sample.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    zeros = sample[::2].count(0), sample[1::2].count(0)
    if max(zeros) >= _MOST_ASCII * len(sample) and min(zeros) < max(zeros) / 4:
        return "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"
    return "utf-8-sig"


def _pieces(text: io.TextIOWrapper) -> Iterator[str]:
    while piece := text.readline(_LONGEST):
        if "\x1b" in piece:
            piece = _TERMINAL.sub("", piece)
        if "\x00" in piece:
            *broken, piece = _NULS.split(piece)
            yield from (f"{part}{CUT}\n" for part in broken if part)
        if "\x08" in piece:
            *drawn, piece = _BACKSPACES.split(piece)
            yield from (f"{part}\n" for part in drawn if part)
        yield piece


def timestamp(line: str) -> float | None:
    """Return the time at which a line says it was written, in seconds; None: it says none."""
    found = _TIME.search(line, 0, _HEAD)
    if found is None:
        return None
    day, hours, minutes, seconds, fraction = found.groups()
    since = _midnight(day)
    if since is None:
        return None
    within = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
    return since + within + (float(f"0.{fraction}") if fraction else 0.0)


@lru_cache(maxsize=64)
def _midnight(day: str) -> float | None:
    """Return the seconds at which a day began, the same for every line of it."""
    try:
        moment = datetime.fromisoformat(day.replace("/", "-")).replace(tzinfo=timezone.utc)
    except ValueError:
        return None
    return moment.timestamp()
