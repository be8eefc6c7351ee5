"""How a user's config spells the values of a knob, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindtune.search.knobs import KnobValue, canonical, knob_text
from mindtune.search.stage_list import parse_stage_list, plain_list, stage_list_text

__all__ = ["LIST", "Spelling"]

LIST = "{list}"
"""In `values`: the list of numbers that a value such as `layers:2/1` holds."""


@dataclass(frozen=True)
class Spelling:
    """The `values` of one override.

    A key that ends with `*` stands for every value that begins so and that no other key names:
    `"layers:*": "{list}"` writes `recompute = layers:2/1` as `[2, 1]`.
    """

    knob: str
    values: Mapping[str, Any]
    """Canonical value as text, or pattern -> value in the user's config; empty: spelled alike."""

    def write(self, value: KnobValue) -> Any:
        """Return a canonical value as the user's config has it.

        Raises:
            KeyError: if `values` does not spell it.
        """
        text = knob_text(value)
        if not self.values:
            return _offset(text) if self.knob == "offset" else value
        if text in self.values:
            entry = self.values[text]
        else:
            patterns = [key for key in self.values if key.endswith("*")]
            fitting = [key for key in patterns if text.startswith(key[:-1])]
            entry = self.values[max(fitting, key=len)] if fitting else self.values[text]
        return plain_list(parse_stage_list(text.partition(":")[2])) if entry == LIST else entry

    def read(self, value: Any) -> tuple[KnobValue, ...]:
        """Return the canonical values that the user's config can mean, the first one preferred.

        Raises:
            SearchError: if it is spelled as the knob is, but is no value of it.
            ValueError: if it is a list that holds no number per stage.
        """
        if not self.values:
            return (canonical(self.knob, value),)
        found = [
            canonical(self.knob, name)
            for name, entry in self.values.items()
            if entry == value and not name.endswith("*")
        ]
        if isinstance(value, list):
            rows = stage_list_text(parse_stage_list(value))
            found += [
                canonical(self.knob, f"{name[:-1]}{rows}")
                for name, entry in self.values.items()
                if entry == LIST and name.endswith(":*")
            ]
        return tuple(dict.fromkeys(found))

    def means(self, value: Any, candidate: KnobValue) -> bool:
        """Return whether the user's value can stand for a canonical one."""
        try:
            return bool(self.write(candidate) == value)
        except KeyError:
            return False


def _offset(text: str) -> Any:
    """Return an offset as MindFormers takes it; a trial's `balanced` is resolved to its list."""
    return 0 if text in ("even", "balanced") else plain_list(parse_stage_list(text))
