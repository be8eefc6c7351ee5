"""What the demo prints at its end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from rich.table import Table

from mindtune.controller.demo.demo import DemoResult
from mindtune.controller.trials.summary import Measurement, StudySummary, TrialSummary
from mindtune.controller.units import format_size

__all__ = ["comparison", "story"]


def comparison(summary: StudySummary) -> Table:
    """Return the base config against the best one, each with the spread of its launches.

    Where the base is the best, it stands against the leader that came next.
    """
    base = summary.trial(0)
    number = summary.winner or max(
        summary.leaders, key=lambda leader: summary.trial(leader).value or 0.0, default=0
    )
    other = summary.trial(number)
    table = Table(
        title="median [lowest - highest] of the confirming launches", title_justify="left"
    )
    table.add_column("")
    table.add_column(f"baseline (trial 0, {len(base.confirming())} launches)", justify="right")
    word = "best" if summary.winner else "not better"
    table.add_column(
        f"{word} (trial {number}, {len(other.confirming())} launches)", justify="right"
    )
    for name, read, spell in _METRICS:
        table.add_row(name, _cell(base, read, spell), _cell(other, read, spell))
    return table


_METRICS: Sequence[tuple[str, Callable[[Measurement], float | None], Callable[[float], str]]] = (
    ("MFU", lambda m: m.mfu, lambda v: f"{v:.1%}"),
    ("stability", lambda m: m.stability, lambda v: f"{v:.3f}"),
    ("value", lambda m: m.value, lambda v: f"{v:.4f}"),
    ("step time (s)", lambda m: m.step_time_s, lambda v: f"{v:.3f}"),
    ("peak memory", lambda m: m.peak_memory_bytes, format_size),
)


def _cell(
    trial: TrialSummary,
    read: Callable[[Measurement], float | None],
    spell: Callable[[float], str],
) -> str:
    values = [value for m in trial.confirming() if (value := read(m)) is not None]
    if not values:
        return "-"
    spread = f"{spell(min(values))} - {spell(max(values))}"
    return f"{spell(statistics.median(values))} [{spread}]"


def story(ended: DemoResult) -> list[str]:
    """Return what the guarded run was saved from, and where everything lies."""
    lines = ["", "Guarded run, learning rate 30x too high:"]
    for record in ended.decisions:
        if record.verdict not in ("granted", "undone"):
            continue
        change = ""
        if isinstance(record.requested, float) and math.isfinite(record.requested):
            before = "?" if record.before is None else f"{record.before:g}"
            change = f" {before} -> {record.requested:g}"
        lines.append(f"  step {record.step}: {record.policy} {record.action}{change}")
        lines.append(f"    because {record.reason}")
    result = ended.run_result
    if result is not None:
        loss = "-" if result.final_loss is None else f"{result.final_loss:.3f}"
        held_out = "-" if result.eval_loss is None else f"{result.eval_loss:.3f}"
        lines.append(
            f"  {result.outcome} after {result.steps} steps and {result.actions} actions: "
            f"loss {loss}, validation loss {held_out}"
        )
    lines.append("")
    lines += [f"{name}: {path}" for name, path in _paths(ended)]
    return lines


def _paths(ended: DemoResult) -> list[tuple[str, object]]:
    run_dir = ended.run_dir
    paths: list[tuple[str, object]] = [("best config", ended.best_config)]
    if run_dir is not None:
        names = ("signals.csv", "decisions.jsonl", "result.json")
        paths += [(name, run_dir / name) for name in names]
    paths += [("report of the run", ended.report), ("report of the study", ended.study_report)]
    return paths
