"""Sentences of records, which are written in English, in the language of a report.

Detectors and policies write from a closed set of sentences; `recorded_zh.yaml` holds it. What is
not in it, such as another program's message or a sentence of a later version, is quoted as it is.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import yaml

from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Quoted

__all__ = ["retold"]

_PROSE = re.compile(r"(?:\b[A-Za-z]+ ){2,}[a-z]+")
_DEEPEST = 3
"""Sentences within sentences."""


@dataclass(frozen=True)
class _Book:
    words: Mapping[str, str]
    sentences: Sequence[tuple[re.Pattern[str], str]]
    """Prefixes, then the ones with the most text of their own first: they say the most."""


def retold(text: str, words: Words) -> str:
    """Return a recorded sentence in the language of the words, else a quotation of it."""
    if words.language == "en" or not text:
        return text
    found = _translated(text, 0) or _translated(f"{text}.", 0)
    return Quoted(text) if found is None else found


@functools.lru_cache(maxsize=4096)
def _translated(text: str, depth: int) -> str | None:
    book = _book()
    if text in book.words:
        return book.words[text]
    if depth >= _DEEPEST:
        return None
    for pattern, template in book.sentences:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        gaps = {name: _gap(part, depth + 1) for name, part in match.groupdict().items()}
        if None not in gaps.values():
            return template.format(**gaps)
    return None


def _gap(part: str, depth: int) -> str | None:
    """Return what stands in a gap, retold if it is a sentence; None: that is not known."""
    found = _translated(part, depth) or _translated(f"{part}.", depth)
    if found is not None:
        return found.rstrip("\N{IDEOGRAPHIC FULL STOP}")
    return None if _PROSE.search(part) else part


@functools.cache
def _book() -> _Book:
    source = resources.files("mindtune.controller.reports").joinpath("recorded_zh.yaml")
    content = yaml.safe_load(source.read_text(encoding="utf-8"))
    pairs = sorted(content["sentences"], key=lambda pair: -len(re.sub(r"{\w}", "", pair[0])))
    pairs = [*content["prefixes"], *pairs]
    return _Book(
        words=content["words"],
        sentences=[(_pattern(english), template) for english, template in pairs],
    )


def _pattern(sentence: str) -> re.Pattern[str]:
    spelled = ""
    for text, name, _, _ in string.Formatter().parse(sentence):
        spelled += re.escape(text) + ("" if name is None else f"(?P<{name}>.+?)")
    return re.compile(spelled, re.DOTALL)
