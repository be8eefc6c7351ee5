"""Which configs nobody beats in every respect: the front of several objectives under noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["front"]


def front(points: Mapping[int, Sequence[float]], *, noise: float = 0.0) -> tuple[int, ...]:
    """Return the numbers of the configs that no other dominates, in rising order.

    One dominates another if it is nowhere worse and somewhere better by more than noise. What
    differs by less stays beside it: a measurement does not tell the two apart.

    Args:
        points: Number of a config -> its objectives, each to be maximised and not negative.
        noise: Share by which a better value must exceed the other to count.
    """
    return tuple(
        number
        for number, own in sorted(points.items())
        if not any(
            _dominates(other, own, noise) for rival, other in points.items() if rival != number
        )
    )


def _dominates(point: Sequence[float], other: Sequence[float], noise: float) -> bool:
    pairs = list(zip(point, other, strict=True))
    nowhere_worse = all(own >= theirs for own, theirs in pairs)
    return nowhere_worse and any(own > theirs * (1.0 + noise) for own, theirs in pairs)
