"""Sections of a study's report beside the winner: each knob's share, noise, front, kept steps."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Column, Figure, Section, Table, number
from mindtune.controller.reports.spread_figures import Point, scatter
from mindtune.controller.trials.summary import StudySummary
from mindtune.controller.units import format_size
from mindtune.search.knobs import KnobValue, knob_text

__all__ = ["ablation_section", "factor_text", "front_section", "kept_section", "noise_section"]

_ARROW = "\N{RIGHTWARDS ARROW}"


def ablation_section(summary: StudySummary, words: Words) -> Section | None:
    """Return what each knob gave on the way from the base config to the best."""
    if summary.winner in (None, 0):
        return None
    title = words("study.section.ablation")
    if not summary.ablation:
        return Section(title, text=words("study.ablation.none"))
    rows = [
        [
            _changes(step.changed), _trial(step.since, words), _trial(step.trial, words),
            number(step.value), factor_text(step.ratio, words),
            _beyond_noise(step.different, words),
        ]
        for step in summary.ablation
    ]  # fmt: skip
    text = words("study.ablation.text")
    if any(len(step.changed) > 1 for step in summary.ablation):
        text += words("lead.joint") + words("study.ablation.together")
    columns = [
        Column(words("column.knobs")), Column(words("column.from_trial"), number=True),
        Column(words("column.to_trial"), number=True), Column(words("column.value"), number=True),
        Column(words("column.gave"), number=True), Column(words("column.beyond_noise")),
    ]  # fmt: skip
    return Section(title, text=text, table=Table(columns, rows))


def _beyond_noise(different: bool | None, words: Words) -> str:
    return words({True: "yes", False: "no", None: "not_known"}[different])


def noise_section(summary: StudySummary, words: Words) -> Section | None:
    """Return how much measurements vary though nothing was changed."""
    noise = summary.noise
    confirmed = sum(trial.confirmed for trial in summary.trials)
    entries = [
        ("step", noise.step), ("part", noise.part), ("launch", noise.launch),
        ("common", noise.common), ("own", noise.own),
    ]  # fmt: skip
    rows = [
        [
            words(f"study.noise.{key}"), f"{share:.1%}",
            words(f"study.noise.{key}_how", configs=confirmed, freedom=noise.launch_freedom),
        ]
        for key, share in entries
        if share is not None
    ]  # fmt: skip
    if not rows:
        return None
    columns = [
        Column(words("column.noise_from")), Column(words("column.deviation"), number=True),
        Column(words("column.measured_from")),
    ]  # fmt: skip
    return Section(
        words("study.section.noise"), text=words("study.noise.text"), table=Table(columns, rows)
    )


def front_section(summary: StudySummary, words: Words) -> Section | None:
    """Return speed against stability, and the configs that none beats in both."""
    points, rows = [], []
    for trial in summary.trials:
        found = trial.speed_and_stability()
        if found is None:
            continue
        on_front = trial.number in summary.front
        points.append(Point(
            f"{trial.number}{'*' if on_front else ''}", found[1], found[0],
            best=trial.number == summary.winner, base=trial.number == 0,
        ))  # fmt: skip
        if on_front:
            peaks = [m.peak_memory_bytes for m in trial.confirming() if m.peak_memory_bytes]
            rows.append([
                str(trial.number), number(found[0]), number(found[1]),
                format_size(max(peaks)) if peaks else "-", str(len(trial.confirming())),
                words("yes" if trial.confirmed else "no"),
            ])  # fmt: skip
    if not points:
        return None
    speed = words("column.mfu" if summary.objective == "mfu" else "axis.steps_per_second")
    columns = [
        Column(words("column.trial"), number=True), Column(speed, number=True),
        Column(words("column.stability"), number=True),
        Column(words("column.memory"), number=True),
        Column(words("column.launches"), number=True), Column(words("column.confirmed")),
    ]  # fmt: skip
    drawing = scatter(points, x=words("column.stability"), y=speed)
    return Section(
        words("study.section.front"),
        text=words("study.front.text"),
        figures=[Figure(drawing, words("study.points.caption"))],
        table=Table(columns, rows) if rows else None,
    )


def kept_section(summary: StudySummary, words: Words) -> Section | None:
    """Return the improvements of the search in order, each with the way back."""
    if not summary.kept:
        return None
    rows = [
        [
            str(step.trial), number(step.value),
            factor_text(step.gain, words),
            "-" if step.gain is None else _beyond_noise(step.different, words),
            _changes(step.changed) or words("study.base_config"), step.version, step.way_back,
        ]
        for step in summary.kept
    ]  # fmt: skip
    columns = [
        Column(words("column.trial"), number=True), Column(words("column.value"), number=True),
        Column(words("column.gain"), number=True), Column(words("column.beyond_noise")),
        Column(words("column.changed")), Column(words("column.version")),
        Column(words("column.way_back")),
    ]  # fmt: skip
    return Section(
        words("study.section.kept"), text=words("study.kept.text"), table=Table(columns, rows)
    )


def factor_text(ratio: float | None, words: Words) -> str:
    """Return how many times larger something has become; a dash where that is not known."""
    if ratio is None or not math.isfinite(ratio):
        return "-"
    return words("study.card.times", ratio=f"{ratio:.2f}")


def _trial(number: int | None, words: Words) -> str:
    return words("study.ablation.for_this") if number is None else str(number)


def _changes(changed: Mapping[str, tuple[KnobValue, KnobValue]]) -> str:
    return ", ".join(
        f"{name}: {knob_text(old)} {_ARROW} {knob_text(new)}"
        for name, (old, new) in changed.items()
    )
