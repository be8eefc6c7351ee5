"""Where the commands print: one JSON document on standard output, all else on standard error."""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO

from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from mindtune.controller.printable import printable

__all__ = ["err", "out", "print_json"]

_NARROWEST = 40
"""Columns of the narrowest terminal that tables are laid out for."""


class _Plain(Console):
    """Spells control characters out; tells, and does not end, what has lost its reader."""

    def on_broken_pipe(self) -> None:
        """Let the error go on, where rich ends the process with a code of its own."""
        raise  # noqa: PLE0704 - rich calls this while it handles the error

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text without control characters."""
        return super().render_str(printable(text), **options)


def out() -> Console:
    """Return a console on standard output, for results that a person reads."""
    return _plain(sys.stdout)


def err() -> Console:
    """Return a console on standard error, for progress and messages."""
    return _plain(sys.stderr)


def _plain(stream: TextIO) -> Console:
    # Reasons and messages hold brackets and colons of the user's: none of them is markup.
    console = _Plain(file=stream, highlight=False, markup=False, emoji=False)
    # A window, or COLUMNS, may be of any width; below this one tables lose their cells.
    if console.width < _NARROWEST:  # noqa: PLR1730 - a width that is set follows no resize
        console.width = _NARROWEST
    return console


def print_json(document: BaseModel | dict[str, Any] | list[Any]) -> None:
    """Print exactly one JSON document on standard output."""
    if isinstance(document, BaseModel):
        text = document.model_dump_json(by_alias=True, indent=2)
    else:
        text = json.dumps(document, indent=2, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        # Only JSON's own escapes are JSON, those of the stream are not.
        text = json.dumps(json.loads(text), indent=2)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
