"""Command line: `python -m mindtune.experiments.model_accuracy FOLDER`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindtune.experiments.model_accuracy.report import figures, markdown
from mindtune.experiments.model_accuracy.tables import TablesError, read_tables

__all__ = ["main"]

_WRONG_USE = 2


def main(arguments: list[str] | None = None) -> int:
    """Predict every published run of a folder and print the errors; 2 means wrong use."""
    parser = argparse.ArgumentParser(
        prog="python -m mindtune.experiments.model_accuracy",
        description="Predict published runs with the cost model, one table left out at a time.",
    )
    parser.add_argument("folder", type=Path, help="folder with the tables and device_peaks.csv")
    parser.add_argument("--out", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    try:
        text = markdown(figures(read_tables(options.folder)))
        if options.out is not None:
            options.out.write_text(text + "\n", encoding="utf-8")
    except (TablesError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return _WRONG_USE
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
