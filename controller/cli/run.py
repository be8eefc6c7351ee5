"""`mindtune run`: start a policy-guarded production run."""

from __future__ import annotations

from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

from mindtune.controller.cli.console import err
from mindtune.controller.cli.console import out as console_out

__all__ = ["Mode", "run"]


class Mode(str, Enum):
    """What policies may do."""

    OBSERVE = "observe"
    ACT = "act"


def run(
    best_config: Annotated[Path, typer.Argument(help="best_config.yaml of a study.")],
    *,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; default: runs/<UTC time>.")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="Whether policies act or only record.")] = Mode.ACT,
    faults: Annotated[
        Path | None, typer.Option(help="faults.yaml: faults to plant on purpose, for a drill.")
    ] = None,
) -> int:
    """Start a production run from a best config, under its policies, and wait for its end."""
    from mindtune.controller.contract import FaultPlan, read_document
    from mindtune.controller.trials.production import run_best_config

    plan = None if faults is None else read_document(FaultPlan, faults)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    folder = out or Path("runs") / stamp
    err().print(f"running in {folder}", soft_wrap=True)
    choice: Literal["observe", "act"] = "act" if mode is Mode.ACT else "observe"
    code = run_best_config(best_config, folder, choice, faults=plan)
    console_out().print(_ending(folder), soft_wrap=True)
    return code


def _ending(folder: Path) -> str:
    from mindtune.controller.contract import RunResult, parse, read_json

    path = folder / RunResult.FILE
    result = parse(RunResult, read_json(path), source=str(path))
    # The whole of it, often with a stack, stands in result.json.
    message = f": {result.message.splitlines()[0]}" if result.message else ""
    if result.planted_faults:
        planted = [(fault.kind, fault.first_step) for fault in result.planted_faults]
        kinds = ", ".join(kind for kind, step in planted if step <= result.steps)
        late = ", ".join(f"{kind} (step {step})" for kind, step in planted if step > result.steps)
        message = f"{message}; no real run: planted {kinds or 'nothing'}"
        if late:
            message = f"{message}, and never reached {late}"
    return (
        f"{result.outcome} after {result.steps} steps, {result.actions} actions of policies"
        f"{message}; records in {folder}"
    )
