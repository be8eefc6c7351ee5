"""The table of commands: to add one, write its module and name it here."""

from __future__ import annotations

from collections.abc import Callable

from mindtune.controller.cli.doctor import doctor
from mindtune.controller.cli.export import export
from mindtune.controller.cli.init import init
from mindtune.controller.cli.report import report
from mindtune.controller.cli.run import run
from mindtune.controller.cli.space import space

__all__ = ["COMMANDS"]

COMMANDS: dict[str, Callable[..., int]] = {
    "doctor": doctor,
    "init": init,
    "space": space,
    "export": export,
    "run": run,
    "report": report,
}
"""Command name -> function whose signature is its options and whose result is the exit code."""
