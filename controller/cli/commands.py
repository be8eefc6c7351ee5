"""The table of commands: to add one, write its module and name it here."""

from __future__ import annotations

from collections.abc import Callable

from mindtune.controller.cli.compare import compare
from mindtune.controller.cli.demo import demo
from mindtune.controller.cli.doctor import doctor
from mindtune.controller.cli.export import export
from mindtune.controller.cli.gate import gate
from mindtune.controller.cli.init import init
from mindtune.controller.cli.replay import replay
from mindtune.controller.cli.report import report
from mindtune.controller.cli.run import run
from mindtune.controller.cli.search import search
from mindtune.controller.cli.space import space
from mindtune.controller.cli.watch import watch
from mindtune.controller.cli.worker import worker

__all__ = ["COMMANDS"]

COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "init": init,
    "space": space,
    "search": search,
    "worker": worker,
    "export": export,
    "run": run,
    "replay": replay,
    "watch": watch,
    "report": report,
    "compare": compare,
    "gate": gate,
    "doctor": doctor,
}
"""Command name -> function whose signature is its options and whose result is the exit code."""
