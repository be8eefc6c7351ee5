"""The command line: one function per command, and what each failure exits with.

Exit codes: 0 done; 1 a finding; 2 wrong use or config; 3 a run failed. Commands import what they
need when they run, so that `--help` and the light commands start without MindSpore.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence

import click
import typer

from mindtune.controller.cli.commands import COMMANDS
from mindtune.controller.cli.console import err
from mindtune.controller.errors import ConfigError
from mindtune.policies.errors import PolicyError
from mindtune.search.errors import SearchError

__all__ = ["EXIT_FINDING", "EXIT_RUN_FAILED", "EXIT_WRONG_USE", "build_app", "main", "run"]

EXIT_FINDING = 1
EXIT_WRONG_USE = 2
EXIT_RUN_FAILED = 3
EXIT_INTERRUPTED = 130
"""As shells report an end by Ctrl-C."""


def build_app() -> typer.Typer:
    """Return the application with every command of the table."""
    app = typer.Typer(
        name="mindtune",
        help="Closed-loop auto-tuning controller for MindSpore training.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name, function in COMMANDS.items():
        app.command(name)(function)
    return app


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    command = typer.main.get_command(build_app())
    return _guarded(
        lambda: command.main(args=list(arguments), prog_name="mindtune", standalone_mode=False)
    )


def _guarded(call: Callable[[], object]) -> int:
    try:
        code = call()
    except (ConfigError, PolicyError, SearchError) as error:
        return _refuse(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        err().print(error.format_message(), markup=False)
        return EXIT_WRONG_USE
    except click.UsageError as error:
        hint = f" See `{error.ctx.command_path} --help`." if error.ctx is not None else ""
        return _refuse(error.format_message() + hint)
    except click.ClickException as error:
        return _refuse(error.format_message())
    except (KeyboardInterrupt, click.Abort):
        err().print("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone; Python would complain once more when it closes stdout.
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except Exception:  # noqa: BLE001 - a fault of ours: show it whole, with a code of its own
        traceback.print_exc()
        return EXIT_RUN_FAILED
    return code if isinstance(code, int) else 0


def _refuse(message: str) -> int:
    err().print(f"error: {message}", markup=False, soft_wrap=True)
    return EXIT_WRONG_USE


def run() -> None:
    """Run the process's own command line and exit."""
    sys.exit(main(sys.argv[1:]))
