"""`mindtune search`: start a study or go on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mindtune.controller.cli.console import err
from mindtune.controller.cli.console import out as console_out

__all__ = ["search"]


def search(
    study: Annotated[Path, typer.Argument(help="Study file.", metavar="STUDY.yaml")],
    *,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study; default: the study file's name.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Configs to measure, the base included.", min=1)
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="Database URL, or env:NAME to read it from there.")
    ] = None,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate", help="Measure besides what each knob of the winner gave: a trial per knob."
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Trials at a time on this machine; default: 1, with all devices.", min=1
        ),
    ] = None,
) -> int:
    """Measure configs by short real trials and export the best; goes on where it was stopped."""
    from mindtune.controller.cli.progress import StudyProgress
    from mindtune.controller.reports.write import write_report
    from mindtune.controller.trials.study_runner import run_study

    folder = out or study.parent / study.stem
    with StudyProgress(err()) as progress:
        result = run_study(
            study,
            folder,
            trials=trials,
            storage=storage,
            workers=workers,
            ablate_winner=ablate,
            on_event=progress,
        )
    console = console_out()
    console.print(f"report: {write_report(folder)}", soft_wrap=True)
    if result.best_config is None:
        err().print(f"{result.summary.reason}; see the messages above", soft_wrap=True)
    else:
        console.print(f"best config: {result.best_config}", soft_wrap=True)
    return result.exit_code
