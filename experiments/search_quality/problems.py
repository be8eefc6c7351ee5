"""The problems by name: published tables, the recorded one, and simulated clusters."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.experiments.cluster_simulator.problems import KINDS
from mindtune.experiments.cluster_simulator.problems import problem as simulated
from mindtune.experiments.exhaustive_table.problem import load_table
from mindtune.experiments.search_quality.problem import Problem
from mindtune.experiments.search_quality.published import published_problems

__all__ = ["ProblemOf", "chosen_problems"]

_STUDY = Path(__file__).parents[1] / "gpt" / "study.yaml"
ProblemOf = Callable[[int], Problem]
"""From a seed: of the cluster where it is simulated; a table is the same for every seed."""


def chosen_problems(
    patterns: str | None, *, tables: Path | None = None, recorded: Path | None = None
) -> dict[str, ProblemOf]:
    """Return the problems whose names match one of the comma-separated patterns; None: all.

    Args:
        patterns: Such as `dense_*,nanotron_8p86b-*`.
        tables: Folder with the published tables; None: without them.
        recorded: Table of the reference workload; None: without it.

    Raises:
        ConfigError: if a pattern matches nothing, or the recorded table cannot be read.
        TablesError: if the folder holds no tables.
    """
    known: dict[str, ProblemOf] = {name: partial(simulated, name) for name in KINDS}
    if tables is not None:
        for name, found in published_problems(tables).items():
            known[name] = partial(_alike, found)
    if recorded is not None:
        found_table = load_table(_STUDY, recorded)
        known[found_table.name] = partial(_alike, found_table)
    if patterns is None:
        return known
    words = [word.strip() for word in patterns.split(",")]
    for word in words:
        if not any(fnmatch(name, word) for name in known):
            raise ConfigError(
                f"--problems must match some of {', '.join(known)}, but {word!r} matches none; "
                "published tables need --tables, the recorded one --recorded."
            )
    return {
        name: found for name, found in known.items() if any(fnmatch(name, word) for word in words)
    }


def _alike(found: Problem, _seed: int) -> Problem:
    return found
