"""Command line: `python -m mindtune.experiments.search_quality --out DIR`."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import optuna

from mindtune.controller.contract import write_atomic
from mindtune.controller.errors import ConfigError
from mindtune.experiments.model_accuracy.tables import TablesError
from mindtune.experiments.provenance import Provenance, provenance
from mindtune.experiments.search_quality.answers import answers
from mindtune.experiments.search_quality.experiment import search
from mindtune.experiments.search_quality.methods import METHODS, missing
from mindtune.experiments.search_quality.problems import Source, chosen_problems
from mindtune.experiments.search_quality.rows import RowKey, SearchRow, append_row, read_rows
from mindtune.experiments.search_quality.summary import summary

__all__ = ["main"]

_WRONG_USE = 2
_HELD_OUT = 100
"""Seeds from here on are measured; smaller ones were looked at while the sampler was made."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Task:
    """The searches of one problem and seed whose rows are missing."""

    problem: str
    seed: int
    methods: tuple[str, ...]
    trials: int
    measured: Provenance


def main(arguments: list[str] | None = None) -> int:
    """Search what is missing; return 0 done, 2 wrong use."""
    options = _parser().parse_args(arguments)
    _quiet()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("mindtune.experiments").setLevel(logging.INFO)
    where = (options.problems, options.tables, options.recorded)
    try:
        for name, least in _LEAST.items():
            _require(name, getattr(options, name), least)
        problems = _chosen(where)
        methods = _chosen_methods(options.methods)
        options.out.mkdir(parents=True, exist_ok=True)
        rows_file = options.out / SearchRow.FILE
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        tasks = list(_missing(read_rows(rows_file), problems, methods, seeds, options.trials))
        for row in _rows(tasks, problems, where, options.jobs):
            append_row(rows_file, row)
        write_atomic(options.out / "results.md", summary(read_rows(rows_file).values()))
    except (ConfigError, TablesError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return _WRONG_USE
    print(options.out / "results.md")
    return 0


def _parser() -> argparse.ArgumentParser:
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
    parser.add_argument("--first-seed", type=int, default=_HELD_OUT, help="the others follow")
    parser.add_argument("--trials", type=int, default=60, help="the most that a search may take")
    parser.add_argument("--jobs", type=int, default=1, help="processes that search")
    return parser


_LEAST = {"seeds": 1, "first_seed": 0, "trials": 1, "jobs": 1}


def _require(name: str, value: int, least: int) -> None:
    if value < least:
        option = name.replace("_", "-")
        raise ConfigError(f"--{option} must be {least} or more, but got {value}.")


def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


_Where = tuple[str | None, Path | None, Path | None]
"""Patterns of problems, folder of published tables, recorded table."""


def _chosen(where: _Where) -> dict[str, Source]:
    patterns, tables, recorded = where
    return chosen_problems(patterns, tables=tables, recorded=recorded)


def _chosen_methods(text: str | None) -> tuple[str, ...] | None:
    """Return the methods that a user names; None: all that can be had.

    Raises:
        ConfigError: if one is unknown, or needs a package that is not installed.
    """
    if text is None:
        return None
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    unknown = [word for word in words if word not in METHODS]
    if unknown:
        raise ConfigError(
            f"--methods must be some of {', '.join(METHODS)}, but got {', '.join(unknown)}."
        )
    for word in words:
        if missing(word):
            raise ConfigError(f"--methods {word} needs {missing(word)}, which is not installed.")
    return words


def _missing(
    known: dict[RowKey, SearchRow],
    problems: dict[str, Source],
    chosen: tuple[str, ...] | None,
    seeds: Iterable[int],
    trials: int,
) -> Iterator[_Task]:
    """Yield what this code has not searched yet with these trials."""
    measured = provenance()  # of the code that was loaded, whatever is checked out meanwhile
    available = [name for name in METHODS if not missing(name)]
    for name in METHODS.keys() - set(available) if chosen is None else ():
        _log.info("%s is left out: %s is not installed", name, missing(name))
    for seed in seeds:
        for name, source in problems.items():
            methods = chosen or source.methods or available
            methods = [one for one in methods if source.has_steps or not METHODS[one].stops_early]
            left = tuple(
                method
                for method in methods
                if (name, method, seed, trials, measured.revision) not in known
            )
            if left:
                yield _Task(name, seed, left, trials, measured)


def _rows(
    tasks: Sequence[_Task], problems: dict[str, Source], where: _Where, jobs: int
) -> Iterator[SearchRow]:
    """Yield the rows of all tasks as they come."""
    if jobs == 1:
        for done, task in enumerate(tasks, start=1):
            yield from _searched(task, problems[task.problem])
            _log.info("%d of %d: %s, seed %d", done, len(tasks), task.problem, task.seed)
        return
    with ProcessPoolExecutor(jobs, initializer=_begin, initargs=(where,)) as pool:
        futures = {pool.submit(_searched_elsewhere, task): task for task in tasks}
        for done, future in enumerate(as_completed(futures), start=1):
            task = futures[future]
            yield from future.result()
            _log.info("%d of %d: %s, seed %d", done, len(tasks), task.problem, task.seed)


def _searched(task: _Task, source: Source) -> Iterator[SearchRow]:
    problem = source.of(task.seed)
    known = answers(problem)
    for method in task.methods:
        yield search(
            problem, task.problem, method,
            seed=task.seed, trials=task.trials, known=known, measured=task.measured,
        )  # fmt: skip


_own: dict[str, Source] = {}
"""The problems of this process, where it is one of several."""


def _begin(where: _Where) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _quiet()
    _own.update(_chosen(where))


def _end_with_parent() -> None:
    """End this process when the one that writes the rows is gone, killed ones included."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _searched_elsewhere(task: _Task) -> list[SearchRow]:
    return list(_searched(task, _own[task.problem]))


if __name__ == "__main__":
    sys.exit(main())
