"""How a run or a study looks on a terminal, and in plain lines where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mindtune.controller.contract import DecisionRecord
from mindtune.controller.printable import printable
from mindtune.controller.trials.summary import TrialSummary
from mindtune.controller.units import format_duration, format_size
from mindtune.controller.watch.run_status import RunStatus
from mindtune.controller.watch.sparkline import sparkline
from mindtune.controller.watch.study_status import RunningTrial, StudyStatus
from mindtune.policies.findings import Finding
from mindtune.policies.signals import Observation
from mindtune.search.knobs import Config, describe, differences

__all__ = [
    "decision_line",
    "finding_line",
    "run_facts",
    "run_line",
    "run_view",
    "state_line",
    "study_facts",
    "study_view",
    "time_left",
    "trial_line",
]  # fmt: skip

_SPARK_WIDTH = 40
_LAST = 6
"""Findings and decisions shown."""
_MOST_TRIALS = 15
_NARROW = 90
"""Columns of a terminal below which a table shows less."""
_STYLES = {"running": "green", "ended": "bold", "waiting": "", "silent": "bold yellow",
           "hung": "bold red", "gone": "bold red"}  # fmt: skip


def state_line(status: RunStatus) -> str:
    """Return how the run is doing, in one sentence."""
    since = "" if status.silence_s is None else format_duration(status.silence_s)
    if status.state == "ended":
        message = f": {status.message.splitlines()[0]}" if status.message else ""
        return f"ended: {status.outcome}{message}"
    if status.state == "gone":
        return f"gone: its process has ended without a result, last sign of life {since} ago"
    if status.state == "hung":
        return f"hung: the watchdog wrote stacks.txt, last sign of life {since} ago"
    if status.state == "silent":
        limit = format_duration(status.limit_s)
        return f"silent for {since} (limit {limit}): it was killed, hangs, or compiles"
    if status.state == "waiting":
        return "waiting for the first step"
    return f"running, last sign of life {since} ago"


def run_facts(status: RunStatus) -> list[tuple[str, str]]:
    """Return name and value of what was measured last."""
    if not status.steps:
        return []
    last = status.steps[-1]
    step = f"{last.step:,}"
    if status.planned_steps is not None:
        step += f" of {status.planned_steps:,} ({min(1.0, last.step / status.planned_steps):.0%})"
    facts = [("step", step), ("loss", _number(last.loss))]
    facts += [(name, text) for name, text in _measured(last) if text]
    if status.step_time_s is not None:
        facts.insert(2, ("step time", f"{_step_time(status.step_time_s)} (median)"))
    return facts


def _step_time(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"


def time_left(status: RunStatus) -> str:
    """Return how long the planned steps take yet, and by what that is told; empty: it ended."""
    if status.state != "running":
        return ""
    if status.steps_left is None:
        return "not known, since no file says how many steps it is to make"
    if status.steps_left == 0:
        return "none, its steps are made"
    if status.time_left_s is None:
        return f"not known, since the {status.steps_left:,} steps left have no time to go by"
    return (
        f"{format_duration(status.time_left_s)} (at the median of the last "
        f"{len(status.step_times_s)} steps, without evaluation and saving)"
    )


def _measured(last: Observation) -> list[tuple[str, str]]:
    memory = last.device_memory_used_bytes or last.memory_allocated_bytes
    busy = last.device_utilization
    return [
        ("throughput", f"{last.tokens_per_s:,.0f} tokens/s" if last.tokens_per_s else ""),
        ("gradient norm", _number(last.grad_norm, "")),
        ("learning rate", _number(last.learning_rate, "")),
        ("its scale", _number(last.learning_rate_scale, "")),
        ("loss scale", _number(last.loss_scale, "")),
        ("global batch", _number(last.global_batch_size, "")),
        ("MFU", "" if last.mfu is None else f"{last.mfu:.1%}"),
        ("device busy", "" if busy is None else f"{busy:.0%}"),
        ("memory", "" if memory is None else format_size(memory)),
    ]  # fmt: skip


def _number(value: float | None, missing: str = "-") -> str:
    if value is None:
        return missing
    return f"{value:.0f}" if abs(value) < 1e12 and value == round(value) else f"{value:.4g}"


def finding_line(incident: tuple[int, Finding]) -> str:
    """Return an incident of a segment in one line."""
    run, finding = incident
    last = "" if finding.last_step == finding.step else f" to {finding.last_step}"
    where = f"step {finding.step}{last}{f' after restart {run}' if run else ''}"
    kind = finding.kind.value.replace("_", " ")
    return f"{where}: {finding.severity.value}: {kind}: {finding.message}"


def decision_line(record: DecisionRecord) -> str:
    """Return a decision in one line."""
    change = "" if record.requested is None else f" {_value(record.requested)}"
    if record.before is not None and not isinstance(record.requested, str):
        change = f" {_number(record.before)} -> {_value(record.requested)}"
    outcome = f" ({record.outcome})" if record.outcome else ""
    what = f"{record.policy}: {record.action}{change}"
    return f"step {record.step}: {what}: {record.verdict}{outcome}: {record.reason}"


def _value(value: float | str | None) -> str:
    return value if isinstance(value, str) else _number(value)


def run_line(status: RunStatus) -> str:
    """Return the newest numbers in one line."""
    facts = [f"{name} {value}" for name, value in run_facts(status)]
    left = time_left(status)
    return ", ".join(facts + [f"time left {left}"] * bool(left)) or state_line(status)


def run_view(name: str, status: RunStatus, *, plain: bool) -> RenderableType:
    """Return the run as panels; `plain`: the terminal knows ASCII alone."""
    facts = [Text.assemble((f"{key}  ", "dim"), value) for key, value in run_facts(status)]
    parts: list[RenderableType] = [
        _text(state_line(status), style=_STYLES[status.state]),
        Columns(facts, padding=(0, 3)),
    ]
    if left := time_left(status):
        parts.append(Text.assemble(("time left  ", "dim"), left))
    for title, values in (
        ("loss", [step.loss for step in status.steps]),
        ("gradient norm", [step.grad_norm for step in status.steps]),
        ("step time", [step.step_time_s for step in status.steps]),
    ):
        course = sparkline(values, width=_SPARK_WIDTH, plain=plain)
        if course:
            parts.append(Text.assemble((f"{title:<14}", "dim"), course))
    return Panel(
        Group(
            *parts,
            *_list("findings", map(finding_line, status.findings), plain=plain),
            *_list("decisions", map(decision_line, status.decisions), plain=plain),
        ),
        title=_text(name),
        title_align="left",
        **_box(plain=plain),
    )


def _text(content: str, **options: Any) -> Text:
    """Return a text that steers no terminal, whatever program wrote it."""
    return Text(printable(content), **options)


def _list(title: str, lines: Iterable[str], *, plain: bool) -> list[RenderableType]:
    known = list(lines)
    if not known:
        return []
    head = f"{title} ({len(known)})" if len(known) <= _LAST else f"last {title} of {len(known)}"
    entries = [_text(f"  {line}", no_wrap=True, overflow=_cut(plain)) for line in known[-_LAST:]]
    return [Text(head, style="dim"), *entries]


def _cut(plain: bool) -> Literal["crop", "ellipsis"]:
    return "crop" if plain else "ellipsis"


def study_facts(status: StudyStatus) -> list[str]:
    """Return how the study is doing, in sentences."""
    summary = status.summary
    if summary is None:
        return ["no trial has ended yet"]
    measured = f"{len(summary.trials)} of {summary.planned} configs measured"
    lines = [f"{measured}; {summary.feasible:,} of {summary.total:,} feasible"]
    if summary.winner is not None:
        lines.append(_best(status, summary.trial(summary.winner), summary.trial(0)))
    if summary.complete:
        lines.append("the study is complete")
    elif summary.search_ended:
        lines.append(f"the search is over ({summary.search_ended}); leaders are confirmed")
    elif status.search_left_s is not None:
        left = format_duration(status.search_left_s)
        lines.append(f"about {left} left in the search, before the leaders are confirmed")
    if not summary.complete and not status.running and status.is_searched is False:
        lines.append("nobody is searching: `mindtune search` goes on where it was")
    return lines


def _best(status: StudyStatus, best: TrialSummary, base: TrialSummary) -> str:
    word = "best" if status.is_over else "best so far"
    line = f"{word}: trial {best.number}, value {_number(best.value)}"
    if best.number and best.value and base.value:
        line += f", {best.value / base.value:.2f} x the base's"
    return line


def trial_line(trial: RunningTrial) -> str:
    """Return a running launch in one line."""
    repeat = f" (repeat {trial.repeat})" if trial.repeat else ""
    return f"trial {trial.number}{repeat}: {run_line(trial.status)}"


def study_view(status: StudyStatus, *, plain: bool, width: int = 100) -> RenderableType:
    """Return the study as panels.

    Args:
        status: of the study.
        plain: the terminal knows ASCII alone.
        width: columns of the terminal; a narrow one gets a table of fewer columns.
    """
    parts: list[RenderableType] = [_text(line) for line in study_facts(status)]
    if status.running:
        parts += _list("running", map(trial_line, status.running), plain=plain)
    if status.summary is not None and status.summary.trials:
        parts.append(
            _trials(
                status.summary.trials, status.summary.winner, plain=plain, narrow=width < _NARROW
            )
        )
    title = _text(f"study {status.name}")
    return Panel(Group(*parts), title=title, title_align="left", **_box(plain=plain))


def _trials(
    trials: Sequence[TrialSummary], winner: int | None, *, plain: bool, narrow: bool
) -> Table:
    base: Config = trials[0].knobs
    best = [trial for trial in trials if trial.number == winner]
    newest = [trial for trial in trials if trial.number != winner][-_MOST_TRIALS:]
    caption = None
    if len(best) + len(newest) < len(trials):
        caption = f"the newest of {len(trials)}, and the best"
    table = Table(caption=caption, expand=True, **_box(plain=plain))
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for name in ("value", "step") if narrow else ("value", "step", "MFU", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("config", no_wrap=True, overflow=_cut(plain), ratio=1)
    for trial in sorted([*best, *newest], key=lambda trial: trial.number):
        launches = trial.confirming()
        first = launches[0] if launches else None
        step = None if first is None else first.step_time_s
        memory = None if first is None else first.peak_memory_bytes
        wide = [
            "-" if first is None or first.mfu is None else f"{first.mfu:.1%}",
            "-" if memory is None else format_size(memory),
        ]
        table.add_row(
            f"{'*' if trial.number == winner else ''}{trial.number}",
            trial.outcome,
            _number(trial.value),
            "-" if step is None else _step_time(step),
            *([] if narrow else wide),
            describe(differences(trial.knobs, base)) or "the base config",
            style="bold" if trial.number == winner else "",
        )
    return table


def _box(*, plain: bool) -> dict[str, Any]:
    return {"box": box.ASCII if plain else box.ROUNDED}
