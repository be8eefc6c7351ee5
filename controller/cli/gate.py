"""`mindtune gate`: pass or fail a run by rules, for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mindtune.controller.cli.compare import told_conditions, told_names
from mindtune.controller.cli.console import out as console_out
from mindtune.controller.cli.console import print_json
from mindtune.controller.cli.log_options import FormatOption, MapOption, StudyOption

__all__ = ["gate"]

EXIT_FAILED = 1
_WORDS = {True: "ok", False: "FAILED", None: "not judged"}


def gate(
    run: Annotated[
        Path,
        typer.Argument(help="Folder of a run or trial, or a training log.", metavar="RUN"),
    ],
    *,
    rules: Annotated[
        Path | None, typer.Option(help="gate.yaml; default: the built-in rules.")
    ] = None,
    study: StudyOption = None,
    format: FormatOption = "auto",  # noqa: A002 - the option's name
    map: MapOption = None,  # noqa: A002 - the option's name
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    junit: Annotated[Path | None, typer.Option(help="Also write a JUnit file.")] = None,
) -> int:
    """Pass or fail a run by rules over its metrics, signals and end; exit code 1 if one fails."""
    from mindtune.controller.contract import write_atomic
    from mindtune.controller.reports.gate import judge_run, to_junit

    output = judge_run(
        run,
        rules,
        format=format,
        names=told_names(map),
        conditions=told_conditions(study),
    )
    if junit is not None:
        write_atomic(junit, to_junit(output, suite=run.resolve().name))
    if json:
        print_json(output)
    else:
        table = Table("", "rule", "", box=None)
        for check in output.checks:
            table.add_row(_WORDS[check.ok], check.rule, check.message)
        console_out().print(table)
    return 0 if output.passed else EXIT_FAILED
