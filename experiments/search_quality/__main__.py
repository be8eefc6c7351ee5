"""Command line: `python -m mindtune.experiments.search_quality --out DIR`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import optuna

from mindtune.controller.contract import write_atomic
from mindtune.controller.errors import ConfigError
from mindtune.experiments.model_accuracy.tables import TablesError
from mindtune.experiments.provenance import Provenance, provenance
from mindtune.experiments.search_quality.experiment import answers, search
from mindtune.experiments.search_quality.methods import METHODS
from mindtune.experiments.search_quality.problems import ProblemOf, chosen_problems
from mindtune.experiments.search_quality.rows import SearchRow, append_row, read_rows
from mindtune.experiments.search_quality.summary import summary

__all__ = ["main"]

_WRONG_USE = 2
_log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Search what is missing; return 0 done, 2 wrong use."""
    parser = argparse.ArgumentParser(
        prog="python -m mindtune.experiments.search_quality",
        description="How few trials a search needs, side by side with other samplers. An "
        "experiment that was stopped goes on where it was; other code begins anew.",
    )
    parser.add_argument("--out", type=Path, required=True, help="rows.jsonl, results.md")
    parser.add_argument("--problems", help="names or patterns, such as dense_*,nanotron_*")
    parser.add_argument("--methods", help=f"some of {','.join(METHODS)} (default: all)")
    parser.add_argument("--tables", type=Path, help="folder with published tables")
    parser.add_argument(
        "--recorded", type=Path, help="table.csv that experiments.exhaustive_table recorded"
    )
    parser.add_argument("--seeds", type=int, default=30, help="searches of each kind")
    parser.add_argument("--trials", type=int, default=60, help="the most that a search may take")
    options = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("mindtune.experiments").setLevel(logging.INFO)
    try:
        problems = chosen_problems(
            options.problems, tables=options.tables, recorded=options.recorded
        )
        methods = _chosen_methods(options.methods)
        options.out.mkdir(parents=True, exist_ok=True)
        rows_file = options.out / SearchRow.FILE
        measured = provenance()  # of the code that was loaded, whatever is checked out meanwhile
        for name, of in problems.items():
            for seed in range(options.seeds):
                _search_all(rows_file, name, of, methods, seed, options.trials, measured)
            _log.info("%s: %d seeds", name, options.seeds)
        write_atomic(options.out / "results.md", summary(read_rows(rows_file).values()))
    except (ConfigError, TablesError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return _WRONG_USE
    print(options.out / "results.md")
    return 0


def _chosen_methods(text: str | None) -> tuple[str, ...]:
    if text is None:
        return tuple(METHODS)
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    unknown = [word for word in words if word not in METHODS]
    if unknown:
        raise ConfigError(
            f"--methods must be some of {', '.join(METHODS)}, but got {', '.join(unknown)}."
        )
    return words


def _search_all(
    rows_file: Path,
    name: str,
    of: ProblemOf,
    methods: tuple[str, ...],
    seed: int,
    trials: int,
    measured: Provenance,
) -> None:
    """Search one problem with every method whose row of this code and these trials is missing."""
    known = read_rows(rows_file)
    missing = [
        method
        for method in methods
        if (name, method, seed, trials, measured.revision) not in known
    ]
    if not missing:
        return
    problem = of(seed)
    true = answers(problem)
    for method in missing:
        row = search(
            problem, name, method,
            seed=seed, trials=trials, known=true, measured=measured,
        )  # fmt: skip
        append_row(rows_file, row)


if __name__ == "__main__":
    sys.exit(main())
