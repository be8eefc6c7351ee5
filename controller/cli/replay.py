"""`mindtune replay`: what is wrong with a run, from its log, and what the policies would do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from mindtune.controller.cli.console import out, print_json

if TYPE_CHECKING:
    from mindtune.controller.replay import Chapter, Line

__all__ = ["replay"]

EXIT_FAULTY = 1
_STYLES = {"critical": "red", "warning": "yellow", "good": "green", "quiet": "dim", "": ""}
_INDENT = 2
_WIDEST_LABEL = 24
_NARROWEST = 16
"""Columns that a paragraph has at least beside its label."""


def replay(
    logs: Annotated[
        list[Path],
        typer.Argument(
            help="A training log, several of one run (of ranks, or one after the other), a run's "
            "folder, or - for standard input.",
            metavar="LOG...",
        ),
    ],
    *,
    format: Annotated[  # noqa: A002 - the option's name
        str, typer.Option(help="Name of a reader; auto: found by its lines.")
    ] = "auto",
    map: Annotated[  # noqa: A002 - the option's name
        str | None,
        typer.Option(
            help="What the log calls the signals: loss=train/loss_avg,step_time_s=iter:ms, or a "
            "YAML file; for csv, jsonl, key_value and tensorboard."
        ),
    ] = None,
    policies: Annotated[
        Path | None, typer.Option(help="YAML with settings by policy name; default: built in.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if it is faulty.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Read any training log: what went wrong where and why, and what the policies would do."""
    from mindtune.controller.records.log_readers import read_mapping
    from mindtune.controller.replay import load_engine, open_logs, tell
    from mindtune.controller.replay import replay as replay_log

    engine = load_engine(policies)
    log = open_logs(logs, format, None if map is None else read_mapping(map))
    output = replay_log(log, engine)
    if json:
        print_json(output)
    else:
        console = out()
        name = "standard input" if logs == [Path("-")] else log.name
        for chapter in tell(output, name):
            _print_chapter(chapter, output.verdict, console)
    return EXIT_FAULTY if strict and output.verdict == "faulty" else 0


def _print_chapter(chapter: Chapter, verdict: str, console: Console) -> None:
    style = "bold"
    if chapter.heading.startswith("verdict"):
        style += " red" if verdict == "faulty" else " green"
    console.print(chapter.heading, style=style, soft_wrap=True)
    labels = [len(line.label) for line in chapter.lines if line.label]
    width = min(_WIDEST_LABEL, max(labels)) + _INDENT if labels else 0
    for line in chapter.lines:
        _print_line(line, width, console)


def _print_line(line: Line, width: int, console: Console) -> None:
    """Print a paragraph that wraps beside its label, or below what it belongs to."""
    style = _STYLES[line.style]
    left = _INDENT + width + _INDENT * line.depth
    text = console.render_str(line.text)
    before = console.render_str(line.label)
    before.pad_right(max(0, left - _INDENT - before.cell_len))
    before.pad_left(_INDENT)
    for part in text.wrap(console, max(_NARROWEST, console.width - left)):
        part.rstrip()
        console.print(before + part, style=style, soft_wrap=True)
        before = Text(" " * left)
