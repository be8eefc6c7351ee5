"""The table of commands: to add one, write its module and name it here."""

from __future__ import annotations

from collections.abc import Callable

from mindtune.controller.cli.doctor import doctor

__all__ = ["COMMANDS"]

COMMANDS: dict[str, Callable[..., int]] = {
    "doctor": doctor,
}
"""Command name -> function whose signature is its options and whose result is the exit code."""
