"""A report as one self-contained HTML page: sections with text, a figure, a table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment

__all__ = ["Column", "Page", "Section", "Table", "number", "render"]


_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that HTML forbids; they come with messages of other programs."""


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


@dataclass(frozen=True)
class Section:
    """One part of a page."""

    title: str
    text: str = ""
    figure: str | None = None
    """SVG of our own making: it is the one thing that is not escaped."""
    caption: str = ""
    table: Table | None = None


@dataclass(frozen=True)
class Page:
    """The whole report."""

    title: str
    subtitle: str
    lead: str
    """What a reader who stops here should know."""
    sections: Sequence[Section]


def render(page: Page) -> str:
    """Return the page as HTML that loads nothing from anywhere."""
    source = resources.files("mindtune.controller.reports").joinpath("page.html").read_text()
    template = Environment(autoescape=True, trim_blocks=True).from_string(source)
    html = template.render(
        title=page.title, subtitle=page.subtitle, lead=page.lead, sections=page.sections
    )
    return _CONTROL.sub("\ufffd", html)


def number(value: float | None, digits: int = 4) -> str:
    """Return a number for reading; a dash where it was not measured."""
    if value is None:
        return "-"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.{digits}g}"
