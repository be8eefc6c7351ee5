"""The texts of the reports: one catalogue, `messages.yaml`, with every text in every language."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import yaml

from mindtune.controller.errors import ConfigError

__all__ = ["LANGUAGES", "Words", "catalogue"]

LANGUAGES: tuple[str, ...] = ("en", "zh")
"""English, and Chinese in simplified characters."""


class Words:
    """The texts in one language.

    Args:
        language: of `LANGUAGES`.

    Raises:
        ConfigError: there is no such language.
    """

    def __init__(self, language: str = LANGUAGES[0]) -> None:
        if language not in LANGUAGES:
            raise ConfigError(f"language must be one of {', '.join(LANGUAGES)}, not {language!r}.")
        self.language = language

    def __call__(self, key: str, **values: object) -> str:
        """Return the text of a key, such as `run.finished`, with its gaps filled.

        Raises:
            KeyError: the catalogue has no such text, or a gap is left open.
        """
        return catalogue()[key][self.language].format(**values)

    def known(self, group: str, name: str) -> str:
        """Return the text of a name that a record holds; the name itself where none is known."""
        texts = catalogue().get(f"{group}.{name}")
        return name if texts is None else texts[self.language]


@functools.cache
def catalogue() -> Mapping[str, Mapping[str, str]]:
    """Return all texts: dotted key -> language -> text."""
    source = resources.files("mindtune.controller.reports").joinpath("messages.yaml")
    return dict(_leaves(yaml.safe_load(source.read_text(encoding="utf-8")), ""))


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, dict[str, str]]]:
    if set(node) == set(LANGUAGES):
        yield prefix, node
        return
    for name, below in node.items():
        yield from _leaves(below, f"{prefix}.{name}" if prefix else name)
