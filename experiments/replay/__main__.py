"""Command line: `python -m mindtune.experiments.replay FOLDER`, `--shapes` or `--speed`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.experiments.replay.misleading import misleading
from mindtune.experiments.replay.speed import measure_speed
from mindtune.experiments.replay.survey import markdown, survey

__all__ = ["main"]

_WRONG_USE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run one part of the experiment and print its table; 2 means wrong use."""
    parser = argparse.ArgumentParser(
        prog="python -m mindtune.experiments.replay",
        description="Replay public training logs whose story is known, and compare.",
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", help="folder with the logs named in cases.py"
    )
    parser.add_argument("--shapes", type=int, metavar="SEEDS", help="runs made up to mislead")
    parser.add_argument("--speed", type=int, metavar="STEPS", help="time of a replay")
    parser.add_argument("--repeats", type=int, default=5, help="of --speed (default: 5)")
    options = parser.parse_args(arguments)
    if options.shapes is not None:
        print(misleading(options.shapes))
    if options.speed is not None:
        print(measure_speed(options.speed, options.repeats))
    if options.folder is None:
        if options.shapes is None and options.speed is None:
            parser.error("give a folder, --shapes or --speed")
        return 0
    try:
        rows = list(survey(options.folder))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return _WRONG_USE
    print(markdown(rows))
    for row in rows:
        if not row.agrees:
            print(f"disagrees: {row.name} ({row.case.story})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
