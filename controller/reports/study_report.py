"""The report of a study: the winner against the base, every trial, what rules rejected."""

from __future__ import annotations

from pathlib import Path

from mindtune.controller.reports.figures import Point, bars, scatter
from mindtune.controller.reports.page import Column, Page, Section, Table, number
from mindtune.controller.reports.study_findings import (
    ablation_section,
    front_section,
    kept_section,
    noise_section,
)
from mindtune.controller.trials.study_folder import StudyFolder
from mindtune.controller.trials.summary import StudySummary, TrialSummary, read_summary
from mindtune.controller.units import format_duration, format_size
from mindtune.search.knobs import Config, describe, differences, knob_text

__all__ = ["study_page"]


def study_page(folder: Path) -> Page:
    """Return the report of a study's folder, finished or not.

    Raises:
        ConfigError: if the folder holds no summary of a study.
    """
    summary = read_summary(StudyFolder(folder))
    return Page(
        title=f"Study {summary.study}",
        subtitle=(
            f"{len(summary.trials)} of {summary.planned} planned configs measured; "
            f"{summary.feasible} of {summary.total} configs feasible"
            + (f"; the search ended: {summary.search_ended}" if summary.search_ended else "")
        ),
        lead=_lead(summary),
        sections=[
            section
            for section in (
                _winner(summary),
                ablation_section(summary),
                _values(summary),
                noise_section(summary),
                front_section(summary),
                _trade_off(summary),
                kept_section(summary),
                _trials(summary),
                _rules(summary),
            )
            if section is not None
        ],
    )


def _lead(summary: StudySummary) -> str:
    if summary.winner is None:
        return "No config has ended ok yet; the messages below say why."
    state = "" if summary.complete else " so far"
    reason = summary.reason or "The study goes on."
    return f"Best config{state}: trial {summary.winner}. {reason[:1].upper()}{reason[1:]}"


def _winner(summary: StudySummary) -> Section | None:
    if summary.winner is None:
        return None
    winner, base = summary.trial(summary.winner), summary.trial(0)
    rows = [
        [name, knob_text(base.knobs[name]) if name in base.knobs else "-", knob_text(value)]
        for name, value in winner.knobs.items()
    ]
    changed = frozenset(i for i, row in enumerate(rows) if row[1] != row[2])
    table = Table([Column("knob"), Column("base"), Column("best")], rows, strong=changed)
    return Section(
        "The best config", text="Knobs that differ from the base stand out.", table=table
    )


def _values(summary: StudySummary) -> Section | None:
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
    unit = "value" if summary.objective == "mfu" else "value over the base's"
    return Section(
        "Values",
        figure=bars(points, y=unit, title="Value of each trial that was measured in full"),
        caption="Green: the best; orange: the base. Lines span lowest to highest of the repeats.",
    )


def _trade_off(summary: StudySummary) -> Section | None:
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
    return Section(
        "Time against memory",
        figure=scatter(
            points, x="peak memory of the worst rank (MB)", y="step time (s)",
            title="Step time against peak memory",
        ),
    )  # fmt: skip


def _trials(summary: StudySummary) -> Section:
    base = summary.trials[0].knobs if summary.trials else {}
    columns = [
        Column("trial", number=True), Column("outcome"), Column("value", number=True),
        Column("spread", number=True), Column("MFU", number=True),
        Column("stability", number=True), Column("step", number=True),
        Column("memory", number=True), Column("launches", number=True), Column("config"),
        Column("message"),
    ]  # fmt: skip
    rows = [_trial_row(trial, base) for trial in summary.trials]
    strong = frozenset(i for i, t in enumerate(summary.trials) if t.number == summary.winner)
    return Section("Trials", table=Table(columns, rows, strong=strong))


def _trial_row(trial: TrialSummary, base: Config) -> list[str]:
    launches = trial.confirming()
    first = launches[0] if launches else None
    spread = "-" if trial.interval is None else " - ".join(number(v) for v in trial.interval)
    step = first.step_time_s if first else None
    memory = first.peak_memory_bytes if first else None
    return [
        str(trial.number), trial.outcome, number(trial.value), spread,
        number(first.mfu if first else None), number(first.stability if first else None),
        "-" if step is None else format_duration(step),
        "-" if memory is None else format_size(memory), str(len(trial.measurements)),
        describe(differences(trial.knobs, base)) or "the base config", trial.message,
    ]  # fmt: skip


def _rules(summary: StudySummary) -> Section:
    rows = [[r.rule, str(r.count), r.reason] for r in summary.rejected if r.count]
    if not rows:
        return Section("Rejected before any run", text="No rule rejected a config.")
    columns = [Column("rule"), Column("configs", number=True), Column("reason, of one of them")]
    return Section("Rejected before any run", table=Table(columns, rows))
