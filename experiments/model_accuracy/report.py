"""The figures as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mindtune.experiments.model_accuracy.acceptance import Acceptance, acceptance
from mindtune.experiments.model_accuracy.chances import chances, spreads
from mindtune.experiments.model_accuracy.evaluation import (
    DRAWS,
    Result,
    evaluate,
    memory_groups,
    time_groups,
)
from mindtune.experiments.model_accuracy.learning import NEUTRAL_MEMORY, NEUTRAL_TIME, learn
from mindtune.experiments.model_accuracy.metrics import ceiling, regret, tie_aware_spearman
from mindtune.experiments.model_accuracy.tables import Tables
from mindtune.search.calibration import Prior
from mindtune.search.cost_model import MEMORY_NOISE, TIME_NOISE
from mindtune.search.memory_model import MemoryRates
from mindtune.search.time_model import TimeRates

__all__ = ["Figures", "figures", "markdown"]

_NOISE = 0.1
"""Of a repeat of the same config: the tables publish 3 to 22 %, by table."""
_STALLED = 2.0
_MIN_CONFIGS = 10
"""Configs, failed ones included, of a group whose order is judged."""


@dataclass(frozen=True)
class Ranking:
    """Order and choice in one group of configs that differ in layout alone."""

    name: tuple[str, ...]
    num_configs: int
    spearman: float
    """Over the configs that did not calibrate; mean of the draws."""
    regret: float
    naive_spearman: float
    naive_regret: float
    fitted_spearman: float
    """Of the formula calibrated with every row of the group."""
    ceiling_spearman: float
    ceiling_regret: float
    num_stalled: int
    """Configs measured at more than twice the time of the formula calibrated with every row."""
    spearman_without_stalled: float


@dataclass(frozen=True)
class Figures:
    """Everything that is published."""

    tables: Tables
    memory: tuple[Result, ...]
    time: tuple[Result, ...]
    acceptance: tuple[Acceptance, ...]
    rankings: tuple[Ranking, ...]
    time_prior: Prior
    memory_prior: Prior
    """What all tables together teach."""


def figures(tables: Tables) -> Figures:
    """Return the figures of all tables; about 20 s for 2,300 rows."""
    by_memory, by_time = memory_groups(tables.rows), time_groups(tables.rows)
    memory, time = evaluate(by_memory, of_time=False), evaluate(by_time, of_time=True)
    sizes: dict[tuple[str, ...], int] = {}
    for row in tables.rows:
        sizes[row.group] = sizes.get(row.group, 0) + 1
    return Figures(
        tables=tables,
        memory=tuple(memory),
        time=tuple(time),
        acceptance=tuple(acceptance(memory, tables.rows)),
        rankings=tuple(
            _ranking(result, sizes[result.group.name])
            for result in time
            if result.group.is_ranked and sizes[result.group.name] >= _MIN_CONFIGS
        ),
        time_prior=learn([group.lesson() for group in by_time], NEUTRAL_TIME, TIME_NOISE),
        memory_prior=learn([group.lesson() for group in by_memory], NEUTRAL_MEMORY, MEMORY_NOISE),
    )


def _ranking(result: Result, num_configs: int) -> Ranking:
    # Rows that contradict their group's batch are gone, so steps compare like tokens/s.
    measured = result.group.measured
    best, chance = ceiling(measured, _NOISE)
    stalled = measured > _STALLED * result.by_all
    return Ranking(
        name=result.group.name,
        num_configs=num_configs,
        spearman=_mean(
            tie_aware_spearman(draw.predicted[draw.held_out], measured[draw.held_out])
            for draw in result.draws
        ),
        regret=_mean(regret(draw.predicted, measured) for draw in result.draws),
        naive_spearman=_mean(
            tie_aware_spearman(draw.naive[draw.held_out], measured[draw.held_out])
            for draw in result.draws
        ),
        naive_regret=regret(result.group.naive, measured),
        fitted_spearman=_mean([tie_aware_spearman(result.by_all, measured)]),
        ceiling_spearman=_mean([best]),
        ceiling_regret=chance,
        num_stalled=int(stalled.sum()),
        spearman_without_stalled=_mean(
            tie_aware_spearman(draw.predicted[kept], measured[kept])
            for draw in result.draws
            for kept in (draw.held_out[~stalled[draw.held_out]],)
        ),
    )


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else float("nan")


def _held_out(result: Result) -> Any:
    return np.concatenate(
        [(draw.predicted / result.group.measured - 1)[draw.held_out] for draw in result.draws]
    )


def _naive(result: Result) -> Any:
    return np.concatenate(
        [(draw.naive / result.group.measured - 1)[draw.held_out] for draw in result.draws]
    )


def _at_first(result: Result) -> Any:
    return result.uncalibrated / result.group.measured - 1


def _by_all(result: Result) -> Any:
    return result.by_all / result.group.measured - 1


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _quartiles(errors: Any) -> str:
    low, middle, high = np.quantile(np.abs(errors), [0.25, 0.5, 0.75])
    return f"{_percent(middle)} [{_percent(low)}, {_percent(high)}]"


def _errors(results: Sequence[Result]) -> list[str]:
    def all_rows(of: Any) -> Any:
        return np.concatenate([of(result) for result in results])

    def by_group(of: Any) -> str:
        return _percent(np.median([np.median(np.abs(of(result))) for result in results]))

    kinds = (
        ("other tables alone", _at_first),
        ("and 3 rows", _held_out),
        ("and all rows", _by_all),
        ("naive, 3 rows", _naive),
    )
    lines = _heading(("Learnt from", "Error of a row", "Signed", "Median group"))
    lines += [
        f"| {name} | {_quartiles(all_rows(of))} | {_percent(np.median(all_rows(of)))} | "
        f"{by_group(of)} |"
        for name, of in kinds
    ]
    return lines


def _per_group(results: Sequence[Result]) -> list[str]:
    lines = _heading(("Group", "Rows", "Other tables alone", "And 3 rows", "And all rows"))
    for result in results:
        errors = [
            _percent(np.median(np.abs(of(result)))) for of in (_at_first, _held_out, _by_all)
        ]
        name = ", ".join(part for part in result.group.name if part)
        lines.append(f"| {name} | {len(result.group.rows)} | {' | '.join(errors)} |")
    return lines


def markdown(found: Figures) -> str:
    """Return all figures as Markdown."""
    memory, time = found.memory, found.time
    lines = [
        *_coverage(found.tables), *_unused(found),
        "", f"## Memory: {_num_rows(memory)} rows in {len(memory)} tables", "",
        *(_of_memory(found) if memory else [_TOO_FEW]),
        "", f"## Step time: {_num_rows(time)} rows in {len(time)} groups", "",
        *([*_errors(time), "", *_ranked(found.rankings)] if time else [_TOO_FEW]),
        "", "## What all tables teach", "",
        *_taught(TimeRates, found.time_prior), "", *_taught(MemoryRates, found.memory_prior),
        "", "## By group: median error of memory", "", *_per_group(memory),
        "", "## By group: median error of step time", "", *_per_group(time),
    ]  # fmt: skip
    return "\n".join(lines)


_TOO_FEW = "No four rows of a group were measured."


def _of_memory(found: Figures) -> list[str]:
    return [
        *_errors(found.memory),
        "", *spreads(found.memory),
        "", *_accepted(found.acceptance),
        "", *chances(found.memory, found.tables.rows),
    ]  # fmt: skip


def _taught(kind: type[TimeRates | MemoryRates], prior: Prior) -> list[str]:
    names = [field.name for field in fields(kind)]
    lines = _heading(("Rate", "Mean", "Spread of its logarithm"))
    for name, mean, spread in zip(names, prior.means, prior.spreads, strict=True):
        lines.append(f"| {name} | {math.exp(mean):.2g} | {spread:.2g} |")
    return lines


def _num_rows(results: Sequence[Result]) -> int:
    return sum(len(result.group.rows) for result in results)


def _coverage(tables: Tables) -> list[str]:
    unmapped = sum(tables.unmapped.values())
    lines = [f"{len(tables.rows)} rows mapped, {unmapped} not:", ""]
    for (file, reason), count in sorted(tables.unmapped.items()):
        lines.append(f"- {file}: {count}, {reason}")
    lines += [f"- {name}: no table of runs" for name in tables.skipped]
    return lines


def _unused(found: Figures) -> list[str]:
    rows = found.tables.rows
    timed = sum(row.step_time_s is not None for row in rows) - _num_rows(found.time)
    told = sum(row.memory_bytes is not None for row in rows) - _num_rows(found.memory)
    said = (
        f"Of those mapped, {timed} step times and {told} memories are not used: fewer than four "
        "of a table and device, or a device of unknown speed."
    )
    return ["", said]


def _accepted(tables: Sequence[Acceptance]) -> list[str]:
    columns = (
        "Table", "Failed for memory", "Accepted", "Fit", "Rejected", "Ran above the limit",
        "Failed, no cause", "Accepted",
    )  # fmt: skip
    lines = _heading(columns)
    failed = sum(table.num_failed for table in tables)
    fitting = sum(table.num_fitting for table in tables)
    lines += [
        f"| {', '.join(table.table)} | {table.num_failed} | {_percent(table.accepted)} | "
        f"{table.num_fitting} | {_percent(table.rejected)} | {table.num_above_limit} | "
        f"{table.num_unexplained} | {_percent(table.unexplained_accepted)} |"
        for table in tables
    ]
    if failed and fitting:
        accepted = sum(table.accepted * table.num_failed for table in tables) / failed
        first = sum(table.accepted_uncalibrated * table.num_failed for table in tables) / failed
        rejected = sum(table.rejected * table.num_fitting for table in tables) / fitting
        lines.append(
            f"| all | {failed} | {_percent(accepted)} ({_percent(first)} without the 3 rows) | "
            f"{fitting} | {_percent(rejected)} | "
            f"{sum(table.num_above_limit for table in tables)} | "
            f"{sum(table.num_unexplained for table in tables)} | |"
        )
    return lines


def _ranked(rankings: Sequence[Ranking]) -> list[str]:
    columns = (
        "Group", "Configs", "Spearman", "Ceiling", "All rows", "Stalled", "Without", "Naive",
        "Regret of the top 3", "Ceiling", "Naive",
    )  # fmt: skip
    title = f"Order and choice in groups of {_MIN_CONFIGS} configs or more, {DRAWS} draws:"
    lines = [title, "", *_heading(columns)]
    lines += [
        f"| {', '.join((one.name[1], *one.name[4:6]))} | {one.num_configs} | "
        f"{one.spearman:.2f} | {one.ceiling_spearman:.2f} | {one.fitted_spearman:.2f} | "
        f"{one.num_stalled} | {one.spearman_without_stalled:.2f} | {one.naive_spearman:.2f} | "
        f"{_percent(one.regret)} | {_percent(one.ceiling_regret)} | "
        f"{_percent(one.naive_regret)} |"
        for one in rankings
    ]
    if rankings:
        lines += [_summary("median", rankings, np.median, np.median)]
        lines += [_summary("worst", rankings, np.min, np.max)]
    return lines


def _heading(columns: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _summary(name: str, rankings: Sequence[Ranking], low: Any, high: Any) -> str:
    def order(field: str) -> str:
        return f"{low([getattr(one, field) for one in rankings]):.2f}"

    def cost(field: str) -> str:
        return _percent(high([getattr(one, field) for one in rankings]))

    cells = (
        name, "", order("spearman"), order("ceiling_spearman"), order("fitted_spearman"), "",
        order("spearman_without_stalled"), order("naive_spearman"), cost("regret"),
        cost("ceiling_regret"), cost("naive_regret"),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"
