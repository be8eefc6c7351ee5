"""`mindtune init`: write a commented study file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from mindtune.controller.cli.console import out as console_out
from mindtune.controller.errors import ConfigError

__all__ = ["init"]


def init(
    out: Annotated[Path, typer.Argument(help="File to write, e.g. study.yaml.", metavar="OUT")],
    *,
    mindformers: Annotated[
        Path | None,
        typer.Option(help="MindFormers YAML to make the study of.", metavar="BASE.yaml"),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(help="Devices of the job, where the YAML's degrees do not tell.", min=1),
    ] = None,
) -> int:
    """Write a commented study file to start from."""
    from mindtune.controller.contract import write_atomic

    if out.exists():
        raise ConfigError(f"{out} must be a new file, but it exists; choose another name.")
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"a study file must end in .yaml, but got {out.name!r}.")
    if mindformers is not None:
        return _of_mindformers(mindformers, out, devices)
    if devices is not None:
        raise ConfigError("--devices belongs to --mindformers; write cluster.num_devices instead.")
    template = resources.files("mindtune.controller.cli").joinpath("study_template.yaml")
    write_atomic(out, template.read_text(encoding="utf-8"))
    console_out().print(
        f"written to {out}: fill in command, base_config, model and cluster, then\n"
        f"  mindtune space {out}",
        soft_wrap=True,
    )
    return 0


def _of_mindformers(base: Path, out: Path, devices: int | None) -> int:
    from mindtune.controller.trials.new_study import write_study

    notes = write_study(base, out, num_devices=devices)
    console = console_out()
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print(
        f"written to {out}: fill in cluster, look at space, then\n  mindtune space {out}",
        soft_wrap=True,
    )
    return 0
