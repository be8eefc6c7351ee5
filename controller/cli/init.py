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
) -> int:
    """Write a commented study file to start from."""
    from mindtune.controller.contract import write_atomic

    if out.exists():
        raise ConfigError(f"{out} must be a new file, but it exists; choose another name.")
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"a study file must end in .yaml, but got {out.name!r}.")
    template = resources.files("mindtune.controller.cli").joinpath("study_template.yaml")
    write_atomic(out, template.read_text(encoding="utf-8"))
    console_out().print(
        f"written to {out}: fill in command, base_config, model and cluster, then\n"
        f"  mindtune space {out}",
        soft_wrap=True,
    )
    return 0
