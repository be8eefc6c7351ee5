"""The rows as a Markdown table: median and range over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from mindtune.experiments.fault_injection.cases import CASES
from mindtune.experiments.fault_injection.rows import FaultRow

__all__ = ["spread", "summary"]

_HEAD = (
    "fault", "guard", "seeds", "samples", "validation loss", "training loss at the end",
    "updates skipped", "steps above a loss reached before", "actions (rows)", "first action",
    "delay (steps)", "batch at the end", "tokens/s", "wall (s)",
)  # fmt: skip


def summary(rows: Iterable[FaultRow]) -> str:
    """Return the table of all rows, and per fault how the guards compare seed by seed."""
    known = [row for row in rows if row.fault in CASES]
    if not known:
        return "No row has been measured yet.\n"
    lines = [_line(_HEAD), _line(["---"] * len(_HEAD))]
    comparisons: list[str] = []
    for case in CASES.values():
        of_case = [row for row in known if row.fault == case.name]
        for guard in case.guards:
            of_guard = [row for row in of_case if row.guard == guard.name]
            if of_guard:
                lines.append(_line(_cells(of_guard)))
        comparisons += _compared(of_case)
    notes = [
        f"- `{case.name}`: {case.fault}; wanted: {case.wanted}."
        + "".join(f" `{guard.name}`: {guard.meaning}." for guard in case.guards)
        for case in CASES.values()
        if any(row.fault == case.name for row in known)
    ]
    places = sorted({row.measured.sentence() for row in known})
    busy = [row.others_busy for row in known if row.others_busy is not None]
    load = f" Share of the cores that others took: {spread(busy, '{:.0%}')}." if busy else ""
    return (
        "Median over the seeds, with [lowest, highest] where they differ.\n\n"
        + "\n".join(lines)
        + "\n\n"
        + "\n".join(notes)
        + "\n\n"
        + ("\n".join(comparisons) + "\n\n" if comparisons else "")
        + "Measured on: "
        + " ".join(places)
        + load
        + "\n"
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


def _cells(rows: Sequence[FaultRow]) -> list[str]:
    first = rows[0]
    return [
        f"`{first.fault}`",
        f"`{first.guard}`",
        str(len(rows)),
        _spread(rows, lambda row: row.samples, "{:.0f}"),
        _spread(rows, lambda row: row.validation_loss, "{:.3f}"),
        _spread(rows, lambda row: row.final_loss, "{:.3f}"),
        _spread(rows, lambda row: row.updates_skipped, "{:.0f}"),
        _spread(rows, lambda row: row.steps_above, "{:.0f}"),
        _actions(rows),
        _spread(rows, lambda row: row.first_action_step, "{:.0f}"),
        _spread(rows, lambda row: row.detection_delay, "{:.0f}"),
        _spread(rows, lambda row: row.final_batch_size, "{:.0f}"),
        _spread(rows, lambda row: row.tokens_per_s, "{:.0f}"),
        _spread(rows, lambda row: row.wall_s, "{:.0f}"),
    ]


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


def _compared(rows: Sequence[FaultRow]) -> list[str]:
    """Return one line per other guard: its validation loss less that of the guarded run."""
    guarded = {row.seed: row for row in rows if row.guard == "guarded"}
    lines = []
    for guard in dict.fromkeys(row.guard for row in rows if row.guard != "guarded"):
        gaps = [
            row.validation_loss - mine.validation_loss
            for row in rows
            if row.guard == guard
            and (mine := guarded.get(row.seed)) is not None
            and row.validation_loss is not None
            and mine.validation_loss is not None
        ]
        if gaps:
            lower = sum(gap > 0 for gap in gaps)
            lines.append(
                f"- `{rows[0].fault}`: validation loss of `{guard}` less that of `guarded`, seed "
                f"by seed: {spread(gaps, '{:+.3f}')}; guarded is lower in {lower} of {len(gaps)}."
            )
    return lines


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
