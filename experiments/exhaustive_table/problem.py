"""The table replayed: a search whose answer was measured once and costs nothing since."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.study_setup import load_study
from mindtune.experiments.exhaustive_table.rows import Row, comparable, read_rows
from mindtune.experiments.search_quality.problem import SimulatedTrial
from mindtune.search.constraints import SpaceReport, check
from mindtune.search.cost_model import CostModel
from mindtune.search.knobs import Config
from mindtune.search.rules import RULES
from mindtune.search.space import Space
from mindtune.search.walk import walk

__all__ = ["TableProblem", "configs_of", "load_table"]

_REFUSED_S = 10.0
"""Time of a trial that its program refuses: a start of Python and MindSpore."""


def configs_of(space: Space) -> list[Config]:
    """Return every config that could run, those of too much predicted memory included."""
    rules = [rule for rule in RULES if not rule.name.startswith("memory")]
    return list(walk(space, CostModel(space.facts), rules))


@dataclass(frozen=True)
class TableProblem:
    """A recorded table as a search problem.

    A trial of a config is one of its rows, drawn, with the noise of another repeat: of all configs
    that were measured more than once, how far each measurement lay from the mean of its own.
    """

    name: str
    space: Space
    rows: tuple[Row, ...]
    """Comparable ones."""
    _by_key: dict[str, list[Row]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_key: dict[str, list[Row]] = {}
        for row in self.rows:
            by_key.setdefault(self.space.key(row.config), []).append(row)
        object.__setattr__(self, "_by_key", by_key)

    @cached_property
    def report(self) -> SpaceReport:
        """The space under the rules, with the uncalibrated cost model."""
        return check(self.space)

    @cached_property
    def noise(self) -> tuple[float, ...]:
        """Logarithms of value over the config's mean, where it was measured more than once."""
        found = []
        for rows in self._by_key.values():
            logs = _logs(rows)
            if len(logs) < 2:
                continue
            mean = statistics.fmean(logs)
            # The mean of few has part of their noise.
            scale = math.sqrt(len(logs) / (len(logs) - 1))
            found += [scale * (one - mean) for one in logs]
        return tuple(found)

    def run(self, config: Config, *, seed: int) -> SimulatedTrial:
        """Return what a trial of a config comes to."""
        row = self.draw(config, seed=seed)
        if row is None:
            return SimulatedTrial("bad_config", wall_s=_REFUSED_S)
        step_s = statistics.median(row.step_times_s) if row.outcome == "ok" else None
        value = row.value if row.outcome == "ok" else None
        # Which steps were bad is not recorded: as a trial of the table plays it, the first ones.
        is_bad = tuple(index < row.bad_steps for index in range(len(row.step_times_s)))
        return SimulatedTrial(
            row.outcome, value, step_s, row.peak_memory_bytes, row.wall_s, row.step_times_s, is_bad
        )

    def draw(self, config: Config, *, seed: int) -> Row | None:
        """Return a measurement as the recorder could have made it; None: it made none."""
        rows = self._by_key.get(self.space.key(config))
        if rows is None:
            return None
        draw = Random(f"{self.name}:{seed}:{self.space.key(config)}")
        row, noise = draw.choice(rows), draw.choice(self.noise or (0.0,))
        mean = self.true_value(config)
        if row.outcome != "ok" or not row.value or mean is None:
            return row
        value = mean * math.exp(noise)
        slower = row.value / value
        times = tuple(seconds * slower for seconds in row.step_times_s)
        return replace(row, value=value, step_times_s=times)

    def can_start(self, config: Config) -> bool:
        """Return whether the config was measured: the table knows nothing of the others."""
        return self.space.key(config) in self._by_key

    def fails_for_memory(self, config: Config) -> bool:
        """Return whether some of its trials ran out of memory, or above the user's limit."""
        rows = self._by_key.get(self.space.key(config), [])
        return any(row.outcome in ("oom", "infeasible") for row in rows)

    def true_value(self, config: Config) -> float | None:
        """Return the geometric mean of the values; None: most of its trials failed."""
        rows = self._by_key.get(self.space.key(config), [])
        logs = _logs(rows)
        if 2 * len(logs) <= len(rows) or not logs:
            return None
        return math.exp(statistics.fmean(logs))


def load_table(study_file: Path, table: Path, *, name: str | None = None) -> TableProblem:
    """Return the problem of a recorded table, with the peak that its rows were measured with.

    Args:
        study_file: The study that the table is of.
        table: Its rows; those that other work disturbed, or that were not measured as the last
            one, are left out.
        name: Name of the problem; None: the study's.

    Raises:
        ConfigError: if a file cannot be read, the rows are of another space, or a config that
            could run has none that counts: the best might be missing.
    """
    rows = comparable(read_rows(table))
    if not rows:
        raise ConfigError(f"{table} must hold rows that count, but has none.")
    setup = load_study(study_file)
    space = setup.with_peak(rows[-1].peak_flops)
    for row in rows:
        if row.config not in space:
            raise ConfigError(f"{table} has configs that {study_file} does not list.")
    known = {space.key(row.config) for row in rows}
    configs = configs_of(space)
    missing = sum(space.key(config) not in known for config in configs)
    if missing:
        raise ConfigError(
            f"{table} must have a row that counts for each of {len(configs)} configs, but "
            f"{missing} have none; record on until it says that none is missing."
        )
    return TableProblem(name or f"table_{setup.study.study.name}", space, tuple(rows))


def _logs(rows: list[Row]) -> list[float]:
    return [math.log(row.value) for row in rows if row.outcome == "ok" and row.value]
