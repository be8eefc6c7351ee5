"""`mindtune watch`: a run or a study, live, from its files alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mindtune.controller.cli.console import out

if TYPE_CHECKING:
    from mindtune.controller.watch.run_status import RunStatus, RunWatcher
    from mindtune.controller.watch.study_status import StudyWatcher

__all__ = ["watch"]

EXIT_FINDING = 1
EXIT_RUN_FAILED = 3
_LINE_EVERY_S = 10.0
"""Where there is no terminal: between two lines that say where the run is."""


def watch(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run or a study.", metavar="RUN|STUDY")
    ],
    *,
    once: Annotated[bool, typer.Option("--once", help="Say how it is now, and end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> int:
    """Show a run or a study while it goes on, until it ends; only reads its files.

    Without a terminal it prints plain lines. Exit code 0: it goes on or ended ok; 1: stopped by a
    policy; 3: it failed, or its process is gone.
    """
    from mindtune.controller.errors import ConfigError
    from mindtune.controller.watch.run_status import RunWatcher
    from mindtune.controller.watch.study_status import StudyWatcher, is_study

    if not folder.is_dir():
        raise ConfigError(f"{folder} must be the folder of a run or a study, but it is none.")
    console = out()

    def wait() -> None:
        """Let time pass until the next look."""
        time.sleep(every)
        if not folder.is_dir():
            raise ConfigError(f"{folder} is gone: it was removed or renamed while it was watched.")

    if is_study(folder):
        return _watch_study(StudyWatcher(folder), console, once=once, wait=wait)
    return _watch_run(folder.resolve().name, RunWatcher(folder), console, once=once, wait=wait)


def _watch_run(
    name: str, watcher: RunWatcher, console: Console, *, once: bool, wait: Callable[[], None]
) -> int:
    from rich.live import Live

    from mindtune.controller.watch.views import run_view

    plain = _is_plain(console)
    status = watcher.look()
    if not console.is_terminal:
        return _exit_code(_print_run(watcher, status, console, once=once, wait=wait))
    if once:
        console.print(run_view(name, status, plain=plain))
        return _exit_code(status)
    with Live(run_view(name, status, plain=plain), console=console, auto_refresh=False) as live:
        while status.state not in ("ended", "gone"):
            wait()
            status = watcher.look()
            live.update(run_view(name, status, plain=plain), refresh=True)
    return _exit_code(status)


def _print_run(
    watcher: RunWatcher,
    status: RunStatus,
    console: Console,
    *,
    once: bool,
    wait: Callable[[], None],
) -> RunStatus:
    """Print lines until the run ends, or once; return how it was last."""
    said: set[object] = set()
    last_s = -_LINE_EVERY_S
    told_state = ""
    while True:
        over = once or status.state in ("ended", "gone")
        for key, line in _news(status):
            if key not in said:
                said.add(key)
                console.print(line, soft_wrap=True)
        if over or time.monotonic() - last_s >= _LINE_EVERY_S or status.state != told_state:
            last_s = time.monotonic()
            told_state = status.state
            for line in _where(status):
                console.print(line, soft_wrap=True)
        if over:
            return status
        wait()
        status = watcher.look()


def _news(status: RunStatus) -> Iterator[tuple[object, str]]:
    """Yield what has a line of its own, each with what it is known by."""
    from mindtune.controller.watch.views import decision_line, finding_line

    for run, found in status.findings:
        yield (run, found.kind, found.step), finding_line((run, found))
    for record in status.decisions:
        line = decision_line(record)
        yield line, line


def _where(status: RunStatus) -> Iterator[str]:
    from mindtune.controller.watch.views import run_line, state_line

    if status.steps:
        yield run_line(status)
    if status.state != "running":
        yield state_line(status)


def _exit_code(status: RunStatus) -> int:
    if status.state == "gone":
        return EXIT_RUN_FAILED
    if status.state != "ended" or status.outcome in ("ok", "pruned"):
        return 0
    return EXIT_FINDING if status.outcome == "stopped" else EXIT_RUN_FAILED


def _watch_study(
    watcher: StudyWatcher, console: Console, *, once: bool, wait: Callable[[], None]
) -> int:
    from rich.live import Live

    from mindtune.controller.watch.views import study_facts, study_view, trial_line

    plain = _is_plain(console)
    status = watcher.look()
    if console.is_terminal and not once:
        with Live(
            study_view(status, plain=plain, width=console.width),
            console=console,
            auto_refresh=False,
        ) as live:
            while not status.is_over:
                wait()
                status = watcher.look()
                live.update(study_view(status, plain=plain, width=console.width), refresh=True)
        return 0
    if console.is_terminal:
        console.print(study_view(status, plain=plain, width=console.width))
        return 0
    said = None
    last_s = -_LINE_EVERY_S
    while True:
        lines = study_facts(status)
        if lines != said or time.monotonic() - last_s >= _LINE_EVERY_S:
            said, last_s = lines, time.monotonic()
            for line in [*lines, *map(trial_line, status.running)]:
                console.print(line, soft_wrap=True)
        if once or status.is_over:
            return 0
        wait()
        status = watcher.look()


def _is_plain(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")
