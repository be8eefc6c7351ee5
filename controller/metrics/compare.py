"""Compares a run with a baseline: what differs beyond the noise, and what cannot be told.

Both sides come with a 95 % interval per metric. That of the ratio, or of the difference where a
value may be 0 or below, follows from the two (Zou and Donner, Statistics in Medicine 27, 2008, on
the scale of logarithms for ratios); the metric is different where it leaves equality out. Such an
interval holds what scatters from step to step within a run. What differs from run to run (seed,
state of the machine) is not in it: only repeated runs tell that.

Nothing is refused as a whole. A row whose two numbers do not speak of the same thing (times of
different hardware, losses of different steps) is shown, says so, and is neither equal nor
different.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from mindtune.controller.contract import METRICS, CompareRow, Metric, RunConditions, RunMetrics
from mindtune.controller.metrics.judge import impossible

__all__ = ["Comparison", "compare"]

_EXACT = frozenset({"interruptions", "timeouts", "critical_findings"})
"""Counted, not sampled: any difference is one."""
_STEPS = 0.05
"""Two runs whose last steps differ by a larger share than this are not equally far; `loss` itself
is a mean over up to a fifth of a run."""
_OF_RECORDS = frozenset({"loss", "best_loss"})
"""Means and extremes of so many records, whatever number of steps they stand for."""
_INTERVALS = 1.5
"""Records that stand for more than so many times the steps are of other stretches."""

Interval = tuple[float, float]


class Comparison(NamedTuple):
    """The rows, and what to keep in mind about all of them."""

    rows: list[CompareRow]
    warnings: list[str]


def compare(
    baseline: RunMetrics, run: RunMetrics, goals: Mapping[str, float] | None = None
) -> Comparison:
    """Return every metric that one of the two has.

    Args:
        baseline: What to compare with.
        run: The run.
        goals: Metric -> what is to be reached.
    """
    goals = goals or {}
    reasons = _reasons(baseline, run)
    sampled = _sampled(baseline, run)
    before, after = baseline.values(), run.values()
    rows = [
        _row(
            name, metric, baseline, run,
            goal=goals.get(name),
            reason=reasons[metric.depends_on] or (sampled if name in _OF_RECORDS else ""),
        )
        for name, metric in METRICS.items()
        if before[name] is not None or after[name] is not None or name in goals
    ]  # fmt: skip
    return Comparison(rows, _warnings(baseline, run))


def _row(
    name: str,
    metric: Metric,
    baseline: RunMetrics,
    run: RunMetrics,
    *,
    goal: float | None,
    reason: str,
) -> CompareRow:
    before, after = baseline.values()[name], run.values()[name]
    interval, different, note = None, None, reason
    if before is None or after is None:
        which = baseline if before is None else run
        note = which.reasons.get(name, "not measured")
        note = f"{which.source}: {note}"
    elif not reason:
        interval, different = _judged(
            name, before, after, baseline.intervals.get(name), run.intervals.get(name)
        )
        if different is None:
            note = "one number each, whose scatter is not known"
    if any(value is not None and impossible(name, value) for value in (before, after)):
        note = "above 1, which is wrong: the peak, the shape, the devices or the time is"
    return CompareRow(
        metric=name,
        unit=metric.unit,
        baseline=before,
        goal=goal,
        achieved=after,
        interval=interval,
        different=different,
        met=None if after is None or impossible(name, after) else _met(metric, goal, after),
        note=note,
    )


def _met(metric: Metric, goal: float | None, value: float) -> bool | None:
    if goal is None or metric.better is None:
        return None
    return value >= goal if metric.better == "higher" else value <= goal


def _judged(
    name: str, before: float, after: float, old: Interval | None, new: Interval | None
) -> tuple[Interval | None, bool | None]:
    """Return the interval of the ratio, where there is one, and whether the two differ."""
    if not (math.isfinite(before) and math.isfinite(after)):
        same = before == after or (math.isnan(before) and math.isnan(after))
        return None, not same
    if name in _EXACT:
        return None, before != after
    if old is None or new is None:
        return None, False if before == after else None
    low, high = _difference(before, after, old, new)
    if min(before, after, *old, *new) <= 0:
        return None, not low <= 0 <= high
    logs = [math.log(value) for value in (before, after, *old, *new)]
    low, high = _difference(logs[0], logs[1], (logs[2], logs[3]), (logs[4], logs[5]))
    return (math.exp(low), math.exp(high)), not low <= 0 <= high


def _difference(before: float, after: float, old: Interval, new: Interval) -> Interval:
    """Return the interval of after - before."""
    # A skewed sample may put a value just outside of its own interval.
    below = math.hypot(max(0.0, after - new[0]), max(0.0, old[1] - before))
    above = math.hypot(max(0.0, new[1] - after), max(0.0, before - old[0]))
    return after - before - below, after - before + above


def _reasons(baseline: RunMetrics, run: RunMetrics) -> dict[str, str]:
    """Return why metrics of a kind mean nothing beside each other; empty: they do."""
    before, after = baseline.conditions, run.conditions
    other_model = ""
    if before.model is not None and after.model is not None and before.model != after.model:
        other_model = "the models are different ones"
    hardware = other_model
    if _both(before.hardware, after.hardware) and before.hardware != after.hardware:
        hardware = (
            f"other hardware ({before.hardware}; {after.hardware}): a new baseline has to be "
            "taken there"
        )
    course = other_model
    old, new = baseline.steps.last_step, run.steps.last_step
    if abs(old - new) > _STEPS * max(old, new):
        course = f"not equally far: step {old} and step {new}"
    return {"hardware": hardware, "course": course, "events": ""}


def _sampled(baseline: RunMetrics, run: RunMetrics) -> str:
    """Return why figures of so many records are of other steps; empty: they are not."""
    old, new = baseline.steps.interval, run.steps.interval
    if old is None or new is None or max(old, new) <= _INTERVALS * min(old, new):
        return ""
    return f"recorded every {old} and every {new} steps: the losses are of other steps"


def _warnings(baseline: RunMetrics, run: RunMetrics) -> list[str]:
    before, after = baseline.conditions, run.conditions
    reasons = _reasons(baseline, run)
    warnings = [
        f"{what} cannot be compared: {reason}."
        for what, reason in (
            ("times, memory and utilization", reasons["hardware"]),
            ("losses and gradient norms", reasons["course"]),
            ("the last and the best loss", _sampled(baseline, run)),
        )
        if reason
    ]
    if _both(before.seed, after.seed) and before.seed != after.seed:
        warnings.append(
            f"the seeds differ ({before.seed} and {after.seed}): losses of one run each do, too, "
            "even where nothing else was changed."
        )
    for what, old, new in (
        ("number of devices", before.num_devices, after.num_devices),
        ("precision", before.precision, after.precision),
        ("recomputation", before.recompute, after.recompute),
    ):
        if _both(old, new) and old != new:
            warnings.append(f"the {what} differs: {old} and {new}.")
    warnings += _versions(before, after)
    unknown = [
        name
        for name in ("hardware", "num_devices", "seed", "versions")
        if any(getattr(side, name) in (None, {}) for side in (before, after))
    ]
    if unknown:
        warnings.append(
            f"not known of both, and taken as equal: {', '.join(unknown).replace('_', ' ')}."
        )
    return warnings


def _versions(before: RunConditions, after: RunConditions) -> list[str]:
    changed = [
        f"{name} {before.versions[name]} and {after.versions[name]}"
        for name in sorted(before.versions.keys() & after.versions.keys())
        if before.versions[name] != after.versions[name]
    ]
    return [f"versions differ: {', '.join(changed)}."] if changed else []


def _both(old: object, new: object) -> bool:
    return old is not None and new is not None
