"""`mindtune report`: one HTML page of a run or a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mindtune.controller.cli.console import out as console_out

__all__ = ["report"]


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run or a study.", metavar="RUN|STUDY")
    ],
    *,
    out: Annotated[
        Path | None, typer.Option(help="HTML file; default: report.html in the folder.")
    ] = None,
) -> int:
    """Write the report of a run or a study as one self-contained HTML page."""
    from mindtune.controller.reports.write import write_report

    path = write_report(folder, out)
    console_out().print(f"written to {path}", soft_wrap=True)
    return 0
