"""Published tables as search problems: a trial looks its config up in the table.

A problem is a group of runs that differ in layout alone (model, sequence, machine, precision and
global batch are equal). Its space is the list of the group's configs, failures included; its
values are the measured MFU. A config that was measured more than once has the geometric mean as
its true value, and a trial of it shows one of the measurements, drawn by the trial's seed. The
cost model starts with rates learnt from the tables of other programs: it has seen neither the
table nor a sibling of it.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from mindtune.experiments.model_accuracy.evaluation import Group, memory_groups, time_groups
from mindtune.experiments.model_accuracy.learning import NEUTRAL_MEMORY, NEUTRAL_TIME, learn
from mindtune.experiments.model_accuracy.mapping import Row
from mindtune.experiments.model_accuracy.tables import read_tables
from mindtune.experiments.search_quality.problem import SimulatedTrial
from mindtune.search.calibration import Prior, fit
from mindtune.search.constraints import SpaceReport, check
from mindtune.search.cost_model import MEMORY_NOISE, TIME_NOISE, CostModel, Usual
from mindtune.search.facts import Limits
from mindtune.search.forecasts import memory_forecast
from mindtune.search.knobs import Config, KnobValue
from mindtune.search.memory_model import MemoryRates, stage_memory
from mindtune.search.space import Space
from mindtune.search.time_model import TimeRates

__all__ = ["MIN_CONFIGS", "UTILIZATION", "PublishedProblem", "published_problems"]

MIN_CONFIGS = 100
"""Configs, failed ones included, of a group that is a problem."""
UTILIZATION = 0.9
"""Share of the device memory that a config may be predicted to use, as in the simulated problems.
A study file that sets none allows all of it, and the file that `init` writes 0.85."""
_LAUNCH_S = 90.0
"""Start of a trial, compilation included: the order of what public tuners report (DeepSpeed: 127 s
for a trial in all)."""
_STEPS = 35
"""Of a trial: the study file's warmup_steps and measure_steps."""

_Key = tuple[tuple[str, KnobValue], ...]


@dataclass(frozen=True)
class PublishedProblem:
    """One group of a table; see `Problem`."""

    name: str
    rows: tuple[Row, ...]
    usual: Callable[[], Usual]
    """What tables of other programs teach."""
    is_too_large: Callable[[Row], bool] = lambda _: False
    """Whether a row needs more than the device has, by the formula fitted to all the memory that
    was measured in the same table. Nothing that is searched or judged sees that fit."""
    utilization: float = UTILIZATION

    @cached_property
    def report(self) -> SpaceReport:
        """The group's configs under the rules."""
        # Where the vocabulary is padded by tensor parallelism, the smallest is the model's own.
        first = min(self.rows, key=lambda row: row.model.vocab_size)
        limits = Limits(framework="other", memory_utilization=self.utilization)
        facts = replace(first.facts, limits=limits)
        usual = self.usual()
        cost = CostModel(facts, usual.memory, usual.time, usual=usual)
        return check(Space.from_spec([dict(key) for key in self._runs], facts), cost)

    def run(self, config: Config, *, seed: int) -> SimulatedTrial:
        """Return one of the published measurements of a config."""
        draw = random.Random(f"{seed}:{_key(config)}")
        row = draw.choice(self._runs[_key(config)])
        if row.step_time_s is None:
            # A table that says "fail" does not say of what.
            outcome = "oom" if row.states_oom else "crash"
            return SimulatedTrial(outcome, wall_s=_LAUNCH_S)
        return SimulatedTrial(
            "ok",
            value=self.report.cost.mfu(row.step_time_s),
            step_time_s=row.step_time_s,
            memory_bytes=row.memory_bytes,
            wall_s=_LAUNCH_S + _STEPS * row.step_time_s,
        )

    def can_start(self, config: Config) -> bool:
        """Return whether somebody has started it: every config of the table was."""
        return _key(config) in self._runs

    def fails_for_memory(self, config: Config) -> bool:
        """Return whether the table says so, or its own measured rows do: see `model_accuracy`."""
        rows = self._runs[_key(config)]
        return any(row.states_oom or self.is_too_large(row) for row in rows)

    def true_value(self, config: Config) -> float | None:
        """Return the MFU at the mean of the published step times."""
        times = [row.step_time_s for row in self._runs[_key(config)]]
        measured = [time for time in times if time is not None]
        if not measured:
            return None
        mean = math.exp(sum(map(math.log, measured)) / len(measured))
        return self.report.cost.mfu(mean)

    @cached_property
    def _runs(self) -> Mapping[_Key, Sequence[Row]]:
        """Measurements by config; knobs that never vary are part of it too."""
        found: dict[_Key, list[Row]] = defaultdict(list)
        for row in self.rows:
            found[_key(_config(row))].append(row)
        return found


