"""Reading and changing a user's config as a tree: dotted keys, near misses, no silent creation."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from mindtune.controller.errors import ConfigError

__all__ = ["dotted_keys", "get_key", "near_misses", "set_key"]

_MISSES_SHOWN = 3


def get_key(tree: Any, key: str, *, source: str) -> Any:
    """Return the value at a dotted key; a number as a part is an index into a list.

    Raises:
        ConfigError: if there is no such key, naming similar ones.
    """
    node = tree
    for part in key.split("."):
        node = _child(node, part, key=key, tree=tree, source=source)
    return node


def set_key(tree: Any, key: str, value: Any, *, source: str, create: bool = False) -> None:
    """Put `value` at a dotted key of `tree`, in place.

    Args:
        tree: nested mappings and lists.
        key: dotted key.
        value: what stands there afterwards.
        source: the file's name, for messages.
        create: add keys that do not exist instead of refusing them.

    Raises:
        ConfigError: if there is no such key and `create` is false, or a part of it is no mapping.
    """
    *parents, last = key.split(".")
    node = tree
    for part in parents:
        if create and isinstance(node, dict) and node.get(_spelling(node, part)) is None:
            node[_spelling(node, part)] = {}
        node = _child(node, part, key=key, tree=tree, source=source)
    if create and not isinstance(node, (dict, list)):
        raise ConfigError(
            f"the key {key!r} of `overrides` must lead through sections of {source}, but what "
            f"{last!r} would stand in is a {type(node).__name__}; correct the key."
        )
    if not (create and isinstance(node, dict)):
        _child(node, last, key=key, tree=tree, source=source)
    node[int(last) if isinstance(node, list) else _spelling(node, last)] = copy.deepcopy(value)


def dotted_keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every leaf and of every inner node."""
    entries = enumerate(tree) if isinstance(tree, list) else tree.items()
    for name, entry in entries:
        key = f"{prefix}{name}"
        yield key
        if isinstance(entry, (dict, list)):
            yield from dotted_keys(entry, f"{key}.")


def _child(node: Any, part: str, *, key: str, tree: Any, source: str) -> Any:
    if isinstance(node, list) and part.isascii() and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    if isinstance(node, dict):
        spelling = _spelling(node, part)
        if spelling in node:
            return node[spelling]
    misses = near_misses(key, tree)
    hint = f"did you mean {' or '.join(misses)}? Otherwise " if misses else ""
    raise ConfigError(
        f"the key {key!r} of `overrides` must exist in {source}, but {part!r} does not; "
        f"{hint}write it as {{knob: NAME, create: true}} to have it added."
    )


def _spelling(node: Mapping[Any, Any], part: str) -> Any:
    """Return the key of `node` that is spelled `part`: YAML reads some keys as numbers."""
    return next((name for name in node if str(name) == part), part)


def near_misses(key: str, tree: Any) -> list[str]:
    """Return existing keys that look like `key`: same last part first, then similar spelling."""
    known = list(dotted_keys(tree))
    last = key.rpartition(".")[2]
    same = [name for name in known if name.rpartition(".")[2] == last]
    similar = difflib.get_close_matches(key, known, n=_MISSES_SHOWN, cutoff=0.6)
    return list(dict.fromkeys([*same, *similar]))[:_MISSES_SHOWN]
