"""Records that a terminal has wrapped over several lines, put together again.

That needs marks for their begin and end. A line may be broken anywhere, also inside a number, and
another line may stand in between: so the breaks stay to be seen, and no reader takes a value that
one runs through. Where two records are open at once nobody can tell whose the pieces are.
"""

from __future__ import annotations

import re

__all__ = ["Pieces"]

_MOST = 32
"""Lines of one record: a dictionary of many values may be printed one by one."""
_LONGEST = 4096
"""Characters of one record."""


class Pieces:
    """Collects the lines of one record at a time.

    Args:
        begins: What a record begins with, as far as it stands on one line.
        end: What ends it.
    """

    def __init__(self, begins: re.Pattern[str], end: str) -> None:
        self._begins = begins
        self._end = end
        self._lines: list[str] = []
        self._size = 0

    @property
    def is_open(self) -> bool:
        """Whether a record waits for its end."""
        return bool(self._lines)

    def drop(self) -> None:
        """Forget a record that has no end: its writer was killed."""
        self._lines = []

    def take(self, line: str) -> list[str] | None:
        """Return the lines of the record that ends with this one; None: none ends."""
        begins = list(self._begins.finditer(line))
        if begins:
            rest = line[begins[-1].start() :].rstrip("\r\n")
            alone = not self._lines and len(begins) == 1 and self._end not in rest
            self._lines, self._size = [rest] if alone else [], len(rest)
            return None
        if not self._lines:
            return None
        self._lines.append(line.rstrip("\r\n"))
        self._size += len(line)
        if self._end in line:
            whole, self._lines = self._lines, []
            return whole
        if len(self._lines) >= _MOST or self._size > _LONGEST:
            self._lines = []
        return None
