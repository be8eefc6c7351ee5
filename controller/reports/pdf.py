"""A report as PDF, set by Typst: its wheel holds all it needs, on x86-64 and ARM.

Typst takes the content as one JSON text, so nothing in a record is ever read as markup. Its fonts
are those that matplotlib carries (DejaVu) and, for Chinese, the one beside this module; both are
free, and what is used of them is embedded. Characters in neither come from the system's fonts.
"""

from __future__ import annotations

import importlib
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import matplotlib as mpl

from mindtune.controller.errors import ConfigError
from mindtune.controller.reports.figure_style import SVG_FONTS
from mindtune.controller.reports.page import Figure, Page, Table, printable

__all__ = ["to_pdf"]

_FONTS = {"en": ("DejaVu Sans", "Noto Sans CJK SC"), "zh": ("Noto Sans CJK SC", "DejaVu Sans")}
"""By language, the first for what it can."""
_FULL_WIDTH_PT = 604.8
"""Width of a figure that fills the page."""
_LONG = 13
"""Characters of a word from which on it may be broken at its joints."""
_JOINTS = re.compile(r"(?<=[_/.=,:;])(?=\w)|(?<=[a-z])(?=[A-Z])")
_WORD = re.compile(rf"\S{{{_LONG},}}")
_ZERO_WIDTH_SPACE = "\u200b"


def to_pdf(page: Page) -> bytes:
    """Return the page as PDF.

    Raises:
        ConfigError: Typst is not installed.
    """
    try:
        typst: Any = importlib.import_module("typst")  # an optional extra
    except ModuleNotFoundError:
        raise ConfigError(
            "a report as .pdf needs the extra `pdf`, which is not installed; install it with "
            "pip install 'mindtune[pdf]', or give an .html file."
        ) from None
    folder = resources.files("mindtune.controller.reports")
    paths = [Path(mpl.get_data_path()) / "fonts" / "ttf", Path(str(folder.joinpath("fonts")))]
    content = {**_plain(page), "fonts": _FONTS[page.words.language]}
    pdf: bytes = typst.compile(
        folder.joinpath("page.typ").read_bytes(),
        font_paths=paths,
        sys_inputs={"page": json.dumps(content, ensure_ascii=False)},
    )
    return pdf


def _plain(page: Page) -> dict[str, Any]:
    return {
        "language": page.words.language,
        "title": _text(page.title),
        "subtitle": _text(page.subtitle),
        "tone": page.tone,
        "verdict": page.verdict,
        "lead": _text(page.lead),
        "quotes": [_text(quote) for quote in page.quotes],
        "cards": [
            {
                "title": card.title,
                "value": _text(card.value),
                "notes": [_text(note) for note in card.notes],
            }
            for card in page.cards
        ],
        "sections": [
            {
                "title": section.title,
                "text": _text(section.text),
                "figures": [_figure(figure, page.words.language) for figure in section.figures],
                "table": None if section.table is None else _table(section.table),
                "quotes": [_text(quote) for quote in section.quotes],
                "note": _text(section.note),
            }
            for section in page.sections
        ],
    }


def _figure(figure: Figure, language: str) -> dict[str, Any]:
    width = re.search(r'\bwidth="([\d.]+)pt"', figure.svg)
    share = 100.0 if width is None else min(100.0, 100.0 * float(width[1]) / _FULL_WIDTH_PT)
    # Of a list, Typst takes the first font alone, and what it likes for the rest.
    svg = printable(figure.svg.replace(SVG_FONTS, _FONTS[language][0]))
    return {"svg": svg, "caption": _text(figure.caption), "share": share}


def _table(table: Table) -> dict[str, Any]:
    rows = [[_text(cell) for cell in row] for row in table.rows]
    return {
        "columns": [{"name": c.name, "number": c.number} for c in table.columns],
        "rows": rows,
        "strong": sorted(table.strong),
        "widths": _widths(table),
    }


def _widths(table: Table) -> list[int | None]:
    """Return a share of the page for columns of prose; None: as wide as its content."""
    longest = [
        max((len(row[index]) for row in table.rows), default=0)
        for index in range(len(table.columns))
    ]
    return [
        None if column.number or length <= 2 * _LONG else min(3, 1 + length // 60)
        for column, length in zip(table.columns, longest, strict=True)
    ]


def _text(text: str) -> str:
    """Return a text that can be set: long words may break at their joints."""
    return _WORD.sub(lambda word: _JOINTS.sub(_ZERO_WIDTH_SPACE, word[0]), printable(text))
