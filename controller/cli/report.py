"""`mindtune report`: a run, a study or any log, as one HTML page or as PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mindtune.controller.cli.console import out as console_out

__all__ = ["report"]


def report(
    source: Annotated[
        Path,
        typer.Argument(help="Folder of a run or a study, or a training log.", metavar="RUN|STUDY"),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(help="FILE.html or FILE.pdf; default: report.html in the folder."),
    ] = None,
    language: Annotated[str, typer.Option(help="en or zh.")] = "en",
) -> int:
    """Write the report of a run, a study or any training log, as HTML or PDF."""
    from mindtune.controller.reports.write import write_report

    path = write_report(source, out, language=language)
    console_out().print(f"written to {path}", soft_wrap=True)
    return 0
