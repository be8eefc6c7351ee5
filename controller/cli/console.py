"""Where the commands print: one JSON document on standard output, all else on standard error."""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO

from pydantic import BaseModel
from rich.console import Console

__all__ = ["err", "out", "print_json"]


def out() -> Console:
    """Return a console on standard output, for results that a person reads."""
    return _plain(sys.stdout)


def err() -> Console:
    """Return a console on standard error, for progress and messages."""
    return _plain(sys.stderr)


def _plain(stream: TextIO) -> Console:
    # Reasons and messages hold brackets and colons of the user's: none of them is markup.
    return Console(file=stream, highlight=False, markup=False, emoji=False)


def print_json(document: BaseModel | dict[str, Any] | list[Any]) -> None:
    """Print exactly one JSON document on standard output."""
    if isinstance(document, BaseModel):
        text = document.model_dump_json(by_alias=True, indent=2)
    else:
        text = json.dumps(document, indent=2, allow_nan=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
