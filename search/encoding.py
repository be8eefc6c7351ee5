"""Configs as points: one place per knob, so that likeness of configs is a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mindtune.search.history import memory_need
from mindtune.search.knobs import KnobValue

__all__ = ["Encoding", "Flags", "Floats", "Indices", "Places", "following"]

_ATTENTION_ALONE = 0.9
"""Place of selective recomputation between none at 1 and full at 0: it adds a few percent."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Indices = NDArray[np.intp]
"""Of configs or trials."""
Places = NDArray[np.int16]
"""Configs by the places of their values among the choices: one row each, one column per knob."""


class Encoding:
    """Maps configs to places of the knobs that vary, and places to distances.

    Numbers lie on a logarithmic axis and recomputation on the axis of its share, both scaled to
    0..1; any other knob's values are equally far apart.
    """

    def __init__(self, choices: Mapping[str, Sequence[KnobValue]]) -> None:
        self.names = tuple(name for name, values in choices.items() if len(values) > 1)
        self._places = [{v: i for i, v in enumerate(choices[name])} for name in self.names]
        axes = [_axis(name, choices[name]) for name in self.names]
        self.is_ordered = tuple(axis is not None for axis in axes)
        """Per knob: whether distances along the axis mean anything."""
        self.gaps = tuple(
            1.0 - np.eye(len(places)) if axis is None else np.abs(axis[:, None] - axis[None, :])
            for places, axis in zip(self._places, axes, strict=True)
        )
        """Per knob: distance 0..1 of any two of its values."""

    def places(self, configs: Sequence[Mapping[str, KnobValue]]) -> Places:
        """Return one row per config."""
        rows = np.empty((len(configs), len(self.names)), dtype=np.int16)
        for column, (name, places) in enumerate(zip(self.names, self._places, strict=True)):
            rows[:, column] = [places[config[name]] for config in configs]
        return rows


def following(encoding: Encoding, places: Places) -> frozenset[str]:
    """Return the knobs that follow from another one in every config, and say nothing beside it.

    In a list of candidates, sequence parallelism may stand wherever tensor parallelism does.
    Counted as a knob of its own it would make one change look like two.
    """
    order = sorted(range(len(encoding.names)), key=lambda index: encoding.is_ordered[index])
    sizes = [len(gaps) for gaps in encoding.gaps]
    counts = [np.count_nonzero(np.bincount(places[:, index])) for index in order]
    known = dict(zip(order, counts, strict=True))
    gone: set[int] = set()
    for index in order:
        for other in set(order) - gone - {index}:
            pairs = places[:, other].astype(np.int64) * sizes[index] + places[:, index]
            if np.count_nonzero(np.bincount(pairs)) == known[other]:
                gone.add(index)
                break
    return frozenset(encoding.names[index] for index in gone)


def _axis(name: str, values: Sequence[KnobValue]) -> Floats | None:
    positions = [_position(name, value) for value in values]
    known = [position for position in positions if position is not None]
    if len(known) < len(values):
        return None
    low, high = min(known), max(known)
    return (np.array(known) - low) / ((high - low) or 1.0)


def _position(name: str, value: KnobValue) -> float | None:
    if name == "recompute":
        return _ATTENTION_ALONE if value == "selective" else memory_need(name, value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return math.log2(value) if value > 0 else -1.0
