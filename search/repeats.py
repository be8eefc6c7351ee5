"""Repeats of a finished trial's config, kept with the study: a finished trial takes no more.

Each repeat has a key of its own, so that workers never overwrite each other's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna

__all__ = ["Repeat", "add_repeat", "repeats"]

_PREFIX = "repeat:"


@dataclass(frozen=True)
class Repeat:
    """One further measurement of a finished trial's config."""

    number: int
    """Of the trial."""
    repeat: int
    value: float | None
    attrs: dict[str, Any]


def add_repeat(
    study: optuna.Study, number: int, repeat: int, value: float | None, attrs: Mapping[str, Any]
) -> None:
    """Record a repeat; the same number and repeat replace it."""
    entry = json.dumps({"value": value, "attrs": dict(attrs)})
    study.set_user_attr(f"{_PREFIX}{number}:{repeat}", entry)


def repeats(study: optuna.Study, number: int | None = None) -> tuple[Repeat, ...]:
    """Return the repeats of one trial or of all, in order."""
    found = []
    for name, text in study.user_attrs.items():
        if not name.startswith(_PREFIX):
            continue
        owner, repeat = map(int, name[len(_PREFIX) :].split(":"))
        if number in (None, owner):
            entry = json.loads(text)
            found.append(Repeat(owner, repeat, entry["value"], entry["attrs"]))
    return tuple(sorted(found, key=lambda entry: (entry.number, entry.repeat)))
