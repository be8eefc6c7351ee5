"""What a recorded table says: the best, how far the base and the middle lie below, and why."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from mindtune.experiments.exhaustive_table.problem import TableProblem
from mindtune.experiments.exhaustive_table.rows import Row
from mindtune.search.knobs import Config, KnobValue, describe, knob_text
from mindtune.search.noise import between_launches

__all__ = ["luck_of_the_best", "pair_ratios", "shares_of_gain", "summary"]

_SHOWN = 10


def luck_of_the_best(problem: TableProblem) -> float:
    """Return by how much the best configs' first values exceed their repeats, as a ratio.

    The best were chosen by their first values, so these are lucky; 1: not at all. NaN where no
    config was measured twice.
    """
    gaps = []
    for rows in _measured(problem).values():
        logs = {row.repeat: math.log(row.value) for row in rows if row.value}
        later = [value for repeat, value in logs.items() if repeat]
        if later and 0 in logs:
            gaps.append(logs[0] - statistics.fmean(later))
    return math.exp(statistics.fmean(gaps)) if gaps else math.nan


def pair_ratios(problem: TableProblem, knob: str) -> dict[KnobValue, list[float]]:
    """Return what a knob does by itself: ratios of values of configs that differ in it alone.

    Returns:
        Value of the knob, without the first choice of the space -> value of a config with it
        over that of the config with the first choice, for every such pair that was measured.
    """
    first, *others = problem.space.choices[knob]
    found: dict[KnobValue, list[float]] = {}
    for other in others:
        ratios = [
            value / reference
            for config, value in _valued(problem)
            if config[knob] == other
            and (reference := problem.true_value({**config, knob: first})) is not None
        ]
        found[other] = ratios
    return found


def shares_of_gain(problem: TableProblem, start: Config, end: Config) -> dict[str, float] | None:
    """Return how much each knob gave on the way from one config to another, as ratios.

    The knobs are changed one by one, in every order whose steps were all measured; a knob's
    share is the geometric mean of its steps over those orders, so that all shares multiply to
    the whole ratio. With all orders measured these are Shapley values (Shapley 1953, A value for
    n-person games) of the logarithm.

    Returns:
        Knob -> ratio; None: no order was measured whole.
    """
    knobs = [name for name in problem.space.knobs if start[name] != end[name]]
    steps: dict[str, list[float]] = {name: [] for name in knobs}
    for order in itertools.permutations(knobs):
        path = [start]
        for name in order:
            path.append({**path[-1], name: end[name]})
        values = [problem.true_value(config) for config in path]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            continue
        for name, before, after in zip(order, known, known[1:], strict=False):
            steps[name].append(math.log(after / before))
    if knobs and not steps[knobs[0]]:
        return None
    return {name: math.exp(statistics.fmean(logs)) for name, logs in steps.items()}


def summary(problem: TableProblem, base: Config) -> str:
    """Return the table's answers as Markdown.

    Args:
        problem: The recorded table.
        base: The config of the user's own file, with the knobs of the space.
    """
    valued = sorted(_valued(problem), key=lambda entry: -entry[1])
    best, highest = valued[0]
    at_base = problem.true_value(base)
    middle = statistics.median(value for _, value in valued)
    outcomes = [row.outcome for row in problem.rows]
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes))
    lines = [
        f"{len(problem.rows)} launches of {len(_measured(problem))} configs: {counts}.",
        "",
        "| | value | best over it |",
        "|---|---|---|",
        f"| best: {describe(best)} | {highest:.4f} | |",
        f"| the base config | {_number(at_base)} | {_ratio(highest, at_base)} |",
        f"| median config | {middle:.4f} | {highest / middle:.2f}x |",
        f"| worst | {valued[-1][1]:.4f} | {highest / valued[-1][1]:.2f}x |",
        "",
        _noise(problem),
        "",
        *_leaders(problem, valued[:_SHOWN]),
        "",
        *_pairs(problem),
    ]
    shares = shares_of_gain(problem, base, best)
    if shares:
        gains = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in shares.items())
        lines += ["", f"From the base to the best, mean over the orders: {gains}."]
    return "\n".join(lines) + "\n"


def _noise(problem: TableProblem) -> str:
    noise = between_launches(
        {
            number: {row.repeat: row.value for row in rows if row.value}
            for number, rows in enumerate(_measured(problem).values())
        }
    )
    if noise is None:
        return "No config was launched twice."
    return (
        f"One launch differs from its config by {noise.total:.1%} (standard deviation); the first "
        "values of those measured again exceed their repeats by "
        f"{luck_of_the_best(problem) - 1:.1%}."
    )


def _leaders(problem: TableProblem, leaders: Sequence[tuple[Config, float]]) -> list[str]:
    lines = [
        "| config | value | its launches | step (s) | peak memory (MB) | of the best |",
        "|---|---|---|---|---|---|",
    ]
    measured = _measured(problem)
    for config, value in leaders:
        rows = measured[problem.space.key(config)]
        fine = [row for row in rows if row.outcome == "ok"]
        launches = " ".join(f"{row.value:.4f}" for row in fine if row.value)
        step_s = statistics.median([seconds for row in fine for seconds in row.step_times_s])
        peaks = [row.peak_memory_bytes for row in fine if row.peak_memory_bytes is not None]
        memory = f"{max(peaks) / 1e6:.0f}" if peaks else "-"
        lines.append(
            f"| {describe(config)} | {value:.4f} | {launches} | {step_s:.3f} | {memory} | "
            f"{value / leaders[0][1]:.1%} |"
        )
    return lines


def _pairs(problem: TableProblem) -> list[str]:
    lines = [
        "| knob | against | pairs | ratio of values, geometric mean [quartiles] |",
        "|---|---|---|---|",
    ]
    for knob in problem.space.searched:
        first = knob_text(problem.space.choices[knob][0])
        for value, ratios in pair_ratios(problem, knob).items():
            if ratios:
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                lines.append(
                    f"| {knob}={knob_text(value)} | {first} | {len(ratios)} | {mean:.2f} "
                    f"{_quartiles(ratios)} |"
                )
    return lines


def _measured(problem: TableProblem) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in problem.rows:
        found.setdefault(problem.space.key(row.config), []).append(row)
    return found


def _valued(problem: TableProblem) -> list[tuple[Config, float]]:
    configs = {problem.space.key(row.config): row.config for row in problem.rows}
    found = [(config, problem.true_value(config)) for config in configs.values()]
    return [(config, value) for config, value in found if value is not None]


def _quartiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"[{low:.2f}, {high:.2f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _ratio(value: float, reference: float | None) -> str:
    return "-" if reference is None else f"{value / reference:.2f}x"
