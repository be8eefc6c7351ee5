"""Configs as points: one coordinate per knob, so that likeness of configs is a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindtune.search.history import memory_need
from mindtune.search.knobs import KnobValue

__all__ = ["Encoding", "Flags", "Floats", "Points"]

_ATTENTION_ALONE = 0.9
"""Place of selective recomputation between none at 1 and full at 0: it adds a few percent."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Points:
    """Coordinates of configs, one row each, one column per knob."""

    coordinates: Floats

    def __len__(self) -> int:
        return len(self.coordinates)


class Encoding:
    """Maps configs to points of the knobs that vary.

    Numbers lie on a logarithmic axis and recomputation on the axis of its share, both scaled to
    0..1; any other knob's values are equally far apart.
    """

    def __init__(self, choices: Mapping[str, Sequence[KnobValue]]) -> None:
        self.names = tuple(name for name, values in choices.items() if len(values) > 1)
        self._axes = [_axis(name, choices[name]) for name in self.names]
        self.is_ordered = np.array([ordered for _, ordered in self._axes], dtype=bool)
        """Per knob: whether distances along the axis mean anything."""

    def points(self, configs: Sequence[Mapping[str, KnobValue]]) -> Points:
        """Return one row per config."""
        rows = np.empty((len(configs), len(self.names)))
        for column, name in enumerate(self.names):
            axis, _ = self._axes[column]
            rows[:, column] = [axis[config[name]] for config in configs]
        return Points(rows)

    def distances(self, a: Points, b: Points) -> Floats:
        """Return the distance per knob, of shape (knobs, len(a), len(b)), each 0..1."""
        gaps = np.abs(a.coordinates.T[:, :, None] - b.coordinates.T[:, None, :])
        unordered = ~self.is_ordered
        gaps[unordered] = (gaps[unordered] > 0).astype(float)
        return np.asarray(gaps)


def _axis(name: str, values: Sequence[KnobValue]) -> tuple[dict[KnobValue, float], bool]:
    positions = [_position(name, value) for value in values]
    known = [position for position in positions if position is not None]
    if len(known) < len(values):
        return {value: float(index) for index, value in enumerate(values)}, False
    low, high = min(known), max(known)
    span = (high - low) or 1.0
    return {
        value: (position - low) / span for value, position in zip(values, known, strict=True)
    }, True


def _position(name: str, value: KnobValue) -> float | None:
    if name == "recompute":
        return _ATTENTION_ALONE if value == "selective" else memory_need(name, value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return math.log2(value) if value > 0 else -1.0
