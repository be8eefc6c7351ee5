"""Command line: `python -m mindtune.experiments.fault_injection --out DIR`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.experiments.fault_injection.cases import CASES, chosen_cases
from mindtune.experiments.fault_injection.experiment import plan, run_rows

__all__ = ["main"]

_WRONG_USE = 2
_FAILED = 3


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing; return 0 done, 2 wrong use, 3 if a row failed."""
    parser = argparse.ArgumentParser(
        prog="python -m mindtune.experiments.fault_injection",
        description="Real faults on the reference workload, guarded against unguarded. An "
        "experiment that was stopped goes on where it was.",
    )
    parser.add_argument("--out", type=Path, required=True, help="rows.jsonl, results.md, runs/")
    parser.add_argument("--faults", help=f"some of {','.join(CASES)} (default: all)")
    parser.add_argument("--seeds", default="0,1,2", help="default: 0,1,2")
    parser.add_argument("--steps", type=int, help="steps of every run (default: each case's own)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("mindtune.experiments").setLevel(logging.INFO)
    try:
        rows = plan(chosen_cases(options.faults), _seeds(options.seeds), _steps(options.steps))
        failed = run_rows(options.out, rows)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return _WRONG_USE
    print(options.out / "results.md")
    return _FAILED if failed else 0


def _seeds(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(
            f"--seeds must be whole numbers from 0, separated by commas, but got {text!r}; for "
            "example 0,1,2."
        )
    return tuple(dict.fromkeys(int(word) for word in words))


def _steps(steps: int | None) -> int | None:
    if steps is not None and steps < 4:
        raise ConfigError(f"--steps must be 4 or more, but got {steps}.")
    return steps


if __name__ == "__main__":
    sys.exit(main())
