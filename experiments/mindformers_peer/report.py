"""The measurements as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from mindtune.controller.contract import ContractModel, Document
from mindtune.experiments.mindformers_peer.case import WAYS, PeerRun, Turns
from mindtune.experiments.mindformers_peer.rescues import MEANINGS, Rescue
from mindtune.experiments.overhead.report import Quartiles, Ratio, quartiles, ratio
from mindtune.experiments.provenance import Provenance

__all__ = ["Costs", "PeerReport", "WayCost", "costs_of", "markdown"]

_MS = 1e-3

_WAYS = {
    "off": "no step hooks at all",
    "loss_monitor": "MindFormers' `MFLossMonitor`",
    "observe": "our callback, `observe`",
    "act": "our callback, `act`",
    "weight_state": "MindFormers' `TrainingStateMonitor`, `weight_state_format: log`",
    "optimizer_state": "MindFormers' `TrainingStateMonitor`, `optimizer_state_format: log`",
}


class WayCost(ContractModel):
    """What one way of watching costs."""

    step_ms: Quartiles
    hook_ms: Quartiles | None
    """Its own step hooks, begin and end together; None: it has none."""
    over_off: Ratio | None
    """Its steps over those of `off` in the same round; None for `off` itself."""


class Costs(ContractModel):
    """All ways, in turn around one compiled step."""

    rounds: int
    block: int
    """Measured steps of each turn."""
    parameters: int
    actions: int
    """Granted meanwhile; with any the ways did not do the same."""
    ways: dict[str, WayCost]


class PeerReport(Document):
    """The whole measurement."""

    FILE: ClassVar[str] = "peer.json"

    costs: Costs | None
    rescues: list[Rescue]
    load_1m: tuple[float | None, float | None]
    """The machine's load before and after."""
    mindformers: str
    """Versions of MindFormers and of its MindSpore."""
    measured: Provenance


def costs_of(seen: PeerRun, plan: Turns) -> Costs:
    """Return the costs from the times that a training left."""
    ways = {}
    for way in WAYS:
        hooks = seen.hooks_s.get(way)
        turns = seen.times_s[way]
        ways[way] = WayCost(
            step_ms=quartiles([time_s for turn in turns for time_s in turn], unit=_MS),
            hook_ms=None if hooks is None else quartiles(hooks, unit=_MS),
            over_off=None if way == "off" else ratio(turns, seen.times_s["off"]),
        )
    return Costs(
        rounds=plan.rounds,
        block=plan.block,
        parameters=seen.parameters,
        actions=seen.actions,
        ways=ways,
    )


def markdown(report: PeerReport) -> str:
    """Return the report as tables."""
    lines: list[str] = []
    if report.costs is not None:
        lines += _cost_lines(report.costs)
    if report.rescues:
        lines += _rescue_lines(report.rescues)
    loads = " and ".join("-" if load is None else f"{load:.1f}" for load in report.load_1m)
    measured = report.measured
    lines.append(
        f"{measured.processor}, {measured.cores:g} cores; load of the machine before and after: "
        f"{loads}; {report.mindformers}; {measured.date}, revision `{measured.revision}`."
    )
    return "\n".join(lines) + "\n"


def _cost_lines(costs: Costs) -> list[str]:
    lines = [
        _line(("around MindFormers' step", "own hooks, ms: median [quartiles]",
               "step, ms: median [quartiles]", "over off: median [95 %]")),
        _line(["---"] * 4),
    ]  # fmt: skip
    for way, meaning in _WAYS.items():
        cost = costs.ways[way]
        over = "1"
        if cost.over_off is not None:
            begin, end = cost.over_off.interval
            over = f"{cost.over_off.median:.3f} [{begin:.3f}, {end:.3f}]"
        lines.append(
            _line((f"`{way}`: {meaning}", _times(cost.hook_ms, 2), _times(cost.step_ms, 1), over))
        )
    conditions = (
        f"{costs.rounds} rounds, {costs.block} measured steps of each way per round; "
        f"{costs.parameters} parameters; actions: {costs.actions}."
    )
    return [*lines, "", conditions, ""]


def _rescue_lines(rescues: Iterable[Rescue]) -> list[str]:
    head = ("training", "", "steps", "updates lost", "loss at the end", "mean loss", "actions",
            "first action")  # fmt: skip
    lines = [_line(head), _line(["---"] * len(head))]
    reasons = []
    for row in rescues:
        stopped = "" if row.stop_reason is None else ", stopped"
        lines.append(
            _line(
                (
                    f"`{row.case}`: {MEANINGS[row.case]}" if row.guard == "unguarded" else "",
                    row.guard,
                    f"{row.steps}{stopped}",
                    str(row.updates_lost),
                    f"{row.loss:.3f}",
                    f"{row.mean_loss:.3f}",
                    str(row.actions),
                    row.first_action or "-",
                )
            )
        )
        if row.stop_reason is not None:
            reasons.append(f"- `{row.case}`, {row.guard}, was stopped: {row.stop_reason}")
    return [*lines, "", *reasons, *([""] if reasons else [])]


def _times(value: Quartiles | None, digits: int) -> str:
    if value is None:
        return "-"
    numbers = [f"{each:.{digits}f}" for each in (value.median, value.low, value.high)]
    return f"{numbers[0]} [{numbers[1]}, {numbers[2]}]"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
