"""What a comma inside a number means: it groups thousands in one log, and is the point in another.

`1,234.5` and `1,234,567` are grouped, `2,51` and `0,125` are decimal; `1,234` alone is either, and
is taken only once the log has shown its way of writing.
"""

from __future__ import annotations

import re

__all__ = ["COMMA_NUMBER", "Commas"]

COMMA_NUMBER = r"[-+]?\d{1,15}(?:,\d+)+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_GROUPED = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_DECIMAL = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")
_POINT = re.compile(r"\d\.\d")


class Commas:
    """Reads numbers with commas in one log."""

    def __init__(self) -> None:
        self._points = False
        self._decimal = False

    def note(self, line: str) -> None:
        """Take in a data line: a decimal point in it tells that commas are none."""
        if not self._points and _POINT.search(line):
            self._points = True

    def plain(self, text: str) -> str | None:
        """Return a number without its commas; None: it can be read in two ways, or in none."""
        grouped = _GROUPED.fullmatch(text) is not None
        decimal = _DECIMAL.fullmatch(text) is not None
        if grouped and decimal:
            if self._points == self._decimal:
                return None
            grouped, decimal = self._points, self._decimal
        if decimal:
            if self._points:
                return None
            self._decimal = True
            return text.replace(",", ".")
        return text.replace(",", "") if grouped else None
