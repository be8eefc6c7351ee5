"""How the figures look, and how they get into a page; matplotlib's object interface only."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas

if TYPE_CHECKING:
    from mindtune.controller.reports.page import Figure

__all__ = ["ACCENT", "BLUE", "GREEN", "GREY", "INK", "ORANGE", "RED", "SVG_FONTS", "WIDTH",
           "finite", "for_html", "is_shown", "styled", "svg", "thinned", "verbatim"]  # fmt: skip

WIDTH = 8.4
"""Inches: a figure fills a page of A4 at three quarters of its size, and a screen at its own."""
INK, SOFT, LINE, PAPER = "#1c1f24", "#5b6470", "#d9dee5", "#fffffe"
"""Colours that follow the page's own in the dark; data colours below read on both papers."""
BLUE, ORANGE, GREEN, RED, GREY, ACCENT = (
    "#2f74c0", "#d9600f", "#1a9850", "#d73027", "#8b95a1", "#8e5bbf",
)  # fmt: skip
_VARIABLES = {INK: "--ink", SOFT: "--soft", LINE: "--line", PAPER: "--paper"}
_MAX_POINTS = 2000
"""Two per pixel of the widest figure: the lowest and the highest of what falls on it."""
_LARGEST = 1e100
"""Beyond it, axes overflow: such values are marked like non-finite ones."""
_PICTURE_DPI = 150
"""Of the parts that are pictures: maps, and clouds of many points."""
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
SVG_FONTS = "DejaVu Sans, Noto Sans CJK SC, Noto Sans SC, Source Han Sans SC, sans-serif"
# Text stays text (searchable, small); ids are hashed with a fixed salt, so equal data give equal
# files.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mindtune",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "axes.formatter.limits": (-4, 7),
    "figure.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.1,
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the style of the reports."""
    with rc_context(_STYLE), warnings.catch_warnings():
        # The reader's fonts draw the text, which may be Chinese; matplotlib's only measures it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def svg(canvas: Canvas) -> str:
    """Return a drawing as SVG text, inside `styled`."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", metadata=_NO_METADATA, dpi=_PICTURE_DPI)
    text = buffer.getvalue()
    return _plain(text[text.index("<svg") :])


def _plain(text: str) -> str:
    """Return SVG without style sheets, names and false precision.

    Presentation attributes are drawn where a server forbids styles; names would occur twice in a
    page with two figures.
    """
    text = re.sub(r"<style.*?</style>\s*|<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = text.replace("<svg ", '<svg stroke-linejoin="round" stroke-linecap="butt" ', 1)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r' style="([^"]*)"', _attributes, text)
    text = re.sub(r' d="[^"]*"', _rounded, text)
    return re.sub(r">\s+<", "><", text)


def _rounded(match: re.Match[str]) -> str:
    """Return a path with hundredths of a point: no screen shows more."""
    return re.sub(r"(\.\d\d)\d+", r"\1", match[0]).replace("\n", "")


def _attributes(match: re.Match[str]) -> str:
    spelled = []
    for entry in match[1].split(";"):
        name, _, value = (part.strip() for part in entry.partition(":"))
        if name == "font":
            size = re.search(r"([\d.]+)px", value)
            spelled += [f'font-size="{size[1]}"' if size else "", f'font-family="{SVG_FONTS}"']
            spelled += ['font-weight="700"'] if "bold" in value or "700" in value else []
        elif name == "font-family":
            spelled.append(f'font-family="{SVG_FONTS}"')
        elif name and name != "-inkscape-stroke":
            spelled.append(f'{name}="{value}"')
    return " " + " ".join(filter(None, spelled))


def for_html(figure: Figure) -> Markup:
    """Return the drawing for a page: in the page's fonts and, for what is no data, its colours."""
    text = figure.svg.replace(f'font-family="{SVG_FONTS}"', "")
    is_full = f'width="{WIDTH * 72:g}pt"' in text[:500]
    text = text.replace("<svg ", f'<svg class="{"full" if is_full else "part"}" ', 1)
    for colour, name in _VARIABLES.items():
        text = text.replace(f'"{colour}"', f'"var({name}, {colour})"')
    return Markup(text)  # noqa: S704 - of our own making


def thinned(values: Sequence[float]) -> list[int]:
    """Return which points to draw: of a long series the lowest and highest of each stretch.

    A line of 100,000 points makes a page of many megabytes that shows no more than this does.
    """
    stretch = math.ceil(2 * len(values) / _MAX_POINTS)
    if stretch <= 2:
        return list(range(len(values)))
    kept: set[int] = set()
    for start in range(0, len(values), stretch):
        part = range(start, min(start + stretch, len(values)))
        shown = [index for index in part if not math.isnan(values[index])] or [start]
        kept |= {min(shown, key=values.__getitem__), max(shown, key=values.__getitem__)}
    return sorted(kept)


def finite(value: float | None) -> float:
    """Return what can be drawn of a value, NaN for the rest."""
    return float(value) if value is not None and is_shown(value) else math.nan


def is_shown(value: float) -> bool:
    """Tell whether axes can hold a value; not a non-finite one."""
    return abs(value) <= _LARGEST


def verbatim(text: str) -> str:
    """Return a text as matplotlib draws it as it stands: a dollar begins no formula."""
    return text.replace("$", r"\$")
