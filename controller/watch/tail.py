"""Follows a file that somebody else appends to."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["Tail"]


class Tail:
    """The whole lines of a growing text file, each once.

    A line that is half written waits until it is whole. A file that is missing has no lines yet;
    one that was replaced or cut is read from its start again.

    Args:
        path: the file.
        most_bytes: of a longer file only the end is read at first, from a whole line on.
    """

    def __init__(self, path: Path, *, most_bytes: int = 4 * 2**20) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._partial = b""
        self.head = ""
        """The first line, once there is one."""
        self.started_over = False
        """Whether the last call began with the start of the file."""
        self.modified_s: float | None = None
        """When somebody wrote last, in seconds since 1970; None: never."""

    def lines(self) -> list[str]:
        """Return the lines that were completed since the last call, without the first of all."""
        self.started_over = False
        try:
            if not self._path.is_file():  # a pipe would be waited for
                return []
            with self._path.open("rb") as file:
                return self._read(file.fileno())
        except OSError:  # gone, or not readable just now
            return []

    def _read(self, handle: int) -> list[str]:
        status = os.fstat(handle)
        self.modified_s = status.st_mtime
        identity = (status.st_dev, status.st_ino)
        if identity != self._identity or status.st_size < self._offset:
            self._identity = identity
            self._offset = 0
            self._partial = b""
            self.head = ""
            self.started_over = True
        skipped = False
        if self._offset == 0:
            first = os.pread(handle, 2**20, 0)
            end = first.find(b"\n")
            if end < 0:
                return []
            self.head = _text(first[: end + 1])
            self._offset = end + 1
            if status.st_size - self._offset > self._most_bytes:
                self._offset = status.st_size - self._most_bytes
                skipped = True
        chunk = os.pread(handle, max(0, status.st_size - self._offset), self._offset)
        self._offset += len(chunk)
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        return [_text(line + b"\n") for line in whole[1 if skipped else 0 :]]


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")
