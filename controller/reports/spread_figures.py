"""Figures of distributions, maps, and configs of a study."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from mindtune.controller.reports.figure_style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    RED,
    WIDTH,
    is_shown,
    styled,
    svg,
    thinned,
    verbatim,
)

__all__ = ["HeatMap", "Histogram", "Point", "bars", "course_map", "heat_maps", "histograms",
           "percentile", "scatter"]  # fmt: skip

_BINS = 50
_MANY = 100
"""Steps in one bar from which on the counts are logarithmic, so that single slow steps show."""
_MAX_COLUMNS = 400
"""Columns of a heat map: two per pixel of its width would be seen as one."""
_MAX_NAMES = 24
"""Rows of a heat map that are all named; of more, every so many."""


@dataclass(frozen=True)
class Histogram:
    """How often a time was measured."""

    title: str
    values: Sequence[float]
    """Finite, at least one."""
    unit: str
    marks: Sequence[tuple[str, float]] = ()
    """Names and values of lines, such as the median."""


@dataclass(frozen=True)
class HeatMap:
    """A value per row and step."""

    title: str
    steps: Sequence[int]
    rows: Sequence[str]
    values: Sequence[Sequence[float]]
    """Per row, one per step; NaN is left blank."""
    unit: str
    row_label: str
    log: bool = False


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


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def histograms(entries: Sequence[Histogram], *, count_label: str) -> str:
    """Return distributions side by side; of many steps the counts are logarithmic."""
    with styled():
        canvas = Canvas(figsize=(WIDTH, 2.9), layout="constrained")
        axes = canvas.subplots(1, len(entries), squeeze=False)[0]
        for axis, entry in zip(axes, entries, strict=True):
            _histogram(axis, entry)
        axes[0].set_ylabel(count_label)
        return svg(canvas)


def _histogram(axis: Axes, entry: Histogram) -> None:
    low, high = min(entry.values), max(entry.values)
    far = low > 0 and high > 20 * statistics.median(entry.values)
    if not low < high or not is_shown(high - low):
        bins: Sequence[float] | int = 1
    elif far:
        bins = [float(edge) for edge in np.geomspace(low, high, _BINS + 1)]
        axis.set_xscale("log")
    else:
        bins = min(_BINS, max(5, 2 * math.isqrt(len(entry.values))))
    counts, _, _ = axis.hist(entry.values, bins=bins, color=BLUE, alpha=0.75)
    most = float(np.max(counts))
    if most > _MANY:
        axis.set_yscale("symlog", linthresh=1)
        powers = [10**power for power in range(math.ceil(math.log10(most)) + 1)]
        axis.set_yticks([0, *powers], [f"{count:,}" for count in (0, *powers)])
        axis.minorticks_off()
        axis.set_ylim(0, 1.5 * most)
    else:
        axis.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    for (name, value), colour, style in zip(
        entry.marks, (INK, ORANGE, RED), ("-", "--", ":"), strict=False
    ):
        axis.axvline(value, color=colour, linestyle=style, label=name)
    axis.set_title(entry.title)
    axis.set_xlabel(entry.unit)
    if entry.marks:
        axis.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, columnspacing=0.8,
            handlelength=1.2, handletextpad=0.4, fontsize=7.5,
        )  # fmt: skip


def heat_maps(maps: Sequence[HeatMap], *, step_label: str) -> str:
    """Return maps under each other, each with its scale of colours."""
    heights = [min(3.4, max(1.5, 0.16 * len(entry.rows) + 0.7)) for entry in maps]
    with styled():
        canvas = Canvas(figsize=(WIDTH, sum(heights) + 0.45), layout="constrained")
        axes = canvas.subplots(len(maps), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, entry in zip(axes, maps, strict=True):
            _heat_map(canvas, axis, entry)
        axes[-1].set_xlabel(step_label)
        return svg(canvas)


def _heat_map(canvas: Canvas, axis: Axes, entry: HeatMap) -> None:
    stretch = max(1, math.ceil(len(entry.steps) / _MAX_COLUMNS))
    steps = entry.steps[::stretch]
    grid = np.array([row[::stretch] for row in entry.values], dtype=float)
    grid[~(np.abs(grid) <= 1e100)] = np.nan
    shown = grid[np.isfinite(grid) & (grid > 0)] if entry.log else grid[np.isfinite(grid)]
    norm = None
    if entry.log and shown.size and shown.min() < shown.max():
        norm = LogNorm(shown.min(), shown.max())
    if entry.log:
        grid = np.where(grid > 0, grid, np.nan)
    extent = (-0.5, len(steps) - 0.5, len(entry.rows) - 0.5, -0.5)
    image = axis.imshow(
        grid, aspect="auto", interpolation="nearest", cmap="viridis", norm=norm, extent=extent
    )
    ticks = np.unique(np.linspace(0, len(steps) - 1, min(10, len(steps))).round().astype(int))
    axis.set_xticks(ticks, [f"{steps[tick]:,}" for tick in ticks])
    every = math.ceil(len(entry.rows) / _MAX_NAMES)
    named = range(0, len(entry.rows), every)
    names = [verbatim(entry.rows[row]) for row in named]
    axis.set_yticks(list(named), names, fontsize=7.5)
    axis.grid(visible=False)
    axis.set_title(entry.title)
    axis.set_ylabel(entry.row_label)
    bar = canvas.colorbar(image, ax=axis, pad=0.01, aspect=18)
    bar.set_label(entry.unit)
    bar.outline.set_visible(False)


def course_map(
    steps: Sequence[int],
    x: Sequence[float],
    y: Sequence[float],
    *,
    labels: tuple[str, str, str],
    title: str,
) -> str:
    """Return the course of a run through two signals, its steps as colours.

    Args:
        steps: of the points; all values are finite and above 0.
        x: horizontal, such as the learning rate.
        y: vertical, such as the gradient norm.
        labels: of x, y and the colours.
        title: of the figure.
    """
    kept = sorted(set(thinned(y)) | set(thinned(x)))
    with styled():
        canvas = Canvas(figsize=(WIDTH, 3.1), layout="constrained")
        axis = canvas.subplots()
        colours = axis.scatter(
            [x[i] for i in kept], [y[i] for i in kept], c=[steps[i] for i in kept], s=9,
            cmap="viridis", linewidths=0, rasterized=len(kept) > 500,
        )  # fmt: skip
        for values, scale in ((x, axis.set_xscale), (y, axis.set_yscale)):
            if max(values) > 20 * min(values):
                scale("log")
        axis.set_xlabel(labels[0])
        axis.set_ylabel(labels[1])
        bar = canvas.colorbar(colours, ax=axis, pad=0.01)
        bar.set_label(labels[2])
        bar.outline.set_visible(False)
        axis.set_title(title)
        return svg(canvas)


def scatter(points: Sequence[Point], *, x: str, y: str) -> str:
    """Return configs as points, the base and the best by colour, each with its number."""
    with styled():
        canvas = Canvas(figsize=(6.4, 3.8), layout="constrained")
        axis = canvas.subplots()
        for point in points:
            if not (is_shown(point.x) and is_shown(point.y)):
                continue
            axis.plot(point.x, point.y, _marker(point), color=_colour(point), markersize=7)
            axis.annotate(
                point.label, (point.x, point.y), xytext=(5, 4), textcoords="offset points",
                fontsize=8.5,
            )  # fmt: skip
        axis.margins(0.08)
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        return svg(canvas)


def bars(points: Sequence[Point], *, x: str, y: str, best: str, base: str) -> str:
    """Return one bar per config with its interval; x of the points is not used.

    Args:
        points: Of the configs.
        x: Name of the axis of configs.
        y: Name of the axis of values.
        best: What stands over the best config's bar.
        base: What stands over the base config's.
    """
    with styled():
        canvas = Canvas(figsize=(WIDTH, 3.2), layout="constrained")
        axis = canvas.subplots()
        for index, point in enumerate(points):
            if not is_shown(point.y):
                continue
            axis.bar(index, point.y, color=_colour(point), width=0.7)
            top = max(point.y, 0.0)
            if point.interval is not None and all(map(is_shown, point.interval)):
                axis.plot([index, index], list(point.interval), color=INK, linewidth=1.4)
                top = max(top, *point.interval)
            if point.best or point.base:
                axis.annotate(
                    best if point.best else base, (index, top), xytext=(0, 3), ha="center",
                    textcoords="offset points", fontsize=8.5,
                )  # fmt: skip
        every = math.ceil(len(points) / 40)
        shown = range(0, len(points), every)
        axis.set_xticks(list(shown), [points[index].label for index in shown], fontsize=8.5)
        axis.set_xlim(-0.8, max(len(points), 8) - 0.2)
        axis.grid(axis="x", visible=False)
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        return svg(canvas)


def _marker(point: Point) -> str:
    if point.best:
        return "*"
    return "s" if point.base else "o"


def _colour(point: Point) -> str:
    if point.best:
        return GREEN
    return ORANGE if point.base else BLUE
