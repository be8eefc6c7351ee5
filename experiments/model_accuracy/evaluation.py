"""Leave one table out: what the others taught, three rows of its own, the error on the rest."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindtune.experiments.model_accuracy.learning import (
    NEUTRAL_MEMORY,
    NEUTRAL_TIME,
    Lesson,
    learn,
)
from mindtune.experiments.model_accuracy.mapping import Row
from mindtune.experiments.model_accuracy.naive import naive_memory, naive_time
from mindtune.search.calibration import Doubt, Prior, fit
from mindtune.search.cost_model import MEMORY_NOISE, TIME_NOISE, TRUSTED
from mindtune.search.forecasts import memory_forecast, time_forecast
from mindtune.search.memory_model import stage_memory
from mindtune.search.time_model import time_parts

__all__ = [
    "CALIBRATING_ROWS",
    "DRAWS",
    "Draw",
    "Group",
    "evaluate",
    "memory_groups",
    "time_groups",
]

CALIBRATING_ROWS = 3
DRAWS = 10
"""Choices of the three rows, drawn with fixed seeds."""
_SMALLEST = 4
"""Rows of a group: three to calibrate and one to predict."""


@dataclass(frozen=True)
class Group:
    """Rows that are calibrated together."""

    name: tuple[str, ...]
    """File and table first."""
    rows: tuple[Row, ...]
    parts: tuple[Any, ...]
    measured: Any
    """Seconds or bytes."""
    naive: Any
    forecast_of: Callable[[Sequence[Any]], Any]
    is_ranked: bool = False
    """All rows share everything but the layout."""

    @property
    def table(self) -> tuple[str, str]:
        """File and table."""
        return self.name[0], self.name[1]

    @property
    def family(self) -> str:
        """First word of the framework's name."""
        words = re.split(r"[ /,]", self.rows[0].framework.strip().lower())
        return words[0]

    def lesson(self) -> Lesson:
        """Return the group as others learn from it."""
        return Lesson(self.forecast_of(self.parts), np.log(self.measured))


@dataclass(frozen=True)
class Draw:
    """One choice of calibrating rows."""

    predicted: Any
    naive: Any
    """The naive model's prediction, times the median ratio of the calibrating rows."""
    held_out: Any
    """Indices of the other rows."""
    prior: Prior
    log_rates: Any
    doubt: Doubt
    """What the fit itself says is open."""
    spread: Any
    """Standard deviation of log(measured / predicted) by that, of each row."""


@dataclass(frozen=True)
class Result:
    """A group and what was predicted of it."""

    group: Group
    uncalibrated: Any
    """From the other tables alone."""
    draws: tuple[Draw, ...]
    by_all: Any
    """The same formula calibrated with every row of the group: what its shape can express."""
    all_log_rates: Any


def time_groups(rows: Iterable[Row]) -> list[Group]:
    """Return the groups with four timed rows or more; smaller ones of a table and device merge."""
    known = []
    for row in rows:
        parts = time_parts(row.config, row.facts)
        naive = naive_time(row)
        if row.step_time_s and naive and parts is not None and parts.amounts is not None:
            known.append((row, parts, row.step_time_s, naive))
    alike = _collected(known, lambda row: row.group)
    large = {key for key, members in alike.items() if len(members) >= _SMALLEST}
    rest = [one for key, members in alike.items() if key not in large for one in members]
    merged = _collected(rest, lambda row: (*row.group[:2], "mixed", row.group[4], row.group[6]))
    groups = [
        _group(key, alike[key], time_forecast, is_ranked=True) for key in alike if key in large
    ]
    groups += [
        _group(key, members, time_forecast)
        for key, members in merged.items()
        if len(members) >= _SMALLEST
    ]
    return sorted(groups, key=lambda group: group.name)


def memory_groups(rows: Iterable[Row]) -> list[Group]:
    """Return the tables with four rows or more whose memory was measured."""
    known = []
    for row in rows:
        stages = stage_memory(row.config, row.facts)
        if row.memory_bytes and stages is not None:
            told = stages if row.stage is None else (stages[row.stage],)
            known.append((row, told, row.memory_bytes, naive_memory(row)))
    tables = _collected(known, lambda row: row.group[:2])
    return [
        _group(key, members, memory_forecast)
        for key, members in sorted(tables.items())
        if len(members) >= _SMALLEST
    ]


def _collected(
    known: Iterable[tuple[Row, Any, float, float]], key: Callable[[Row], tuple[str, ...]]
) -> dict[tuple[str, ...], list[tuple[Row, Any, float, float]]]:
    found = defaultdict(list)
    for one in known:
        found[key(one[0])].append(one)
    return dict(found)


def _group(
    name: tuple[str, ...], members: list[tuple[Row, Any, float, float]],
    forecast_of: Callable[[Sequence[Any]], Any], *, is_ranked: bool = False,
) -> Group:  # fmt: skip
    rows, parts, measured, naive = zip(*members, strict=True)
    return Group(
        name, rows, parts, np.array(measured), np.array(naive), forecast_of, is_ranked=is_ranked
    )


def evaluate(groups: Sequence[Group], *, of_time: bool) -> list[Result]:
    """Return the predictions for every group.

    The prior comes from the groups of other tables alone, then from those of them that the same
    framework wrote. Equal inputs give equal results.
    """
    neutral, noise = NEUTRAL_MEMORY, MEMORY_NOISE
    if of_time:
        neutral, noise = NEUTRAL_TIME, TIME_NOISE
    lessons = {group.name: group.lesson() for group in groups}
    results = []
    for table in sorted({group.table for group in groups}):
        others = [group for group in groups if group.table != table]
        general = learn([lessons[group.name] for group in others], neutral, noise)
        for group in groups:
            if group.table != table:
                continue
            kin = [lessons[other.name] for other in others if other.family == group.family]
            prior = learn(kin, general, noise, weight=1.0)
            results.append(_result(group, prior, noise))
    return results


def _result(group: Group, prior: Prior, noise: float) -> Result:
    lesson = group.lesson()
    fitted = fit(lesson.forecast, lesson.log_measured, prior, noise)

    def at(log_rates: Any) -> Any:
        return np.exp(lesson.forecast(np.array(log_rates))[0])

    draws = []
    for seed in range(DRAWS):
        generator = np.random.default_rng(seed)
        chosen = generator.choice(len(group.rows), CALIBRATING_ROWS, replace=False)
        own = group.forecast_of([group.parts[index] for index in chosen])
        found = fit(own, lesson.log_measured[chosen], prior, noise, trusted=TRUSTED)
        factor = np.median(group.measured[chosen] / group.naive[chosen])
        draws.append(
            Draw(
                predicted=at(found.log_rates),
                naive=group.naive * factor,
                held_out=np.setdiff1d(np.arange(len(group.rows)), chosen),
                prior=prior,
                log_rates=np.array(found.log_rates),
                doubt=found.doubt,
                spread=found.doubt.spreads(lesson.forecast(np.array(found.log_rates))[1]),
            )
        )
    return Result(
        group=group,
        uncalibrated=at(prior.means),
        draws=tuple(draws),
        by_all=at(fitted.log_rates),
        all_log_rates=np.array(fitted.log_rates),
    )
