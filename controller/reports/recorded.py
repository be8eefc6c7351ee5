"""Sentences of records, which are written in English, in the language of a report.

Detectors, policies and the guided diagnosis write from a closed set of sentences, which
`recorded_zh.yaml` and `diagnosis_zh.yaml` hold. What is in neither, such as another program's
message or a sentence of a later version, is quoted as it is.
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

_BOOKS = ("recorded_zh.yaml", "diagnosis_zh.yaml")
_PROSE = re.compile(r"(?:\b[A-Za-z]+ ){2,}[a-z]+")
_DEEPEST = 5
"""Sentences within sentences."""
_LONGEST = 4000
"""Characters of the longest text that is looked up: no sentence of ours is as long."""
_JOINT, _ZH_JOINT = "; ", "\N{FULLWIDTH SEMICOLON}"


@dataclass(frozen=True)
class _Book:
    words: Mapping[str, str]
    """Also sentences without gaps."""
    sentences: Sequence[tuple[re.Pattern[str], str]]
    """Prefixes, then the ones with the most text of their own first: they say the most."""


def retold(text: str, words: Words) -> str:
    """Return a recorded sentence in the language of the words, else a quotation of it."""
    if words.language == "en" or not text:
        return text
    found = None if len(text) > _LONGEST else _known(text, 0)
    return Quoted(text) if found is None else found


def _known(text: str, depth: int) -> str | None:
    """Return a sentence, or a part of one, retold; it may lack its full stop, or begin large."""
    small = text[:1].lower() + text[1:]
    return (
        _translated(text, depth)
        or _translated(f"{text}.", depth)
        or (_translated(small, depth) if small != text else None)
    )


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
    if _JOINT not in text:
        return None
    parts = [_known(part, depth + 1) for part in text.split(_JOINT)]
    return None if None in parts else _ZH_JOINT.join(part for part in parts if part is not None)


def _gap(part: str, depth: int) -> str | None:
    """Return what stands in a gap, retold if it is a sentence; None: that is not known."""
    found = _known(part, depth)
    if found is not None:
        return found.rstrip("\N{IDEOGRAPHIC FULL STOP}")
    return None if _PROSE.search(part) else part


@functools.cache
def _book() -> _Book:
    folder = resources.files("mindtune.controller.reports")
    words: dict[str, str] = {}
    prefixes: list[tuple[str, str]] = []
    pairs: list[tuple[str, str]] = []
    for name in _BOOKS:
        content = yaml.safe_load(folder.joinpath(name).read_text(encoding="utf-8"))
        words |= content["words"]
        prefixes += content.get("prefixes", [])
        pairs += content["sentences"]
    words |= {english: told for english, told in pairs if "{" not in english}
    pairs = [pair for pair in pairs if "{" in pair[0]]
    pairs.sort(key=lambda pair: -len(re.sub(r"{\w}", "", pair[0])))
    return _Book(
        words=words,
        sentences=[(_pattern(english), template) for english, template in [*prefixes, *pairs]],
    )


def _pattern(sentence: str) -> re.Pattern[str]:
    spelled = ""
    for text, name, _, _ in string.Formatter().parse(sentence):
        spelled += re.escape(text) + ("" if name is None else f"(?P<{name}>.+?)")
    return re.compile(spelled, re.DOTALL)
