"""A report as a value: a first screen for whoever decides, then sections for whoever repairs.

It is rendered as one self-contained HTML page here, and as PDF in `pdf`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Literal

from jinja2 import Environment
from markupsafe import Markup, escape

from mindtune.controller.reports.figure_style import for_html
from mindtune.controller.reports.language import Words
from mindtune.controller.units import format_duration

__all__ = ["Card", "Column", "Figure", "Page", "Quoted", "Section", "Table", "Tone", "number",
           "printable", "render", "time_text"]  # fmt: skip


_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that HTML or SVG forbids; they come with messages of other programs."""
_UNBROKEN = re.compile(r"[^\s\u2e80-\uffff]{30}")
"""Words that a table has to break, such as paths; of Chinese every character may begin a line."""
_SHORT, _PROSE = 20, 60
"""Lengths of a cell up to which it stands in one line, and from which on it needs some width."""
_LARGEST_IN_FULL, _LONGEST_WHOLE = 1e7, 1e12
"""From where on numbers have an exponent, and whole ones, such as a loss scale."""
_TALL = 50
"""Rows from which on a table scrolls in a box of its own on a screen."""

Tone = Literal["good", "attention", "bad", "plain"]
"""How a verdict is coloured; it never rests on the colour alone."""


class Quoted(str):
    """A text of a record, in the language in which it was written."""

    __slots__ = ()


@dataclass(frozen=True)
class Column:
    """Head of a table's column."""

    name: str
    number: bool = False


@dataclass(frozen=True)
class Table:
    """Cells are texts; markup in them is escaped."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    strong: frozenset[int] = frozenset()
    """Rows to stand out."""

    @property
    def is_tall(self) -> bool:
        """Whether it is longer than a reader takes in at once."""
        return len(self.rows) > _TALL


@dataclass(frozen=True)
class Figure:
    """A drawing."""

    svg: str
    """Of our own making: it is the one thing that is not escaped."""
    caption: str = ""
    """What it shows and how to read it; also what a screen reader says."""


@dataclass(frozen=True)
class Section:
    """One part of a page."""

    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    table: Table | None = None
    quotes: Sequence[str] = ()
    """What records say about it in their own words."""
    note: str = ""
    """Small print below."""


@dataclass(frozen=True)
class Card:
    """One answer of the first screen."""

    title: str
    value: str
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """The whole report."""

    words: Words
    title: str
    subtitle: str
    tone: Tone
    verdict: str
    """In a few words."""
    lead: str
    """What a reader who stops here should know."""
    sections: Sequence[Section]
    cards: Sequence[Card] = ()
    quotes: Sequence[str] = field(default_factory=tuple)
    """What records say about it in their own words."""


def render(page: Page) -> str:
    """Return the page as HTML that loads nothing from anywhere and runs no script.

    It reads well without its style sheet too, since servers of build results forbid those.
    """
    source = resources.files("mindtune.controller.reports").joinpath("page.html")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["drawn"] = for_html
    environment.tests["quoted"] = lambda cell: isinstance(cell, Quoted)
    environment.tests["unbroken"] = lambda cell: bool(_UNBROKEN.search(cell))
    environment.filters["coded"] = _coded
    environment.filters["width"] = _width
    template = environment.from_string(source.read_text(encoding="utf-8"))
    html = template.render(page=page, words=page.words)
    return printable(html)


def printable(text: str) -> str:
    """Return a text with a mark in place of each character that no page can hold."""
    return _UNPRINTABLE.sub("\ufffd", text)


def _coded(text: str) -> Markup:
    """Return a text with commands in backticks as code."""
    return Markup(re.sub("`(.+?)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped


def _width(cell: str) -> str:
    """Return the class of a cell by its length; a Chinese character is twice as wide."""
    length = len(cell) + sum(character >= "\u2e80" for character in cell)
    return "short" if length <= _SHORT else "prose" if length >= _PROSE else "text"


def time_text(seconds: float) -> str:
    """Return how long a step takes: 1.52 s is no 2 s where it is compared with 0.92 s."""
    return f"{seconds:.3g} s" if 0.9995 <= seconds < 59.5 else format_duration(seconds)


def number(value: float | None, digits: int = 4) -> str:
    """Return a number for reading; a dash where it was not measured."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "\N{INFINITY}" if value > 0 else "-\N{INFINITY}"
    # A loss scale of 65,536 is no 6.554e+04.
    is_exact = value.is_integer() and abs(value) < _LONGEST_WHOLE
    if abs(value) >= 1000 and (abs(value) < _LARGEST_IN_FULL or is_exact):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
