"""From times to numbers with their spread, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from mindtune.controller.contract import ContractModel, Document
from mindtune.experiments.overhead.quartiles import Quartiles, quartiles
from mindtune.experiments.overhead.signal_report import SignalCost, signal_table
from mindtune.experiments.provenance import Provenance

__all__ = [
    "MEANINGS",
    "CopyCosts",
    "OverheadReport",
    "Quartiles",
    "Ratio",
    "markdown",
    "quartiles",
    "ratio",
]

MEANINGS = {
    "bare": "`nn.TrainOneStepCell`",
    "checked": "MindSpore's step with `clip_by_global_norm` and a finite check",
    "own": "`TrainStep` alone",
    "observe": "`TrainStep`, all signals, all policies, records; `observe`",
    "act": "`TrainStep`, all signals, all policies, records; `act`",
}
"""What each way of training is, by its name."""

_NUM_RESAMPLES = 2000
_AIM = 1.02
_STEP_HEAD = (
    "step", "ms: median [quartiles]", "over bare: median [95 %]", "over checked: median [95 %]",
    "over checked: quartiles",
)  # fmt: skip


class Ratio(ContractModel):
    """How much longer one way takes than another, over the rounds."""

    median: float
    """Of the rounds' ratios, each of the medians of two turns of one round."""
    low: float
    """First quartile of the rounds' ratios."""
    high: float
    """Third quartile."""
    interval: tuple[float, float]
    """95 % bootstrap interval of the median over the rounds."""


class CopyCosts(ContractModel):
    """Of keeping an earlier state of weights and optimizer, and of returning to it."""

    num_bytes: int
    """One copy."""
    memory_copy_ms: Quartiles
    memory_return_ms: Quartiles
    disk_copy_ms: Quartiles
    disk_return_ms: Quartiles


class OverheadReport(Document):
    """The whole measurement."""

    FILE: ClassVar[str] = "overhead.json"

    rounds: int
    block: int
    """Measured steps of each turn."""
    tokens_per_step: int
    parameters: int
    load_1m: tuple[float | None, float | None]
    """The machine's load before and after: above the number of cores nothing here holds."""
    actions: int
    """Granted in the measured runs; with any of them the ways do not do the same."""
    step_time_s: dict[str, Quartiles]
    """By way of training."""
    over_bare: dict[str, Ratio]
    over_checked: dict[str, Ratio]
    decision_us: Quartiles
    """One engine step over the recorded signals of the acting run."""
    signal_row_us: Quartiles
    """One row of signals.csv."""
    decision_record_us: Quartiles
    """One line of decisions.jsonl, handed to the operating system."""
    device_read_us: Quartiles
    """One reading of the device, off the training thread, twice a second."""
    signals: dict[str, SignalCost] | None = None
    """By signal; None in reports from before they were measured one by one."""
    profiler_closed_us: Quartiles | None = None
    """What a profiler window that is closed does in a step."""
    copies: CopyCosts | None = None
    """None in reports from before there were any."""
    measured: Provenance


def ratio(times: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> Ratio:
    """Return how the turns of one way compare with those of another in the same rounds.

    Args:
        times: Per round the step times of a turn.
        base: The same of the way that is 1.
    """
    ratios = np.array(
        [np.median(one) / np.median(other) for one, other in zip(times, base, strict=True)]
    )
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, len(ratios), size=(_NUM_RESAMPLES, len(ratios)))
    medians = np.median(ratios[drawn], axis=1)
    low, high = np.percentile(ratios, [25, 75])
    begin, end = np.percentile(medians, [2.5, 97.5])
    return Ratio(
        median=float(np.median(ratios)),
        low=float(low),
        high=float(high),
        interval=(float(begin), float(end)),
    )


def markdown(report: OverheadReport) -> str:
    """Return the report as tables."""
    lines = [_line(_STEP_HEAD), _line(["---"] * len(_STEP_HEAD))]
    for name, meaning in MEANINGS.items():
        over = report.over_checked.get(name)
        step = report.step_time_s[name]
        cells = (
            f"`{name}`: {meaning}",
            f"{step.median * 1e3:.1f} [{step.low * 1e3:.1f}, {step.high * 1e3:.1f}]",
            _ratio(report.over_bare.get(name)),
            _ratio(over),
            "-" if over is None else f"{over.low:.3f} - {over.high:.3f}",
        )
        lines.append(_line(cells))
    if report.signals is not None:
        lines += ["", *signal_table(report.signals)]
    costs = {
        "one decision (detectors, all policies, arbiter)": report.decision_us,
        "one row of signals.csv": report.signal_row_us,
        "one line of decisions.jsonl": report.decision_record_us,
        "one reading of the device (own thread, twice a second)": report.device_read_us,
    }
    if report.profiler_closed_us is not None:
        costs["a profiler window that is closed"] = report.profiler_closed_us
    lines += ["", _line(("host-side cost", "us: median [quartiles]")), _line(("---", "---"))]
    lines += [
        _line((name, f"{cost.median:.0f} [{cost.low:.0f}, {cost.high:.0f}]"))
        for name, cost in costs.items()
    ]
    lines += _copies(report.copies)
    loads = " and ".join("-" if load is None else f"{load:.1f}" for load in report.load_1m)
    conditions = (
        f"{report.rounds} rounds, {report.block} measured steps of each way per round; "
        f"{report.parameters} parameters, {report.tokens_per_step} tokens a step; actions: "
        f"{report.actions}; load of the machine before and after: {loads}. "
        f"{report.measured.sentence()}"
    )
    lines += ["", _verdict(report.over_checked), "", conditions]
    return "\n".join(lines) + "\n"


def _copies(costs: CopyCosts | None) -> list[str]:
    """Return the table of what earlier states cost."""
    if costs is None:
        return []
    rows = {
        "copied to the host's memory": costs.memory_copy_ms,
        "returned to from memory": costs.memory_return_ms,
        "written to disk": costs.disk_copy_ms,
        "returned to from disk": costs.disk_return_ms,
    }
    head = f"a state of {costs.num_bytes / 2**20:.1f} MB"
    return [
        "",
        _line((head, "ms: median [quartiles]")),
        _line(("---", "---")),
        *(
            _line((name, f"{cost.median:.1f} [{cost.low:.1f}, {cost.high:.1f}]"))
            for name, cost in rows.items()
        ),
    ]


def _verdict(over_checked: Mapping[str, Ratio]) -> str:
    act = over_checked["act"]
    met = "met" if act.median <= _AIM else "missed"
    return f"Aim: `act` over `checked` at most {_AIM}: {act.median:.3f}, {met}."


def _ratio(value: Ratio | None) -> str:
    if value is None:
        return "1"
    begin, end = value.interval
    return f"{value.median:.3f} [{begin:.3f}, {end:.3f}]"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
