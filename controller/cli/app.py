"""The command line: one function per command, and what each failure exits with.

Exit codes: 0 done; 1 a finding; 2 wrong use or config; 3 a run failed. Commands import what they
need when they run, so that `--help` and the light commands start without MindSpore.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import typer

from mindtune.controller.cli.commands import COMMANDS
from mindtune.controller.cli.console import err
from mindtune.controller.errors import ConfigError, NothingFeasibleError
from mindtune.policies.errors import PolicyError
from mindtune.search.errors import SearchError

__all__ = ["EXIT_RUN_FAILED", "EXIT_WRONG_USE", "build_app", "main", "run"]

EXIT_FINDING = 1
EXIT_WRONG_USE = 2
EXIT_RUN_FAILED = 3
EXIT_INTERRUPTED = 130
"""As shells report an end by Ctrl-C."""
EXIT_NO_READER = 128 + signal.SIGPIPE
"""As shells report the end of a program whose output nobody reads any more."""
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class _EndedFromOutsideError(KeyboardInterrupt):
    """A signal other than that of Ctrl-C came; everything ends as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def build_app() -> typer.Typer:
    """Return the application with every command of the table."""
    app = typer.Typer(
        name="mindtune",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @app.callback()
    def _about() -> None:
        """Closed-loop auto-tuning controller for MindSpore training."""

    for name, function in COMMANDS.items():
        app.command(name)(_exiting(function))
    return app


def _exiting(function: Callable[..., int]) -> Callable[..., None]:
    """Turn a command's result, a Ctrl-C, or the end of its reader into the exit code."""

    def interruptible(*args: object, **options: object) -> int:
        try:
            with _ending_like_ctrl_c():
                return function(*args, **options)
        except KeyboardInterrupt as end:
            err().print(f"interrupted by {end}" if str(end) else "interrupted")
            return end.exit_code if isinstance(end, _EndedFromOutsideError) else EXIT_INTERRUPTED

    @functools.wraps(function)
    def command(*args: object, **options: object) -> None:
        try:
            code = interruptible(*args, **options)
        except BrokenPipeError:  # typer would end with 1, which is a finding
            _drop_output()
            code = EXIT_NO_READER
        raise typer.Exit(code)

    return command


@contextlib.contextmanager
def _ending_like_ctrl_c() -> Iterator[None]:
    """Let a batch system's or terminal's end of this process reach its children and records."""

    def end(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # the end has begun
        raise _EndedFromOutsideError(number)

    # What nohup or a caller has set holds; only the main thread may set anything.
    in_main = threading.current_thread() is threading.main_thread()
    taken = [
        number
        for number in _ENDING_SIGNALS
        if in_main and signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        build_app()(args=list(arguments), prog_name="mindtune")
    except SystemExit as end:  # how typer ends, wrong options included (with 2)
        return end.code if isinstance(end.code, int) else 0
    except (ConfigError, PolicyError, SearchError) as error:
        err().print(f"error: {error}", soft_wrap=True)
        return EXIT_WRONG_USE
    except NothingFeasibleError as error:
        err().print(f"error: {error}", soft_wrap=True)
        return EXIT_FINDING
    except OSError as error:  # a name that is too long, a disk that is full or read-only
        where = "" if error.filename is None else f"{str(error.filename)[:200]!r}: "
        err().print(f"error: {where}{error.strerror or error}.", soft_wrap=True)
        return EXIT_WRONG_USE
    except Exception:  # noqa: BLE001 - a fault of ours: show it whole, with a code of its own
        traceback.print_exc()
        return EXIT_RUN_FAILED
    return 0


def _drop_output() -> None:
    """Write nothing further to streams whose reader has gone; Python flushes them at its end."""
    for stream in (sys.stdout, sys.stderr):
        if not _has_reader(stream):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _has_reader(stream: TextIO | None) -> bool:
    try:
        if stream is not None:
            stream.flush()
    except BrokenPipeError:
        return False
    return True


def run() -> None:
    """Run the process's own command line and exit."""
    if sys.stdout is None:  # closed by whoever started this process
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - kept to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal in GBK or ASCII does not know every character; standard error does so anyway.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main(sys.argv[1:]))
