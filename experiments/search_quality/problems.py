"""The problems by name: published tables, the recorded one, and simulated clusters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.experiments import exhaustive_table, gpt
from mindtune.experiments.cluster_simulator.problems import KINDS
from mindtune.experiments.cluster_simulator.problems import problem as simulated
from mindtune.experiments.exhaustive_table.problem import load_table
from mindtune.experiments.exhaustive_table.recorder import TABLE
from mindtune.experiments.search_quality.problem import Problem
from mindtune.experiments.search_quality.published import published_problems

__all__ = ["GPT_STUDY", "RECORDED", "Source", "chosen_problems"]

GPT_STUDY = Path(gpt.__file__).parent / "study.yaml"
"""The study that the recorded table is of."""
RECORDED = Path(exhaustive_table.__file__).parent / TABLE
"""The committed table of the reference workload."""
_HIGHER = 0.95
"""Share of the memory that published tables are searched with besides: how much it matters."""


@dataclass(frozen=True)
class Source:
    """Where a problem is from."""

    of: Callable[[int], Problem]
    """From a seed: of the cluster where it is simulated; a table is the same for every seed."""
    methods: tuple[str, ...] | None = None
    """What it is searched with where nobody says; None: with everything."""
    has_steps: bool = True
    """Whether its trials are known step by step, so that they can be stopped early."""


def chosen_problems(
    patterns: str | None, *, tables: Path | None = None, recorded: Path | None = None
) -> dict[str, Source]:
    """Return the problems whose names match one of the comma-separated patterns; None: all.

    Args:
        patterns: Such as `dense_*,nanotron_8p86b-*`.
        tables: Folder with the published tables; None: without them.
        recorded: Table of the reference workload; None: the committed one, where there is one.

    Raises:
        ConfigError: if a pattern matches nothing, or the recorded table cannot be used.
        TablesError: if the folder holds no tables.
    """
    known = {name: Source(partial(simulated, name)) for name in KINDS}
    if tables is not None:
        for name, found in published_problems(tables).items():
            known[name] = Source(partial(_alike, found), has_steps=False)
            more = replace(found, name=f"{name}-limit{100 * _HIGHER:.0f}", utilization=_HIGHER)
            known[more.name] = Source(partial(_alike, more), ("guided",), has_steps=False)
    if recorded is not None or RECORDED.exists():
        found_table = load_table(GPT_STUDY, recorded or RECORDED)
        known[found_table.name] = Source(partial(_alike, found_table))
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
