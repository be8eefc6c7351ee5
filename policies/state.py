"""JSON form of states: any tree of frozen dataclasses, tuples, mappings and scalars.

Non-finite numbers are the strings "nan", "inf" and "-inf", since JSON has no others.

What is read was once written, but may have been changed since. A document that no run could have
written is refused as a whole: numbers that a double does not hold, lists longer than any window,
and whatever the `contradiction` of a dataclass names. Such a method returns what its fields
contradict each other in, or None; only reading calls it, not training.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar, Union, cast

from mindtune.policies.errors import PolicyError

__all__ = ["ADDED", "STATE_SCHEMA", "from_json", "to_json"]

STATE_SCHEMA = 1
"""Version of the stored state; a stored state of another version is not read but re-armed."""

ADDED = "added"
"""Metadata of a field that states of this version were once stored without: there it takes its
default."""

_LARGEST = 2**53
"""Integers below it survive any JSON reader; counters and rows of bits are far below."""
_LONGEST = 1024
"""Largest window that a threshold allows; every list is a window of the newest entries."""
_SHOWN = 80
"""Characters of a wrong value that a message shows."""

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_Value = TypeVar("_Value")


def to_json(value: Any) -> Any:
    """Return `value` as what `json.dumps(..., allow_nan=False)` accepts."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return value
    if is_dataclass(value):
        return {entry.name: to_json(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(entry) for entry in value]
    if isinstance(value, frozenset):
        return sorted(value)
    raise PolicyError(
        f"a state must consist of dataclasses, tuples, mappings and scalars, but got {value!r}; "
        "give it a field type of these."
    )


def from_json(kind: type[_Value], document: Any) -> _Value:
    """Return the value of type `kind` that `to_json` has written.

    Raises:
        PolicyError: if the document is not one of a `kind`.
    """
    return cast("_Value", _read(kind, document, kind.__name__))


@lru_cache(maxsize=256)
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(hint: Any, document: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return document
    if origin in (Union, types.UnionType):
        return _read_union(typing.get_args(hint), document, where)
    if origin is tuple:
        _require(isinstance(document, list), where, "a list", document)
        args = typing.get_args(hint)
        if len(args) == 2 and args[1] is Ellipsis:
            return _read_window(args[0], document, where)
        _require(len(args) == len(document), where, f"{len(args)} entries", document)
        return tuple(_read(arg, entry, where) for arg, entry in zip(args, document, strict=True))
    if origin is frozenset:
        _require(isinstance(document, list), where, "a list", document)
        return frozenset(_read_window(typing.get_args(hint)[0], document, where))
    if origin is typing.Literal:
        _require(document in typing.get_args(hint), where, f"one of {hint}", document)
        return document
    if origin is not None and issubclass(origin, Mapping):
        _require(isinstance(document, dict), where, "an object", document)
        entry_hint = typing.get_args(hint)[1]
        return {key: _read(entry_hint, entry, where) for key, entry in document.items()}
    if is_dataclass(hint):
        return _read_dataclass(cast("type", hint), document, where)
    return _read_scalar(hint, document, where)


def _read_window(hint: Any, document: list[Any], where: str) -> tuple[Any, ...]:
    _require(
        len(document) <= _LONGEST, where, f"a list of at most {_LONGEST} entries", len(document)
    )
    return tuple(_read(hint, entry, where) for entry in document)


def _read_union(options: tuple[Any, ...], document: Any, where: str) -> Any:
    if document is None:
        _require(type(None) in options, where, "not null", document)
        return None
    if float in options and isinstance(document, str) and document in _NON_FINITE:
        return _NON_FINITE[document]
    last = PolicyError(f"{where} must be one of {options}, but got {_shown(document)}.")
    for option in options:
        if option is type(None):
            continue
        try:
            return _read(option, document, where)
        except PolicyError as error:
            last = error
    raise last


def _read_dataclass(kind: type, document: Any, where: str) -> Any:
    _require(isinstance(document, dict), where, "an object", document)
    hints = _hints(kind)
    names = [entry.name for entry in fields(kind)]
    needed = {entry.name for entry in fields(kind) if not entry.metadata.get(ADDED)}
    _require(
        needed <= set(document) <= set(names),
        where,
        f"an object with {', '.join(names)}",
        document,
    )
    value = kind(
        **{name: _read(hints[name], entry, f"{where}.{name}") for name, entry in document.items()}
    )
    contradiction = getattr(value, "contradiction", None)
    if contradiction is not None and (found := contradiction()) is not None:
        raise PolicyError(
            f"{where} in a stored state contradicts itself: {found}; "
            "start without the stored state."
        )
    return value


def _read_scalar(hint: Any, document: Any, where: str) -> Any:
    if hint is float:
        if isinstance(document, str) and document in _NON_FINITE:
            return _NON_FINITE[document]
        _require(
            isinstance(document, (int, float)) and not isinstance(document, bool),
            where,
            "a number",
            document,
        )
        if isinstance(document, int) and abs(document) >= _LARGEST:
            try:
                return float(document)
            except OverflowError:
                _require(False, where, "a number that a double holds", document)
        return document
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(document)
        except ValueError:
            _require(False, where, f"a {hint.__name__}", document)
    if hint is bool:
        _require(isinstance(document, bool), where, "true or false", document)
    elif hint is int:
        _require(
            isinstance(document, int) and not isinstance(document, bool),
            where,
            "an integer",
            document,
        )
        _require(-1 <= document < _LARGEST, where, "an integer from -1 to 2^53", document)
    else:
        _require(isinstance(document, hint), where, f"a {hint.__name__}", document)
    return document


def _require(fact: bool, where: str, rule: str, document: Any) -> None:
    if not fact:
        raise PolicyError(
            f"{where} in a stored state must be {rule}, but got {_shown(document)}; "
            "start without the stored state."
        )


def _shown(document: Any) -> str:
    # Python writes no integer of more than some thousand digits.
    if isinstance(document, int) and abs(document) >= 10**_SHOWN:
        return f"an integer of {document.bit_length()} bits"
    return f"{document!r:.{_SHOWN}}"
