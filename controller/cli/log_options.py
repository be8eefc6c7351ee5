"""Options of the commands that read a run or any log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["FormatOption", "MapOption", "StudyOption"]

StudyOption = Annotated[
    Path | None,
    typer.Option(help="Study file that names model and cluster, where a log does not."),
]
FormatOption = Annotated[str, typer.Option(help="Name of a log reader; auto: found by its lines.")]
MapOption = Annotated[
    str | None, typer.Option(help="What a log calls the signals, as for `replay`.")
]
