"""`mindtune worker`: join a study that `mindtune search` runs, on this or another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mindtune.controller.cli.console import err
from mindtune.controller.cli.console import out as console_out

__all__ = ["worker"]


def worker(
    study: Annotated[
        Path, typer.Argument(help="Study file, as the search has it.", metavar="STUDY.yaml")
    ],
    *,
    storage: Annotated[
        str | None,
        typer.Option(help="Database URL of the search, or env:NAME; default: the study file's."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for its own trials; default: one below the study's folder."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Trials at a time; default: as devices allow, 1 on CPU.", min=1),
    ] = None,
) -> int:
    """Join a running study: measure configs of it until its search ends."""
    from mindtune.controller.cli.progress import StudyProgress
    from mindtune.controller.trials.local_workers import tie_to_parent
    from mindtune.controller.trials.worker_runner import run_worker

    tie_to_parent()
    with StudyProgress(err()) as progress:
        measured = run_worker(study, out, storage=storage, workers=workers, on_event=progress)
    console_out().print(f"measured by this worker: {measured} configs")
    return 0
