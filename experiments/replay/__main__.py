"""Command line: `python -m mindtune.experiments.replay FOLDER`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.experiments.replay.survey import markdown, survey

__all__ = ["main"]

_WRONG_USE = 2


def main(arguments: list[str] | None = None) -> int:
    """Replay the known logs of a folder and print the table; 2 means wrong use."""
    parser = argparse.ArgumentParser(
        prog="python -m mindtune.experiments.replay",
        description="Replay public training logs whose story is known, and compare.",
    )
    parser.add_argument("folder", type=Path, help="folder with the logs named in cases.py")
    options = parser.parse_args(arguments)
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
