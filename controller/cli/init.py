"""`mindtune init`: write a commented file to start from."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

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
    ci: Annotated[
        Literal["github", "gitlab"] | None,
        typer.Option(help="Write a CI job that trains and asks `gate` instead."),
    ] = None,
) -> int:
    """Write a commented study file to start from, or a CI job."""
    from mindtune.controller.contract import write_atomic

    if out.exists():
        raise ConfigError(f"{out} must be a new file, but it exists; choose another name.")
    if out.suffix not in (".yaml", ".yml"):
        what = "a study file" if ci is None else "a CI job"
        raise ConfigError(f"{what} must end in .yaml, but got {out.name!r}.")
    if ci is not None:
        if mindformers is not None or devices is not None:
            raise ConfigError("--ci writes a CI job, for which there is no further option.")
        write_atomic(out, _template(f"ci_{ci}.yaml"))
        console_out().print(f"written to {out}: adapt runner and paths", soft_wrap=True)
        return 0
    if mindformers is not None:
        return _of_mindformers(mindformers, out, devices)
    if devices is not None:
        raise ConfigError("--devices belongs to --mindformers; write cluster.num_devices instead.")
    write_atomic(out, _template("study_template.yaml"))
    console_out().print(
        f"written to {out}: fill in command, base_config, model and cluster, then\n"
        f"  mindtune space {out}",
        soft_wrap=True,
    )
    return 0


def _template(name: str) -> str:
    return resources.files("mindtune.controller.cli").joinpath(name).read_text(encoding="utf-8")


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
