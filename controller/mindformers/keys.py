"""The knobs of a study and the keys of a MindFormers YAML that they are written to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mindtune.controller.mindformers.base_yaml import MindFormersYaml

__all__ = ["KnobKeys"]


@dataclass
class KnobKeys:
    """What a study searches and how it is spelled; in the order in which it is written."""

    space: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    constraints: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def map(self, base: MindFormersYaml, key: str, knob: str, values: Any = None) -> None:
        """Map a key onto a knob; one that the YAML lacks is added where a knob is turned."""
        parent, _, name = key.rpartition(".")
        entry: dict[str, Any] = {"knob": knob}
        if values is not None:
            entry["values"] = values
        if name not in base.section(parent) and not name.isdecimal():
            entry["create"] = True
        self.overrides[key] = knob if len(entry) == 1 else entry
