"""`mindtune export`: write a measured config as best_config.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mindtune.controller.cli.console import out as console_out
from mindtune.controller.errors import ConfigError

__all__ = ["export"]


def export(
    study_dir: Annotated[Path, typer.Argument(help="Folder of a study.", metavar="STUDY_DIR")],
    *,
    out: Annotated[Path, typer.Option(help="File to write, e.g. best_config.yaml.")],
    trial: Annotated[
        int | None, typer.Option(help="Number of the config; default: the best.")
    ] = None,
    mindformers: Annotated[
        Path | None,
        typer.Option(
            help="MindFormers YAML; then the file is one that differs from it in the tuned keys.",
            metavar="BASE.yaml",
        ),
    ] = None,
) -> int:
    """Write the best config of a study, or any that was measured, as best_config.yaml."""
    from mindtune.controller.trials.export import export as export_config

    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out must be a .yaml file, but got {str(out)!r}.")
    best = export_config(study_dir, out=out, trial=trial, mindformers=mindformers)
    provenance = best.provenance
    where = "" if provenance is None else f"trial {provenance.trial} of {provenance.study}: "
    console_out().print(f"{where}written to {out}", soft_wrap=True)
    for node, line in enumerate(best.launch):
        where = best.hosts[node] if best.hosts else "this machine"
        console_out().print(f"without `mindtune run`, on {where}: {line}", soft_wrap=True)
    if mindformers is not None:
        console_out().print(f"comments of {mindformers} are not in it", soft_wrap=True)
    return 0
