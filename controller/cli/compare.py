"""`mindtune compare`: a run beside its baseline, or the baseline alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mindtune.controller.cli.console import err, print_json
from mindtune.controller.cli.console import out as console_out
from mindtune.controller.cli.log_options import FormatOption, MapOption, StudyOption
from mindtune.controller.errors import ConfigError

if TYPE_CHECKING:
    from mindtune.controller.contract import CompareRow, RunConditions, RunMetrics
    from mindtune.controller.records.log_readers import Names

__all__ = ["compare", "told_conditions", "told_names"]

_DIFFERENT = {True: "different", False: "none", None: "?"}
_MET = {True: "met", False: "missed", None: ""}
_SIDE = "Folder of a run or trial, a training log, or a baseline file."


def compare(
    baseline: Annotated[Path, typer.Argument(help=_SIDE, metavar="BASELINE")],
    run: Annotated[
        Path | None,
        typer.Argument(help=f"{_SIDE} Left out: BASELINE alone is shown.", metavar="RUN"),
    ] = None,
    *,
    goals: Annotated[Path | None, typer.Option(help="goals.yaml: metric -> number.")] = None,
    save_baseline: Annotated[
        Path | None,
        typer.Option(help="Also write the metrics of BASELINE to a .json file.", metavar="FILE"),
    ] = None,
    study: StudyOption = None,
    format: FormatOption = "auto",  # noqa: A002 - the option's name
    map: MapOption = None,  # noqa: A002 - the option's name
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Compare a run with a baseline, metric by metric; a difference inside the noise is none."""
    from mindtune.controller.contract import CompareOutput, GoalsFile, read_document, write_json
    from mindtune.controller.metrics.compare import compare as compare_metrics
    from mindtune.controller.metrics.run_metrics import read_metrics

    if goals is not None and run is None:
        raise ConfigError("--goals belongs to a RUN, but there is none; give one.")
    if save_baseline is not None and save_baseline.suffix != ".json":
        raise ConfigError(f"--save-baseline must end in .json, but got {save_baseline.name!r}.")
    told, names = told_conditions(study), told_names(map)
    wanted = {} if goals is None else read_document(GoalsFile, goals).goals
    before = read_metrics(baseline, format=format, names=names, conditions=told)
    after = None
    if run is not None:
        after = read_metrics(run, format=format, names=names, conditions=told)
    if save_baseline is not None:
        write_json(save_baseline, before)
        err().print(f"written to {save_baseline}", soft_wrap=True)
    if after is None:
        if json:
            print_json(before)
        else:
            _print_metrics(before)
        return 0
    compared = compare_metrics(before, after, wanted)
    for warning in compared.warnings:
        err().print(f"warning: {warning}", soft_wrap=True)
    if json:
        print_json(CompareOutput(compared.rows))
    else:
        _print_rows(compared.rows, with_goals=bool(wanted))
    return 0


def told_conditions(study: Path | None) -> RunConditions | None:
    """Return what a study file that was named on the command line says about a run."""
    from mindtune.controller.contract import StudyFile, read_document
    from mindtune.controller.metrics.run_source import study_conditions

    if study is None:
        return None
    return study_conditions(read_document(StudyFile, study), study.resolve().parent)


def told_names(mapping: str | None) -> Names | None:
    """Return what `--map` says."""
    from mindtune.controller.records.log_readers import read_mapping

    return None if mapping is None else read_mapping(mapping)


def _print_metrics(metrics: RunMetrics) -> None:
    from mindtune.controller.contract import METRICS

    console = console_out()
    steps = metrics.steps
    left_out = ", ".join(f"{count} {phase}" for phase, count in steps.excluded.items())
    console.print(
        f"{metrics.source} ({metrics.format}): steps {steps.first_step} to {steps.last_step}, "
        f"{steps.recorded} recorded, {steps.timed} timed"
        f"{f'; times left out: {left_out}' if left_out else ''}",
        soft_wrap=True,
    )
    for name, section in metrics.sections():
        table = _table(["metric", "value", "95 % interval", "unit"])
        table.title, table.title_justify = name, "left"
        for metric, value in section:
            interval = metrics.intervals.get(metric)
            table.add_row(metric, _number(value), _span(interval), METRICS[metric].unit)
        console.print(table)
    _print_notes(list(metrics.reasons.items()))
    for finding in metrics.findings:
        console.print(f"{finding.severity}: {finding.message}", soft_wrap=True)


def _print_rows(rows: list[CompareRow], *, with_goals: bool) -> None:
    columns = ["metric", "baseline", "goal", "achieved", "ratio (95 %)", "difference", "unit"]
    if not with_goals:
        columns.remove("goal")
    table = _table(columns)
    for row in rows:
        goal = []
        if with_goals:
            goal = ["" if row.goal is None else f"{_number(row.goal)} {_MET[row.met]}".strip()]
        table.add_row(
            row.metric, _number(row.baseline), *goal, _number(row.achieved), _span(row.interval),
            _DIFFERENT[row.different], row.unit,
        )  # fmt: skip
    console_out().print(table)
    _print_notes([(row.metric, row.note) for row in rows if row.note])


def _table(columns: list[str]) -> Table:
    table = Table(box=None)
    for column in columns:
        table.add_column(column, no_wrap=column == "metric", overflow="fold")
    return table


def _print_notes(notes: list[tuple[str, str]]) -> None:
    """Print each note once, with the metrics that it is about."""
    for note in dict.fromkeys(text for _, text in notes):
        names = ", ".join(name for name, text in notes if text == note)
        console_out().print(f"{names}: {note}", soft_wrap=True)


def _span(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{_number(interval[0])} .. {_number(interval[1])}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if math.isfinite(value) and abs(value) >= 1e6:
        return f"{value:.4g}"
    return f"{value:.4g}" if not float(value).is_integer() else f"{value:.0f}"
