"""An append-only text file that stays readable after a kill."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

from mindtune.controller.errors import ConfigError

__all__ = ["cut_partial_line", "open_append"]

_BLOCK = 65536


def cut_partial_line(path: Path) -> None:
    """Cut off a last line without its end, which a killed writer left: nothing is glued to it."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - _BLOCK)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)


def open_append(path: Path) -> TextIO:
    """Open a file for whole lines at its end, in UTF-8; made where it is missing.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            cut_partial_line(path)
        return path.open("a", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(
            f"{path} must be writable, but: {error.strerror}; choose another folder."
        ) from None
