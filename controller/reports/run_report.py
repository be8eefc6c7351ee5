"""The report of one run: how it ended, its signals with the decisions on the time axis."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.contract import (
    DecisionRecord,
    RunResult,
    SignalRow,
    TrialRecord,
    parse,
    read_document,
    read_json,
)
from mindtune.controller.contract.fault_plan import PLANTED_FAULTS
from mindtune.controller.errors import ConfigError
from mindtune.controller.records import RunFolder, read_decisions, read_signals
from mindtune.controller.reports.figures import Mark, Panel, time_series
from mindtune.controller.reports.page import Column, Page, Section, Table, number
from mindtune.controller.units import format_duration, format_size
from mindtune.policies.signals import Observation

__all__ = ["run_page"]

_PANELS = (
    ("loss", "Loss", "nats", False),
    ("eval_loss", "Validation loss", "nats", False),
    ("grad_norm", "Gradient norm before clipping", "", True),
    ("learning_rate", "Learning rate that acted", "", False),
    ("learning_rate_scale", "Scale over the schedule", "", True),
    ("loss_scale", "Loss scale", "", True),
    ("update_skipped", "Update skipped", "", False),
    ("global_batch_size", "Global batch size", "samples", False),
    ("step_time_s", "Step time, compilation left out", "s", True),
    ("data_time_s", "Part of the step time spent waiting for data", "s", False),
    ("tokens_per_s", "Throughput", "tokens/s", False),
    ("mfu", "MFU", "ratio", False),
    ("device_utilization", "Device utilization", "ratio", False),
    ("device_memory_used_bytes", "Memory in use", "MB", False),
)
_TIMES = ("step_time_s", "data_time_s", "tokens_per_s")


def run_page(folder: Path) -> Page:
    """Return the report of a run's folder; a killed run has one too.

    Raises:
        ConfigError: if the folder has no readable signals.csv.
    """
    records = RunFolder(folder)
    rows = read_signals(records.signals)
    if not rows:
        raise ConfigError(
            f"{records.signals} must hold at least one step, but it has a header only."
        )
    decisions = read_decisions(records.decisions)
    result = _ending(records)
    sections = [
        _summary(rows, decisions, result),
        _signals(rows, decisions),
        _decisions(decisions),
    ]
    return Page(
        title=f"Run {folder.resolve().name}",
        subtitle=f"{len(rows)} recorded steps; {records.signals.name}, {records.decisions.name}",
        lead=_lead(rows, decisions, result),
        sections=sections,
    )


@dataclass(frozen=True)
class _Ending:
    """How a run or a trial ended."""

    outcome: str
    message: str
    wall_s: float
    eval_loss: float | None
    peak_memory_bytes: int | None
    findings: Mapping[str, int]


def _ending(records: RunFolder) -> _Ending | None:
    trial_file = records.path / TrialRecord.FILE
    if trial_file.exists():
        trial = read_document(TrialRecord, trial_file)
        return _Ending(
            trial.outcome, trial.message, trial.wall_s, None, trial.peak_memory_bytes, {}
        )
    if not records.result.exists():
        return None
    content = read_json(records.result)
    if isinstance(content, dict) and not {"steps", "wall_s"} & set(content):
        # A trial that was ended before its launcher could judge it.
        return None
    run = parse(RunResult, content, source=str(records.result))
    return _Ending(
        run.outcome, run.message, run.wall_s, run.eval_loss, run.peak_memory_bytes, run.findings
    )


def _lead(
    rows: Sequence[SignalRow], decisions: Sequence[DecisionRecord], result: _Ending | None
) -> str:
    last = rows[-1].observation
    granted = sum(
        record.verdict == "granted" and record.requested != PLANTED_FAULTS for record in decisions
    )
    ended = {
        None: "The run has left no result: it is going on, or it was killed.",
        "ok": "The run finished.",
        "stopped": "A policy stopped the run.",
    }.get(None if result is None else result.outcome)
    if ended is None and result is not None:
        ended = f"The run failed ({result.outcome})."
    message = f" {result.message}" if result is not None and result.message else ""
    planted = next((f" {r.reason}." for r in decisions if r.requested == PLANTED_FAULTS), "")
    return (
        f"{ended}{message}{planted} Last step {last.step}, loss {number(last.loss)}; "
        f"{granted} action{'' if granted == 1 else 's'} of policies."
    )


def _summary(
    rows: Sequence[SignalRow], decisions: Sequence[DecisionRecord], result: _Ending | None
) -> Section:
    observations = [row.observation for row in rows]
    trained = [o for o in observations if o.phase in (None, "train")]
    times = _values(trained, "step_time_s")
    waits = [
        o.data_time_s / o.step_time_s
        for o in trained
        if o.data_time_s is not None and o.step_time_s
    ]
    waits = [share for share in waits if math.isfinite(share)]
    skipped = sum(bool(o.update_skipped) for o in observations)
    broken = sum(o.loss is not None and not math.isfinite(o.loss) for o in observations)
    facts = [
        ("steps attempted", number(observations[-1].step)),
        ("updates skipped", number(skipped)),
        ("non-finite losses", number(broken)),
        ("last loss", number(observations[-1].loss)),
        ("median step time", _median(times, format_duration)),
        ("median share of data wait", _median(waits, lambda share: f"{share:.1%}")),
        ("median throughput", _median(_values(trained, "tokens_per_s"), _tokens)),
        ("median MFU", _median(_values(trained, "mfu"), lambda mfu: f"{mfu:.1%}")),
        ("decisions", number(len(decisions))),
    ]
    if result is not None:
        peak = result.peak_memory_bytes
        facts += [
            ("outcome", result.outcome),
            ("validation loss", number(result.eval_loss)),
            ("peak memory", "-" if peak is None else format_size(peak)),
            ("wall time", format_duration(result.wall_s)),
            *((f"finding {kind}", f"{count} x") for kind, count in result.findings.items()),
        ]
    table = Table([Column("fact"), Column("value", number=True)], [list(fact) for fact in facts])
    return Section("Summary", table=table)


def _values(observations: Sequence[Observation], name: str) -> list[float]:
    values = (getattr(o, name) for o in observations)
    return [value for value in values if value is not None and math.isfinite(value)]


def _median(values: Sequence[float], spell: Callable[[float], str]) -> str:
    return spell(statistics.median(values)) if values else "-"


def _tokens(rate: float) -> str:
    return f"{rate:,.0f} tokens/s"


def _signals(rows: Sequence[SignalRow], decisions: Sequence[DecisionRecord]) -> Section:
    steps = [row.observation.step for row in rows]
    marks = [
        Mark(record.step, granted=record.verdict in ("granted", "undone"))
        for record in decisions
        if record.action.startswith("Set") or record.action in ("Rewind", "RequestStop")
    ]
    panels, constant = [], []
    for name, title, unit, log in _PANELS:
        values = [_plotted(row.observation, name) for row in rows]
        measured = [value for value in values if value is not None]
        if len(rows) > 1 and len(set(measured)) == 1 and math.isfinite(measured[0]):
            constant.append(f"{title.lower()} {number(measured[0])} {unit}".strip())
        elif measured:
            panels.append(Panel(title, steps, values, unit, log, marks))
    unchanged = f"The same in all steps: {', '.join(constant)}." if constant else ""
    if not panels:
        return Section("Signals", text=unchanged or "No signal was measured.")
    return Section(
        "Signals",
        text=unchanged,
        figure=time_series(panels),
        caption="Vertical lines are decisions: solid if applied, dotted if refused or only "
        "observed. Crosses at the top are non-finite values.",
    )


def _plotted(observation: Observation, name: str) -> float | None:
    """Return what is drawn of a signal: no times of a step that compiled, memory in MB."""
    value: float | None = getattr(observation, name)
    if name in _TIMES and observation.phase == "compile":
        return None
    return value / 2**20 if value is not None and name.endswith("_bytes") else value


def _decisions(decisions: Sequence[DecisionRecord]) -> Section:
    if not decisions:
        return Section("Decisions", text="No policy asked for anything.")
    columns = [
        Column("step", number=True), Column("policy"), Column("action"),
        Column("before", number=True), Column("requested", number=True),
        Column("acted", number=True), Column("verdict"), Column("reason"), Column("outcome"),
    ]  # fmt: skip
    rows = [
        [
            str(record.step), record.policy, record.action, number(record.before),
            record.requested if isinstance(record.requested, str) else number(record.requested),
            number(record.acted), record.verdict, record.reason, record.outcome or "",
        ]
        for record in decisions
    ]  # fmt: skip
    return Section("Decisions", table=Table(columns, rows))
