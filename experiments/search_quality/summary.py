"""The rows as Markdown: medians over the seeds with quartiles, side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from mindtune.experiments.search_quality.methods import METHODS
from mindtune.experiments.search_quality.rows import SearchRow, newest

__all__ = ["NEAR", "summary"]

NEAR = 0.03
"""Within this share of the best, a config counts as found."""
_BUDGETS = (5, 10, 15, 30)
_OURS = "guided"


def summary(rows: Iterable[SearchRow]) -> str:
    """Return all tables of the measured rows, and what code they are of."""
    found = list(rows)
    if not found:
        return "No row has been measured yet.\n"
    known = newest(found)
    problems = list(dict.fromkeys(row.problem for row in known))
    lines = ["## All problems", "", *_overview(known, problems), "", "## Rules", ""]
    lines += _rules(known, problems)
    for problem in problems:
        of_problem = [row for row in known if row.problem == problem]
        lines += ["", f"## {problem}", "", *_methods(of_problem)]
    lines += ["", "## Measured", "", *_sources(known, replaced=len(found) - len(known))]
    return "\n".join(lines) + "\n"


def _sources(rows: Sequence[SearchRow], *, replaced: int) -> list[str]:
    """Return by which code, with how many trials at most, on what and when it was measured."""
    groups: dict[tuple[object, ...], list[SearchRow]] = {}
    for row in rows:
        machine = row.measured.model_copy(update={"date": ""})
        groups.setdefault((row.trials, *machine.model_dump().values()), []).append(row)
    lines = []
    for own in groups.values():
        methods = ", ".join(name for name in METHODS if any(row.method == name for row in own))
        dates = sorted({row.measured.date for row in own})
        span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        most = "" if own[0].trials is None else f", {own[0].trials} trials at most"
        sentence = own[0].measured.model_copy(update={"date": span}).sentence()
        count = "1 search" if len(own) == 1 else f"{len(own)} searches"
        lines.append(f"- {count}{most} ({methods}): {sentence}")
    if len({row.key[-2:] for row in rows}) > 1:
        lines += ["", "**Not all of one revision and number of trials**: compare with care."]
    if replaced:
        lines += ["", f"{replaced} rows of other code or trials are left out for newer ones."]
    return lines


def _overview(rows: Sequence[SearchRow], problems: Sequence[str]) -> list[str]:
    """Return the trials that each method needs, problem by problem."""
    methods = [name for name in METHODS if any(row.method == name for row in rows)]
    title = (
        f"Trials to within {NEAR:.0%} of the best: median [quartiles] over the seeds; `>` where "
        "that many were not enough. Regret after 15 trials in parentheses."
    )
    lines = [title, "", *_heading(["problem", *methods])]
    for problem in problems:
        cells = []
        for method in methods:
            own = [row for row in rows if (row.problem, row.method) == (problem, method)]
            regret = statistics.median(row.regret_after(15) for row in own) if own else None
            cells.append("-" if regret is None else f"{_needed_text(own)} ({regret:.1%})")
        lines.append(_line([problem, *cells]))
    return lines


def _rules(rows: Sequence[SearchRow], problems: Sequence[str]) -> list[str]:
    """Return what the rules did before any trial, mean over the clusters."""
    columns = (
        "problem", "configs", "rejected before running", "accepted that cannot run",
        "rejected that could run", "launches that failed, first 15 of guided",
    )  # fmt: skip
    lines = _heading(columns)
    for problem in problems:
        own = [row for row in rows if row.problem == problem]
        one = list({row.seed: row for row in own}.values())
        rejected = statistics.mean(1.0 - row.feasible / row.configs for row in one)
        accepted = statistics.mean(row.accepted_failures / row.feasible for row in one)
        lost = statistics.mean(row.rejected_runnable / row.configs for row in one)
        ours = [row.failures(15) / len(row.outcomes[:15]) for row in own if row.method == _OURS]
        failed = f"{statistics.mean(ours):.1%}" if ours else "-"
        lines.append(
            _line([problem, f"{one[0].configs:,}", f"{rejected:.1%}", f"{accepted:.1%}",
                   f"{lost:.1%}", failed])
        )  # fmt: skip
    return lines


def _methods(rows: Sequence[SearchRow]) -> list[str]:
    """Return one problem's table."""
    columns = [
        "method", "seeds", "trials made", f"trials to {NEAR:.0%}", "got there",
        *(f"regret after {budget}" for budget in _BUDGETS), "failed of the first 15",
        "own time per trial",
    ]  # fmt: skip
    lines = _heading(columns)
    for method in METHODS:
        own = [row for row in rows if row.method == method]
        if not own:
            continue
        reached = sum(row.trials_to(NEAR) is not None for row in own)
        asked = statistics.median(row.ask_s for row in own)
        lines.append(
            _line([
                method, str(len(own)), _counts([len(row.outcomes) for row in own]),
                _needed_text(own), f"{reached} of {len(own)}",
                *(_share([row.regret_after(budget) for row in own]) for budget in _BUDGETS),
                _counts([row.failures(15) for row in own]),
                f"{1e3 * asked:.0f} ms",
            ])
        )  # fmt: skip
    return lines


def _needed_text(rows: Sequence[SearchRow]) -> str:
    """Return median and quartiles of the trials needed."""
    longest = max(len(row.regrets) for row in rows)
    needed = sorted(row.trials_to(NEAR) or longest + 1 for row in rows)

    def text(number: float) -> str:
        return f">{longest}" if number > longest else f"{number:g}"

    # Whole numbers of trials, the larger one where the quartile lies between two.
    last = len(needed) - 1
    low, middle, high = (needed[math.ceil(last * part)] for part in (0.25, 0.5, 0.75))
    return text(middle) if low == high else f"{text(middle)} [{text(low)}, {text(high)}]"


def _counts(values: Sequence[int]) -> str:
    """Return median and range of whole numbers."""
    middle = f"{statistics.median(values):g}"
    return middle if len(set(values)) == 1 else f"{middle} [{min(values)}, {max(values)}]"


def _share(values: Sequence[float]) -> str:
    low, middle, high = _quartiles(sorted(values))
    return f"{middle:.1%} [{low:.1%}, {high:.1%}]"


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _heading(columns: Sequence[str]) -> list[str]:
    return [_line(columns), _line(["---"] * len(columns))]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
