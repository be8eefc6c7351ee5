"""The rows as a Markdown table: median and range over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from mindtune.experiments.fault_injection.case import Case
from mindtune.experiments.fault_injection.cases import CASES, healthy_case
from mindtune.experiments.fault_injection.rows import FaultRow, RowKey

__all__ = ["spread", "summary"]

_HEAD = (
    "fault", "guard", "seeds", "named (rows)", "delay (steps)", "false actions (rows)",
    "steps lost", "validation loss", "over fault-free", "over unguarded", "ended",
    "actions (rows)", "batch at the end", "tokens/s", "wall (s)",
)  # fmt: skip


def summary(rows: Iterable[FaultRow]) -> str:
    """Return the table of all rows, the healthy steps, and what each case is."""
    known = {row.key: row for row in rows if row.fault in CASES}
    if not known:
        return "No row has been measured yet.\n"
    lines = [_line(_HEAD), _line(["---"] * len(_HEAD))]
    for case in CASES.values():
        for guard in case.guards:
            of_guard = [row for row in known.values() if row.key[:2] == (case.name, guard.name)]
            if of_guard:
                lines.append(_line(_cells(case, of_guard, known)))
    notes = [
        f"- `{case.name}`: {case.fault}; wanted: {case.wanted}."
        + "".join(f" `{guard.name}`: {guard.meaning}." for guard in case.guards)
        for case in CASES.values()
        if any(row.fault == case.name for row in known.values())
    ]
    stops = [
        f"- `{row.fault}`, `{row.guard}`, seed {row.seed}: {row.message.splitlines()[0]}"
        for row in known.values()
        if row.outcome == "stopped" and row.message
    ]
    return "\n\n".join(
        [
            "Median over the seeds, with [lowest, highest] where they differ.",
            "\n".join(lines),
            _healthy(list(known.values())),
            "\n".join(notes),
            *(
                ["Diagnoses of the runs that a policy stopped:\n\n" + "\n".join(stops)]
                * bool(stops)
            ),
            _places(list(known.values())) + "\n",
        ]
    )


def spread(values: Sequence[float], spell: str) -> str:
    """Return median and range of some values, or a dash where there are none.

    Args:
        values: What was measured, one per seed.
        spell: Format of a number, such as `{:.3f}`.
    """
    if not values:
        return "-"
    middle, low, high = (
        spell.format(value) for value in (statistics.median(values), min(values), max(values))
    )
    return middle if low == high else f"{middle} [{low}, {high}]"


def _cells(case: Case, rows: Sequence[FaultRow], known: Mapping[RowKey, FaultRow]) -> list[str]:
    first = rows[0]
    named = sum(row.detected_step is not None for row in rows)
    return [
        f"`{first.fault}`",
        f"`{first.guard}`",
        str(len(rows)),
        "-" if first.fault_step is None else f"{named} of {len(rows)}",
        _spread(rows, lambda row: row.detection_delay, "{:.0f}"),
        ", ".join(_counts(rows, lambda row: row.false_actions, "{kind} {count}")) or "none",
        _spread(rows, lambda row: row.steps_lost, "{:.0f}"),
        _spread(rows, lambda row: row.validation_loss, "{:.3f}"),
        _ratios(rows, _fault_free(case), known),
        "-" if first.guard == "unguarded" else _ratios(rows, (case.name, "unguarded"), known),
        _endings(rows),
        _actions(rows),
        _spread(rows, lambda row: row.final_batch_size, "{:.0f}"),
        _spread(rows, lambda row: row.tokens_per_s, "{:.0f}"),
        _spread(rows, lambda row: row.wall_s, "{:.0f}"),
    ]


def _fault_free(case: Case) -> tuple[str, str] | None:
    healthy = None if case.name.startswith("healthy") else healthy_case(case)
    return None if healthy is None else (healthy.name, healthy.guards[0].name)


def _ratios(
    rows: Sequence[FaultRow], against: tuple[str, str] | None, known: Mapping[RowKey, FaultRow]
) -> str:
    """Return the validation losses over those of other runs of the same seeds and length."""
    if against is None:
        return "-"
    ratios = []
    for row in rows:
        other = known.get((*against, row.seed))
        if other is None or row.validation_loss is None or not other.validation_loss:
            continue
        if row.outcome == other.outcome == "ok":
            ratios.append(row.validation_loss / other.validation_loss)
    return spread(ratios, "{:.3f}")


def _endings(rows: Sequence[FaultRow]) -> str:
    """Return the outcomes, and how long after the fault's begin a policy stopped the run."""
    outcomes = sorted({row.outcome for row in rows})
    parts = []
    for outcome in outcomes:
        count = sum(row.outcome == outcome for row in rows)
        part = outcome if count == len(rows) else f"{outcome} {count}"
        delays = [row.stop_delay for row in rows if row.outcome == outcome]
        known = [delay for delay in delays if delay is not None]
        parts.append(f"{part} after {spread(known, '{:.0f}')}" if known else part)
    return ", ".join(parts)


def _actions(rows: Sequence[FaultRow]) -> str:
    """Return what was granted, by kind, and in brackets what was only observed."""
    parts = [
        *_counts(rows, lambda row: row.actions, "{kind} {count}"),
        *_counts(rows, lambda row: {"undone": row.undone} if row.undone else {}, "{kind} {count}"),
        *_counts(rows, lambda row: row.proposed, "({kind} {count})"),
    ]
    return ", ".join(parts) or "none"


def _counts(
    rows: Sequence[FaultRow], read: Callable[[FaultRow], dict[str, int]], spell: str
) -> list[str]:
    kinds = sorted({kind for row in rows for kind in read(row)})
    return [
        spell.format(kind=kind, count=spread([read(row).get(kind, 0) for row in rows], "{:.0f}"))
        for kind in kinds
    ]


def _spread(rows: Sequence[FaultRow], read: Callable[[FaultRow], float | None], spell: str) -> str:
    return spread([value for row in rows if (value := read(row)) is not None], spell)


def _healthy(rows: Sequence[FaultRow]) -> str:
    """Return over how many healthy steps policies acted, and how often."""
    healthy = [row for row in rows if row.fault_step is None and row.guard == "guarded"]
    actions = sum(sum(row.false_actions.values()) for row in healthy)
    return (
        f"Healthy steps under acting policies: {sum(row.steps for row in healthy)} in "
        f"{len(healthy)} runs; actions in them: {actions}."
    )


def _places(rows: Sequence[FaultRow]) -> str:
    places = sorted({row.measured.sentence() for row in rows})
    busy = [row.others_busy for row in rows if row.others_busy is not None]
    load = f" Share of the cores that others took: {spread(busy, '{:.0%}')}." if busy else ""
    return "Measured on: " + " ".join(places) + load


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
