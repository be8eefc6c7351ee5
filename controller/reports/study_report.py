"""The report of a study: the winner against the base, every trial, what rules rejected."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import (
    Card,
    Column,
    Figure,
    Page,
    Section,
    Table,
    number,
    time_text,
)
from mindtune.controller.reports.recorded import retold
from mindtune.controller.reports.spread_figures import Point, bars, scatter
from mindtune.controller.reports.study_findings import (
    ablation_section,
    factor_text,
    front_section,
    kept_section,
    noise_section,
)
from mindtune.controller.trials.study_folder import StudyFolder
from mindtune.controller.trials.summary import (
    Measurement,
    StudySummary,
    TrialSummary,
    read_summary,
)
from mindtune.controller.units import format_duration, format_size
from mindtune.search.knobs import Config, describe, differences, knob_text

__all__ = ["study_page"]

_DAY_H = 24.0


def study_page(folder: Path, words: Words) -> Page:
    """Return the report of a study's folder, finished or not.

    Raises:
        ConfigError: if the folder holds no summary of a study.
    """
    summary = read_summary(StudyFolder(folder))
    sections = [
        _winner(summary, words),
        ablation_section(summary, words),
        _values(summary, words),
        noise_section(summary, words),
        front_section(summary, words),
        _trade_off(summary, words),
        kept_section(summary, words),
        _trials(summary, words),
        _rules(summary, words),
        _provenance(summary, folder, words),
    ]
    key = "none" if summary.winner is None else "complete" if summary.complete else "going_on"
    if key == "complete" and summary.winner == 0:
        key = "base"
    return Page(
        words=words,
        title=words("study.title", name=summary.study),
        subtitle=words(
            "study.subtitle", measured=len(summary.trials), planned=summary.planned,
            feasible=summary.feasible, total=summary.total,
        ),
        tone="good" if key in ("complete", "base") else "plain",
        verdict=words(f"study.verdict.{key}"),
        lead=words(f"study.lead.{key}", trial=summary.winner),
        quotes=[retold(text, words) for text in (summary.reason, summary.search_ended) if text],
        cards=_cards(summary, words),
        sections=[section for section in sections if section is not None],
    )  # fmt: skip


def _cards(summary: StudySummary, words: Words) -> list[Card]:
    outcomes = Counter(trial.outcome for trial in summary.trials)
    launches = [launch for trial in summary.trials for launch in trial.measurements]
    rejected = summary.total - summary.feasible
    share = rejected / summary.total if summary.total else 0.0
    return [
        _gain(summary, words),
        Card(
            words("study.card.trials"),
            words("study.card.measured", count=len(summary.trials), planned=summary.planned),
            [
                words("study.card.outcome", count=count, outcome=words.known("outcome", outcome))
                for outcome, count in sorted(outcomes.items())
            ],
        ),
        Card(
            words("study.card.cost"),
            format_duration(sum(launch.wall_s for launch in launches)),
            [words("study.card.launches", count=len(launches))],
        ),
        Card(
            words("study.card.saved"),
            words("study.card.rejected", count=f"{rejected:,}", total=f"{summary.total:,}"),
            [words("study.card.share", share=f"{share:.0%}")],
        ),
    ]


def _gain(summary: StudySummary, words: Words) -> Card:
    title = words("study.card.gain")
    if not summary.winner:
        return Card(title, "-", [words("study.card.no_gain")])
    winner, base = summary.trial(summary.winner), _base(summary)
    if base is None:
        return Card(title, "-", [words("study.card.no_base")])
    notes = []
    old, new = base.settled_value(), winner.settled_value()
    value = factor_text(new / old if old and new else None, words)
    if not winner.confirmed:
        notes.append(words("study.card.unconfirmed"))
    step, base_step = _median(winner, _step_time), _median(base, _step_time)
    if step and base_step:
        notes.append(words(
            "study.card.step", old=time_text(base_step), new=time_text(step)
        ))  # fmt: skip
        notes.append(words("study.card.day", hours=f"{_DAY_H * step / base_step:.1f}"))
    memory = _median(winner, lambda launch: launch.peak_memory_bytes)
    if memory:
        notes.append(words("study.card.memory", size=format_size(memory)))
    return Card(title, value, notes)


def _base(summary: StudySummary) -> TrialSummary | None:
    """Return the base config; None: others were measured before it."""
    return next((trial for trial in summary.trials if trial.number == 0), None)


def _step_time(launch: Measurement) -> float | None:
    return launch.step_time_s


def _median(trial: TrialSummary, read: Callable[[Measurement], float | None]) -> float | None:
    found = [value for launch in trial.confirming() if (value := read(launch)) is not None]
    return statistics.median(found) if found else None


def _winner(summary: StudySummary, words: Words) -> Section | None:
    if summary.winner is None:
        return None
    winner, base = summary.trial(summary.winner), _base(summary)
    known = {} if base is None else base.knobs
    rows = [
        [name, knob_text(known[name]) if name in known else "-", knob_text(value)]
        for name, value in winner.knobs.items()
    ]
    changed = frozenset(i for i, row in enumerate(rows) if row[1] != row[2])
    columns = [Column(words(f"column.{name}")) for name in ("knob", "base", "best")]
    return Section(
        words("study.section.best"),
        text=words("study.best.text"),
        table=Table(columns, rows, strong=changed),
        quotes=[retold(winner.convergence, words)] if winner.convergence else [],
    )


def _values(summary: StudySummary, words: Words) -> Section | None:
    points = [
        Point(
            str(t.number), 0.0, t.value, t.interval,
            best=t.number == summary.winner, base=t.number == 0,
        )
        for t in summary.trials
        # A trial that was stopped early has a value of its first steps only, until confirmed.
        if t.value is not None and (t.outcome != "pruned" or t.confirmed)
    ]  # fmt: skip
    if not points:
        return None
    unit = words("axis.value" if summary.objective == "mfu" else "axis.relative_value")
    drawing = bars(
        points, x=words("axis.trial"), y=unit, best=words("column.best"),
        base=words("column.base"),
    )  # fmt: skip
    return Section(
        words("study.section.values"), figures=[Figure(drawing, words("study.values.caption"))]
    )


def _trade_off(summary: StudySummary, words: Words) -> Section | None:
    points = []
    for trial in summary.trials:
        launches = trial.confirming()
        memory = [m.peak_memory_bytes for m in launches if m.peak_memory_bytes is not None]
        times = [m.step_time_s for m in launches if m.step_time_s is not None]
        if memory and times:
            points.append(
                Point(
                    str(trial.number), max(memory) / 2**20, min(times),
                    best=trial.number == summary.winner, base=trial.number == 0,
                )
            )  # fmt: skip
    if not points:
        return None
    drawing = scatter(points, x=words("axis.peak_memory"), y=words("axis.step_time"))
    return Section(
        words("study.section.trade_off"), figures=[Figure(drawing, words("study.points.caption"))]
    )


def _trials(summary: StudySummary, words: Words) -> Section:
    first = _base(summary)
    base = {} if first is None else first.knobs
    heads = (
        ("trial", True), ("outcome", False), ("value", True), ("spread", True), ("mfu", True),
        ("stability", True), ("step_time", True), ("memory", True), ("launches", True),
        ("config", False), ("message", False),
    )  # fmt: skip
    columns = [Column(words(f"column.{name}"), number=is_number) for name, is_number in heads]
    rows = [_trial_row(trial, base, words) for trial in summary.trials]
    strong = frozenset(i for i, t in enumerate(summary.trials) if t.number == summary.winner)
    return Section(words("study.section.trials"), table=Table(columns, rows, strong=strong))


def _trial_row(trial: TrialSummary, base: Config, words: Words) -> list[str]:
    launches = trial.confirming()
    first = launches[0] if launches else None
    spread = "-"
    if trial.interval is not None:
        spread = " \N{EN DASH} ".join(map(number, trial.interval))
    step = first.step_time_s if first else None
    memory = first.peak_memory_bytes if first else None
    return [
        str(trial.number), words.known("outcome", trial.outcome), number(trial.value), spread,
        number(first.mfu if first else None), number(first.stability if first else None),
        "-" if step is None else time_text(step),
        "-" if memory is None else format_size(memory), str(len(trial.measurements)),
        describe(differences(trial.knobs, base)) or words("study.base_config"),
        retold(trial.message, words),
    ]  # fmt: skip


def _rules(summary: StudySummary, words: Words) -> Section:
    rows = [[r.rule, f"{r.count:,}", retold(r.reason, words)] for r in summary.rejected if r.count]
    title = words("study.section.rules")
    if not rows:
        return Section(title, text=words("study.rules.none"))
    columns = [
        Column(words("column.rule")), Column(words("column.configs"), number=True),
        Column(words("column.rule_reason")),
    ]  # fmt: skip
    return Section(title, table=Table(columns, rows))


def _provenance(summary: StudySummary, folder: Path, words: Words) -> Section:
    rows = [
        [words("provenance.source"), StudyFolder(folder).summary.name],
        [
            words("provenance.hardware"),
            retold(summary.hardware, words) if summary.hardware else "-",
        ],
        [words("provenance.objective"), words(f"study.objective.{summary.objective}")],
    ]
    columns = [Column(words("column.fact")), Column(words("column.value"))]
    return Section(words("section.provenance"), table=Table(columns, rows))
