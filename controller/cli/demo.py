"""`mindtune demo`: both loops on the bundled workload, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mindtune.controller.cli.console import err
from mindtune.controller.cli.console import out as console_out

__all__ = ["demo"]


def demo(
    *,
    out: Annotated[Path, typer.Option(help="Folder; a stopped demo goes on in it.")] = Path(
        "mindtune_demo"
    ),
    trials: Annotated[
        int | None, typer.Option(help="Configs to measure, the base included.", min=1)
    ] = None,
) -> int:
    """Search, export, and a guarded run with a real fault, on the bundled workload (CPU only)."""
    from mindtune.controller.cli.progress import StudyProgress
    from mindtune.controller.demo.demo import run_demo
    from mindtune.controller.demo.table import comparison, story

    with StudyProgress(err()) as progress:
        ended = run_demo(out, trials=trials, on_event=progress)
    console = console_out()
    if ended.run_dir is None:
        err().print(
            "no config ended ok; see the trials' messages above. Where other work on this machine "
            "made them miss their deadlines, begin anew in another folder, with --out",
            soft_wrap=True,
        )
        return ended.exit_code
    console.print(comparison(ended.study.summary))
    for line in story(ended):
        console.print(line, soft_wrap=True)
    return ended.exit_code
