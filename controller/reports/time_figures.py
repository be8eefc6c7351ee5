"""Figures over the steps of a run: its signals, and what was found and decided when."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
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
    is_shown,
    styled,
    svg,
    thinned,
)

__all__ = ["FATES", "Fate", "Lane", "Line", "Mark", "Panel", "Span", "time_line", "time_series"]

_FEW = 60
"""Points up to which each gets a dot of its own."""
_LOG_FROM = 20.0
"""Ratio of the largest to the smallest value from which on a panel that may be logarithmic is."""
_MANY_MARKS = 30
"""Decisions from which on their lines are drawn fainter, so that the signal stays visible."""


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
    """One signal over the steps; non-finite values leave a gap, None is passed over."""

    values: Sequence[float | None]
    label: str = ""
    colour: str = BLUE
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Signals that share an axis."""

    title: str
    steps: Sequence[int]
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
    colour: str


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
        Fate("done", "o", BLUE),
        Fate("open", "o", GREEN, hollow=True),
        Fate("undone", "X", RED),
        Fate("ineffective", "X", ORANGE),
        Fate("refused", "s", GREY, hollow=True),
        Fate("observed", "D", GREY, hollow=True),
        Fate("advice", "^", ACCENT),
    )
}


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
    panel: Panel | None, lanes: Sequence[Lane], *, step_label: str, names: dict[str, str]
) -> str:
    """Return one signal over lanes of findings and decisions, on one step axis.

    Args:
        panel: the signal, usually the loss; None: there is none to show.
        lanes: from top to bottom.
        step_label: name of the axis.
        names: of the fates that occur, for the legend.
    """
    heights = [2.2] * (panel is not None) + [0.26 * len(lanes) + 0.3] * bool(lanes)
    with styled():
        canvas = Canvas(figsize=(WIDTH, sum(heights) + 0.7), layout="constrained")
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
        shown += _draw_line(axis, panel, line)
    colours = {line.colour for line in panel.lines if line.label}
    faint = 0.8 if len(panel.marks) <= _MANY_MARKS else 0.35
    for mark in panel.marks:
        axis.axvline(
            mark.step, color=mark.fate.colour, linewidth=0.8, alpha=faint, zorder=1,
            linestyle=":" if mark.fate.hollow else "-",
        )  # fmt: skip
    if panel.log and shown and min(shown) > 0 and max(shown) > _LOG_FROM * min(shown):
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(NullFormatter())  # of several decades these name enough
    elif panel.from_zero and shown and min(shown) >= 0:
        axis.set_ylim(bottom=0)
    if len(colours) > 1:
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(colours), borderaxespad=0)
    axis.set_title(panel.title)
    axis.set_ylabel(panel.unit)
    axis.margins(x=0.01)


def _draw_line(axis: Axes, panel: Panel, line: Line) -> list[float]:
    """Draw one signal and return its values that could be drawn."""
    measured = [
        (step, value)
        for step, value in zip(panel.steps, line.values, strict=True)
        if value is not None
    ]
    steps = [step for step, _ in measured]
    values = [finite(value) for _, value in measured]
    shown = [value for value in values if not math.isnan(value)]
    label = line.label or None
    for part in _segments(steps, thinned(values)):
        axis.plot(
            [steps[i] for i in part], [values[i] for i in part], color=line.colour,
            linestyle="--" if line.dashed else "-", label=label,
            marker="." if len(shown) < _FEW or len(part) == 1 else None, markersize=4,
        )  # fmt: skip
        label = None
    broken = [step for step, value in measured if not is_shown(value)]
    broken = broken[:: 1 + len(broken) // 500]
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


def _draw_lanes(axis: Axes, lanes: Sequence[Lane], names: dict[str, str]) -> None:
    for row, lane in enumerate(lanes):
        for span in lane.spans:
            # Its ends have marks: a single step would be a line without length.
            axis.plot(
                [span.first, span.last], [row, row], color=span.colour, linewidth=5,
                solid_capstyle="butt", marker="s", markersize=5, markeredgewidth=0,
            )  # fmt: skip
        for mark in lane.marks:
            axis.plot(
                mark.step, row, mark.fate.marker, color=mark.fate.colour, markersize=6,
                markerfacecolor="none" if mark.fate.hollow else mark.fate.colour,
            )  # fmt: skip
    axis.set_yticks(range(len(lanes)), [lane.name for lane in lanes], color=INK)
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=False)
    axis.spines["left"].set_visible(False)
    axis.margins(x=0.01)
    seen = dict.fromkeys(mark.fate.key for lane in lanes for mark in lane.marks)
    for key in (key for key in FATES if key in seen):
        fate = FATES[key]
        axis.plot(
            [], [], fate.marker, color=fate.colour, label=names[key], markersize=6,
            markerfacecolor="none" if fate.hollow else fate.colour,
        )  # fmt: skip
    if seen:
        axis.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=5, borderaxespad=0.2, labelcolor=SOFT,
        )  # fmt: skip