def _config(row: Row) -> Config:
    """Return a row's config; gradients that are not exchanged do not overlap with anything."""
    exchanges = int(row.config["data_parallel"]) * int(row.config["context_parallel"]) > 1
    return {**row.config, "comm_overlap": exchanges and row.config["comm_overlap"]}


def _key(config: Mapping[str, KnobValue]) -> _Key:
    return tuple(sorted(config.items()))


def published_problems(folder: Path) -> dict[str, PublishedProblem]:
    """Return a problem for every large group of a folder of tables, by name.

    Raises:
        TablesError: if the folder holds no tables.
    """
    rows = read_tables(folder).rows
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    learning = _Learning(rows)
    found = {}
    for key, members in groups.items():
        configs = {_key(_config(row)) for row in members}
        timed = sum(row.step_time_s is not None for row in members)
        if len(configs) < MIN_CONFIGS or not timed:
            continue
        name = next(name for name in _names(key) if name not in found)
        program = _program(members[0])
        found[name] = PublishedProblem(
            name, tuple(members), partial(learning.without, program), learning.is_too_large
        )
    return found


def _names(key: tuple[str, ...]) -> Iterator[str]:
    """Yield names of a group, ever longer ones; the last one no other group has."""
    file, table, model, sequence, device, devices, precision, batch = key
    name = f"{Path(file).stem}-{device}-x{devices}"
    for more in ("", model, f"seq{sequence}", f"batch{batch}", precision, table):
        name = f"{name}-{more}" if more else name
        yield name.replace(" ", "_")


def _program(row: Row) -> str:
    return row.framework.strip().lower().partition(" ")[0]


class _Learning:
    """What tables teach about the rates, one program left out; learnt once for each."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = tuple(rows)
        self._known: dict[str, Usual] = {}
        self._own: dict[tuple[str, ...], Any] = {}

    def without(self, program: str) -> Usual:
        if program not in self._known:
            others = [row for row in self._rows if _program(row) != program]
            time = _learnt(time_groups(others), NEUTRAL_TIME, TIME_NOISE)
            memory = _learnt(memory_groups(others), NEUTRAL_MEMORY, MEMORY_NOISE)
            self._known[program] = Usual(
                memory=MemoryRates(*map(math.exp, memory.means)),
                time=TimeRates(*map(math.exp, time.means)),
                memory_spreads=MemoryRates(*memory.spreads),
                time_spreads=TimeRates(*time.spreads),
            )
        return self._known[program]

    def is_too_large(self, row: Row) -> bool:
        """Return whether a row needs more memory than there is, by its own table's formula."""
        parts, device_memory = stage_memory(row.config, row.facts), row.facts.cluster.device_memory
        if parts is None or device_memory is None:
            return False
        if not self._own:
            for group in memory_groups(self._rows):
                lesson = group.lesson()
                found = fit(lesson.forecast, lesson.log_measured, NEUTRAL_MEMORY, MEMORY_NOISE)
                self._own[group.table] = np.array(found.log_rates)
        own = self._own.get(row.group[:2])
        if own is None:
            return False
        return bool(memory_forecast([parts])(own)[0][0] > math.log(device_memory))


def _learnt(groups: Sequence[Group], neutral: Prior, noise: float) -> Prior:
    return learn([group.lesson() for group in groups], neutral, noise)
