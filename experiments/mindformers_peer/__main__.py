"""Command line: `python -m mindtune.experiments.mindformers_peer --python PYTHON --out DIR`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mindtune.controller.contract import write_atomic, write_json
from mindtune.controller.errors import ConfigError
from mindtune.experiments.mindformers_peer.case import PeerCase, PeerRun, Turns
from mindtune.experiments.mindformers_peer.launch import PYTHON_VARIABLE, import_root, run_case
from mindtune.experiments.mindformers_peer.report import PeerReport, costs_of, markdown
from mindtune.experiments.mindformers_peer.rescues import CASES, rescue_runs
from mindtune.experiments.provenance import load_1m, provenance

__all__ = ["main"]

_WRONG_USE = 2
_VERSIONS = (
    "from importlib.metadata import version; "
    "print('MindFormers', version('mindformers') + ', MindSpore', version('mindspore'))"
)


def main(arguments: list[str] | None = None) -> int:
    """Measure, write peer.json and results.md, print the tables; 2 means wrong use."""
    parser = argparse.ArgumentParser(
        prog="python -m mindtune.experiments.mindformers_peer",
        description="What our callback costs beside MindFormers' own monitors, and what it "
        "rescues, in MindFormers' trainer on a CPU.",
    )
    parser.add_argument(
        "--python",
        default=os.environ.get(PYTHON_VARIABLE),
        help=f"Python of MindFormers' environment (default: {PYTHON_VARIABLE})",
    )
    parser.add_argument("--out", type=Path, default=Path("mindformers_peer"))
    parser.add_argument("--rounds", type=int, default=30, help="0: no costs (default: 30)")
    parser.add_argument("--block", type=int, default=6, help="steps of a turn (default: 6)")
    parser.add_argument(
        "--rescues", nargs="*", default=list(CASES), choices=list(CASES), help="default: all"
    )
    options = parser.parse_args(arguments)
    try:
        report = _measure(options, _python(options.python))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return _WRONG_USE
    out = options.out.resolve()
    write_json(out / PeerReport.FILE, report)
    text = markdown(report)
    write_atomic(out / "results.md", text)
    print(text)
    return 0


def _python(given: str | None) -> str:
    if not given:
        raise ConfigError(
            f"--python or {PYTHON_VARIABLE} must name the Python of MindFormers' environment; see "
            "the README of this experiment."
        )
    return given


def _measure(options: argparse.Namespace, python: str) -> PeerReport:
    before = load_1m()
    with tempfile.TemporaryDirectory(prefix="mindtune_peer_") as name:
        scratch = Path(name)
        root = import_root(scratch / "root")

        def train(case: PeerCase, folder: Path) -> PeerRun:
            return run_case(case, folder, python=python, root=root)

        costs = None
        if options.rounds > 0:
            plan = Turns(rounds=options.rounds, block=options.block)
            folder = scratch / "costs"
            folder.mkdir()
            seen = train(PeerCase(steps=plan.steps, turns=plan), folder)
            if seen.failure is not None:
                raise ConfigError(f"The comparison must train to its end, but: {seen.failure}")
            costs = costs_of(seen, plan)
            _tell("costs: done")
        rescues = rescue_runs(options.rescues, train, scratch / "rescues", _tell)
    return PeerReport(
        costs=costs,
        rescues=rescues,
        load_1m=(before, load_1m()),
        mindformers=_versions(python),
        measured=provenance(),
    )


def _versions(python: str) -> str:
    command = [python, "-c", _VERSIONS]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
