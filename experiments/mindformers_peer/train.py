"""Runs one case: `python -m mindtune.experiments.mindformers_peer.train FOLDER`.

FOLDER holds `case.json` and receives everything that MindFormers, MindSpore and mindtune write,
and `seen.json`. It runs in the Python of MindFormers' environment, in a process of its own, since
MindFormers keeps its settings in the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindtune.controller.contract import dump_yaml, read_document, write_atomic, write_json
from mindtune.experiments.mindformers_peer.case import PeerCase, PeerRun
from mindtune.experiments.mindformers_peer.workload import (
    patch_overflow_status,
    training_yaml,
    write_data,
)

__all__ = ["main", "run"]

_DATA_SEED = 0


def main(arguments: list[str] | None = None) -> int:
    """Train, and leave `seen.json` whatever ended the training."""
    (folder,) = (Path(argument) for argument in (arguments or sys.argv[1:]))
    folder = folder.resolve()
    case = read_document(PeerCase, folder / PeerCase.FILE)
    os.chdir(folder)
    write_json(folder / PeerRun.FILE, run(case, folder))
    return 0


def run(case: PeerCase, folder: Path, extra: Sequence[Any] = ()) -> PeerRun:
    """Train in this process, whose working directory is `folder`.

    Args:
        case: What to train.
        folder: Takes everything that is written.
        extra: Instances of further callbacks.

    Raises:
        RuntimeError: MindFormers refused before training began.
    """
    from mindformers import MindFormerConfig, Trainer, build_context  # noqa: PLC0415
    from mindformers.tools.register import (  # noqa: PLC0415
        MindFormerModuleType,
        MindFormerRegister,
    )

    from mindtune.controller import TuneCallback  # noqa: PLC0415
    from mindtune.experiments.mindformers_peer.turns import make_turns  # noqa: PLC0415
    from mindtune.experiments.mindformers_peer.witness import Witness  # noqa: PLC0415

    path = folder / "train.yaml"
    data = folder / "data"
    data.mkdir()
    steps = case.steps if case.turns is None else case.turns.steps
    write_data(data / "text.mindrecord", steps * case.batch, seed=_DATA_SEED)
    write_atomic(path, dump_yaml(training_yaml(case, data, own_path=path)))
    patch_overflow_status()
    MindFormerRegister.register_cls(Witness, MindFormerModuleType.CALLBACK)
    instances = list(extra)
    if case.plugged == "instance":
        instances.append(TuneCallback(path))
    elif case.plugged == "registry":
        MindFormerRegister.register_cls(TuneCallback, MindFormerModuleType.CALLBACK)
    elif case.plugged == "yaml":
        write_atomic(folder / "tune.py", "from mindtune.controller import TuneCallback\n")
        os.environ["REGISTER_PATH"] = str(folder)
    turns = None if case.turns is None else make_turns(case.turns, folder)
    if turns is not None:
        instances.append(turns)
    config = MindFormerConfig(str(path))
    build_context(config)
    failure = None
    try:
        Trainer(config, callbacks=instances or None).train()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the run left
        failure = f"{type(error).__name__}: {error}"
    witness = Witness.latest
    if witness is None:
        raise RuntimeError(f"The training ended before it began: {failure}")
    ours = (each for each in witness.callbacks if isinstance(each, TuneCallback))
    return witness.report(failure, turns, stop_reason=next((o.stop_reason for o in ours), None))


if __name__ == "__main__":
    sys.exit(main())
