"""Command line: `python -m mindtune.experiments.fault_injection --out DIR`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.experiments.fault_injection.cases import (
    CASES,
    GUARDS,
    chosen_cases,
    chosen_guards,
)
from mindtune.experiments.fault_injection.experiment import plan, run_rows

__all__ = ["main"]

_LONG = "healthy_long"
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
    parser.add_argument("--guards", help=f"some of {','.join(GUARDS)} (default: all)")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="default: 0,1,2,3,4")
    parser.add_argument("--steps", type=int, help="steps of every run (default: each case's own)")
    parser.add_argument(
        "--healthy-steps",
        type=int,
        help=f"steps of {_LONG} (default: {CASES[_LONG].steps})",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("mindtune.experiments").setLevel(logging.INFO)
    try:
        steps = _steps("--steps", options.steps)
        healthy_steps = _steps("--healthy-steps", options.healthy_steps)
        lengths = {} if steps is None else dict.fromkeys(CASES, steps)
        if healthy_steps is not None:
            lengths[_LONG] = healthy_steps
        cases, guards = chosen_cases(options.faults), chosen_guards(options.guards)
        rows = plan(cases, _seeds(options.seeds), lengths, guards)
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


def _steps(option: str, steps: int | None) -> int | None:
    if steps is not None and steps < 4:
        raise ConfigError(f"{option} must be 4 or more, but got {steps}.")
    return steps


if __name__ == "__main__":
    sys.exit(main())
