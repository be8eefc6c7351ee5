"""Starts trainings in MindFormers' environment: it needs a MindSpore of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import mindtune.controller
from mindtune.controller.contract import read_document, write_json
from mindtune.controller.errors import ConfigError
from mindtune.experiments.mindformers_peer.case import PeerCase, PeerRun

__all__ = ["PYTHON_VARIABLE", "import_root", "run_case"]

PYTHON_VARIABLE = "MINDTUNE_PEER_PYTHON"
"""Names the Python of MindFormers' environment."""

_TRAIN = ("-m", "mindtune.experiments.mindformers_peer.train")
_PACKAGES = ("controller", "policies", "search", "experiments")
_LAST_LINES = 12


def import_root(folder: Path) -> Path:
    """Return a folder for PYTHONPATH that holds this very mindtune and nothing else."""
    packages = Path(next(iter(mindtune.controller.__path__))).resolve().parent
    package = folder / "mindtune"
    package.mkdir(parents=True)
    for name in _PACKAGES:
        (package / name).symlink_to(packages / name)
    return folder


def run_case(
    case: PeerCase,
    folder: Path,
    *,
    python: str,
    root: Path,
    program: Sequence[str] = _TRAIN,
    arguments: Sequence[str] = (),
    timeout_s: float = 600.0,
) -> PeerRun:
    """Train a case in a process of its own, and return what it left.

    Args:
        case: What to train.
        folder: Takes everything that is written; `log` is what was printed.
        python: The Python of MindFormers' environment.
        root: See `import_root`.
        program: What Python runs; it is given the folder and the arguments.
        arguments: Further arguments.
        timeout_s: Longest time.

    Raises:
        ConfigError: It did not come to an end that can be read.
    """
    write_json(folder / PeerCase.FILE, case)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MINDTUNE_")
    }
    log = folder / "log"
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [_anywhere(python), *program, str(folder), *arguments],
            cwd=folder,
            env=environment | {"PYTHONPATH": str(root)},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    if done.returncode != 0:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        raise ConfigError(
            f"A training in MindFormers must end with code 0, but got {done.returncode}; {python} "
            f"needs mindformers 1.8.0 and mindtune's dependencies. It said:\n" + "\n".join(last)
        )
    return read_document(PeerRun, folder / PeerRun.FILE)


def _anywhere(python: str) -> str:
    """Return a relative path so that it holds in any folder; a link into a venv stays one."""
    return os.path.abspath(python) if os.sep in python else python  # noqa: PTH100
