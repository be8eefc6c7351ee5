"""Texts of other programs, made fit for a terminal."""

from __future__ import annotations

import re

__all__ = ["printable"]

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that steer a terminal or cannot be written; messages of other programs hold them."""


def printable(text: str) -> str:
    """Return a text with its control characters spelled out."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
