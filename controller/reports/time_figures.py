"""Figures over the steps of a run: its signals, and what was found and decided when."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter

from mindtune.controller.reports.figure_style import (
    ACCENT,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    RED,
    SOFT,
    WIDTH,
    finite,
    styled,
    svg,
    thinned,
    verbatim,
)

__all__ = ["FATES", "SEVERITIES", "Fate", "Lane", "Line", "Mark", "Panel", "Span", "time_line",
           "time_series"]  # fmt: skip

_FEW = 60
"""Points up to which each gets a dot of its own."""
_LOG_FROM = 20.0
"""Ratio of the largest to the smallest value from which on a panel that may be logarithmic is."""
_MANY_MARKS = 30
"""Decisions from which on their lines are drawn fainter, so that the signal stays visible."""
_PLACES = 1000
"""Places of a step axis that can be told apart, at two a point."""
_MOST_CROSSES = 500

Dash = Literal["-", "--", ":"]
"""How a line is told from the others of its panel where colours are not seen."""


@dataclass(frozen=True)
class Fate:
    """How one kind of decision is marked."""

    key: str
    """Of its name in the catalogue, under `fate`."""
    marker: str
    colour: str
    hollow: bool = False


@dataclass(frozen=True)
class Mark:
    """A decision on the time axis."""

    step: int
    fate: Fate


@dataclass(frozen=True)
class Line:
    """One signal over the steps at which it was measured; non-finite values leave a gap."""

    steps: Sequence[int]
    values: Sequence[float]
    label: str = ""
    colour: str = BLUE
    dash: Dash = "-"
    broken: Sequence[int] = ()
    """Steps whose value the axes cannot hold; each gets a cross."""


@dataclass(frozen=True)
class Panel:
    """Signals that share an axis."""

    title: str
    lines: Sequence[Line]
    unit: str = ""
    log: bool = False
    """Logarithmic where the values span more than a decade or so."""
    from_zero: bool = False
    marks: Sequence[Mark] = field(default_factory=tuple)


@dataclass(frozen=True)
class Span:
    """Steps over which something went on."""

    first: int
    last: int
    severity: str
    """Of `SEVERITIES`."""


@dataclass(frozen=True)
class Lane:
    """What one kind of finding, or one policy, did over the steps."""

    name: str
    spans: Sequence[Span] = ()
    marks: Sequence[Mark] = ()


FATES = {
    fate.key: fate
    for fate in (
        Fate("kept", "o", GREEN),
        Fate("done", "P", BLUE),
        Fate("open", "o", GREEN, hollow=True),
        Fate("undone", "X", RED),
        Fate("ineffective", "v", ORANGE),
        Fate("refused", "s", GREY, hollow=True),
        Fate("observed", "D", GREY, hollow=True),
        Fate("advice", "^", ACCENT),
    )
}
SEVERITIES: Mapping[str, tuple[str, float]] = {
    "critical": (RED, 10.0),
    "warning": (ORANGE, 6.0),
    "info": (GREY, 2.5),
}
"""Severity -> colour and thickness in points of its bar."""


def time_series(panels: Sequence[Panel], *, step_label: str) -> str:
    """Return panels under each other on one step axis, decisions as vertical lines."""
    with styled():
        canvas = Canvas(figsize=(WIDTH, 1.7 * len(panels) + 0.45), layout="constrained")
        axes = canvas.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            _draw(axis, panel)
        _step_axis(axes[-1], step_label)
        canvas.align_ylabels(axes)
        return svg(canvas)


def time_line(
    panel: Panel | None, lanes: Sequence[Lane], *, step_label: str, names: Mapping[str, str]
) -> str:
    """Return one signal over lanes of findings and decisions, on one step axis.

    Args:
        panel: the signal, usually the loss; None: there is none to show.
        lanes: from top to bottom.
        step_label: name of the axis.
        names: of severities and fates, for the legend.
    """
    heights = [2.2] * (panel is not None) + [0.26 * len(lanes) + 0.3] * bool(lanes)
    with styled():
        canvas = Canvas(figsize=(WIDTH, sum(heights) + 0.8), layout="constrained")
        axes = canvas.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[
            :, 0
        ]
        if panel is not None:
            _draw(axes[0], panel)
        if lanes:
            _draw_lanes(axes[-1], lanes, names)
        _step_axis(axes[-1], step_label)
        return svg(canvas)


def _step_axis(axis: Axes, label: str) -> None:
    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))


def _draw(axis: Axes, panel: Panel) -> None:
    shown: list[float] = []
    for line in panel.lines:
        shown += _draw_line(axis, line)
    _draw_marks(axis, panel.marks)
    if panel.log and shown and min(shown) > 0 and max(shown) > _LOG_FROM * min(shown):
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(NullFormatter())  # of several decades these name enough
    elif panel.from_zero and shown and min(shown) >= 0:
        axis.set_ylim(bottom=0)
    elif not shown:
        axis.set_yticks([])  # crosses have no height
    named = [line for line in panel.lines if line.label]
    if len(named) > 1:
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(named), borderaxespad=0)
    axis.set_title(panel.title)
    axis.set_ylabel(panel.unit)
    axis.margins(x=0.01)


def _draw_line(axis: Axes, line: Line) -> list[float]:
    """Draw one signal and return its values that could be drawn."""
    steps, values = line.steps, [finite(value) for value in line.values]
    shown = [value for value in values if not math.isnan(value)]
    label = line.label or None
    for part in _segments(steps, thinned(values)):
        axis.plot(
            [steps[i] for i in part], [values[i] for i in part], color=line.colour,
            linestyle=line.dash, label=label,
            marker="." if len(shown) < _FEW or len(part) == 1 else None, markersize=4,
        )  # fmt: skip
        label = None
    broken = line.broken[:: 1 + len(line.broken) // _MOST_CROSSES]
    if broken:
        axis.plot(
            broken, [0.95] * len(broken), "x", color=RED, markersize=5, markeredgewidth=1.4,
            transform=axis.get_xaxis_transform(), clip_on=False,
        )  # fmt: skip
    return shown


def _segments(steps: Sequence[int], kept: Sequence[int]) -> Iterator[list[int]]:
    """Yield the points that one line joins: it ends where a restart goes back."""
    part: list[int] = []
    for index in kept:
        if part and steps[index] <= steps[part[-1]]:
            yield part
            part = []
        part.append(index)
    if part:
        yield part


def _by_fate(marks: Iterable[Mark]) -> dict[str, list[int]]:
    """Return the steps of each fate, in the order of the legend."""
    steps: dict[str, list[int]] = {key: [] for key in FATES}
    for mark in marks:
        steps[mark.fate.key].append(mark.step)
    return {key: found for key, found in steps.items() if found}


def _apart(steps: Iterable[int]) -> list[int]:
    """Return the steps that can be told apart on an axis, of those that cannot the first."""
    ordered = sorted(set(steps))
    least = (ordered[-1] - ordered[0]) / _PLACES
    kept = ordered[:1]
    for step in ordered:
        if step - kept[-1] > least:
            kept.append(step)
    return kept


def _draw_marks(axis: Axes, marks: Sequence[Mark]) -> None:
    """Draw decisions as lines over the whole height."""
    for key, told in _by_fate(marks).items():
        fate, steps = FATES[key], _apart(told)
        lines = LineCollection(
            [((step, 0.0), (step, 1.0)) for step in steps], colors=fate.colour, linewidths=0.8,
            alpha=0.8 if len(marks) <= _MANY_MARKS else 0.35, zorder=1,
            linestyles=":" if fate.hollow else "-", transform=axis.get_xaxis_transform(),
        )  # fmt: skip
        axis.add_collection(lines, autolim=False)
        axis.update_datalim([(steps[0], 0.0), (steps[-1], 0.0)], updatey=False)


def _draw_lanes(axis: Axes, lanes: Sequence[Lane], names: Mapping[str, str]) -> None:
    told: dict[str, Line2D] = {}
    for row, lane in enumerate(lanes):
        for severity, (colour, width) in reversed(list(SEVERITIES.items())):
            spans = _joined([span for span in lane.spans if span.severity == severity])
            if not spans:
                continue
            # Its ends have marks: a single step would be a line without length.
            (told[severity],) = axis.plot(
                [step for first, last in spans for step in (first, last, math.nan)],
                [row, row, math.nan] * len(spans), color=colour, linewidth=width,
                solid_capstyle="butt", marker="s", markersize=width, markeredgewidth=0,
            )  # fmt: skip
        for key, steps in _by_fate(lane.marks).items():
            fate, apart = FATES[key], _apart(steps)
            (told[key],) = axis.plot(
                apart, [row] * len(apart), fate.marker, color=fate.colour, markersize=6,
                markerfacecolor="none" if fate.hollow else fate.colour,
            )  # fmt: skip
    axis.set_yticks(range(len(lanes)), [verbatim(lane.name) for lane in lanes], color=INK)
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=False)
    axis.spines["left"].set_visible(False)
    axis.margins(x=0.01)
    keys = [key for key in (*SEVERITIES, *FATES) if key in told]
    axis.legend(
        [told[key] for key in keys], [names[key] for key in keys], loc="lower left",
        bbox_to_anchor=(0, 1), ncols=5, borderaxespad=0.2, labelcolor=SOFT, handlelength=1.2,
    )  # fmt: skip


def _joined(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Return first and last step of what is seen as one bar."""
    ordered = sorted((span.first, span.last) for span in spans)
    if not ordered:
        return []
    least = (max(last for _, last in ordered) - ordered[0][0]) / _PLACES
    joined = [ordered[0]]
    for first, last in ordered[1:]:
        begin, end = joined[-1]
        if first - end <= least:
            joined[-1] = (begin, max(end, last))
        else:
            joined.append((first, last))
    return joined
