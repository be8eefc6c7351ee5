"""Figures of the reports, as SVG text; matplotlib's object interface, so no global state."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["Mark", "Panel", "Point", "bars", "scatter", "time_series"]

_LINE = "#1f5fa8"
_MAX_POINTS = 2000
_GRANTED = "#c2410c"
_OTHER = "#9ca3af"
_BEST = "#15803d"
_LARGEST = 1e100
"""Beyond it, axes overflow: such values are marked like non-finite ones."""
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
# Text stays text (searchable, small); ids are hashed with a fixed salt, so equal data give equal
# files.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mindtune",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}


@dataclass(frozen=True)
class Mark:
    """A decision on the time axis."""

    step: int
    granted: bool


@dataclass(frozen=True)
class Panel:
    """One signal over the steps; None and non-finite values leave a gap."""

    title: str
    steps: Sequence[int]
    values: Sequence[float | None]
    unit: str = ""
    log: bool = False
    marks: Sequence[Mark] = field(default_factory=tuple)


@dataclass(frozen=True)
class Point:
    """One config."""

    label: str
    x: float
    y: float
    interval: tuple[float, float] | None = None
    """Lowest and highest y."""
    best: bool = False
    base: bool = False


def time_series(panels: Sequence[Panel]) -> str:
    """Return panels under each other on one step axis, decisions as vertical lines."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(9.2, 1.75 * len(panels) + 0.5), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            _draw(axis, panel)
        axes[-1].set_xlabel("optimizer step")
        return _svg(figure)


def _draw(axis: Axes, panel: Panel) -> None:
    values = [_finite(value) for value in panel.values]
    shown = [value for value in values if not math.isnan(value)]
    kept = _thinned(values)
    axis.plot(
        [panel.steps[i] for i in kept], [values[i] for i in kept], color=_LINE, linewidth=1.1,
        marker="." if len(shown) < 60 else None, markersize=3,
    )  # fmt: skip
    broken = [
        step
        for step, value in zip(panel.steps, panel.values, strict=True)
        if value is not None and not _is_shown(value)
    ]
    broken = broken[:: 1 + len(broken) // _MAX_POINTS]
    if broken:
        axis.plot(
            broken, [0.94] * len(broken), "x", color=_GRANTED, markersize=4,
            transform=axis.get_xaxis_transform(),
        )  # fmt: skip
    for mark in panel.marks:
        axis.axvline(
            mark.step, color=_GRANTED if mark.granted else _OTHER, linewidth=0.9,
            linestyle="-" if mark.granted else ":", alpha=0.8,
        )  # fmt: skip
    if panel.log and shown and min(shown) > 1 / _LARGEST and max(shown) > 20 * min(shown):
        axis.set_yscale("log")
    axis.set_title(panel.title, loc="left", fontsize=9)
    axis.set_ylabel(panel.unit)


def _thinned(values: Sequence[float]) -> list[int]:
    """Return which points to draw: of a long series the lowest and highest of each stretch.

    A line of 100,000 points makes a page of many megabytes that shows no more than this does.
    """
    stretch = math.ceil(2 * len(values) / _MAX_POINTS)
    if stretch <= 2:
        return list(range(len(values)))
    kept: set[int] = set()
    for start in range(0, len(values), stretch):
        part = range(start, min(start + stretch, len(values)))
        finite = [index for index in part if not math.isnan(values[index])] or [start]
        kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return sorted(kept)


def scatter(points: Sequence[Point], *, x: str, y: str, title: str) -> str:
    """Return configs as points, the base and the best by colour, each with its number."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(6.2, 4.0), layout="constrained")
        axis = figure.subplots()
        for point in points:
            if not (_is_shown(point.x) and _is_shown(point.y)):
                continue
            axis.plot(point.x, point.y, "o", color=_colour(point), markersize=6)
            axis.annotate(
                point.label, (point.x, point.y), xytext=(4, 4), textcoords="offset points",
                fontsize=8,
            )  # fmt: skip
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.set_title(title, loc="left", fontsize=10)
        return _svg(figure)


def bars(points: Sequence[Point], *, y: str, title: str) -> str:
    """Return one bar per config with its interval; x of the points is not used."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(max(4.5, 0.5 * len(points) + 1.5), 3.4), layout="constrained")
        axis = figure.subplots()
        for index, point in enumerate(points):
            if not _is_shown(point.y):
                continue
            axis.bar(index, point.y, color=_colour(point), width=0.7)
            if point.interval is not None and all(map(_is_shown, point.interval)):
                low, high = point.interval
                axis.plot([index, index], [low, high], color="black", linewidth=1.2)
        axis.set_xticks(range(len(points)), [point.label for point in points], fontsize=8)
        axis.grid(axis="x", visible=False)
        axis.set_xlabel("trial")
        axis.set_ylabel(y)
        axis.set_title(title, loc="left", fontsize=10)
        return _svg(figure)


def _colour(point: Point) -> str:
    if point.best:
        return _BEST
    return _GRANTED if point.base else _LINE


def _finite(value: float | None) -> float:
    return value if value is not None and _is_shown(value) else math.nan


def _is_shown(value: float) -> bool:
    return abs(value) <= _LARGEST


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
