"""A course of numbers in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["sparkline"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN = "_.-=+*#@"
"""Where a terminal knows no blocks."""
_BROKEN = "x"


def sparkline(values: Sequence[float | None], *, width: int, plain: bool = False) -> str:
    """Return the newest values, each character the largest of its stretch, so that spikes show.

    Args:
        values: oldest first; None is left out, a non-finite one makes an x of its stretch.
        width: most characters.
        plain: use ASCII alone.
    """
    measured = [value for value in values if value is not None]
    stretch = max(1, math.ceil(len(measured) / width))
    finite = [value for value in measured if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    levels = _PLAIN if plain else _BLOCKS
    text = ""
    for start in range(0, len(measured), stretch):
        part = measured[start : start + stretch]
        if not all(map(math.isfinite, part)):
            text += _BROKEN
            continue
        # Halves, since the distance of two floats may be none.
        share = (max(part) / 2 - low / 2) / (high / 2 - low / 2) if low < high else 0.0
        text += levels[min(len(levels) - 1, int(share * len(levels)))]
    return text
