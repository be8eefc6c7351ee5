"""Which configs nobody beats in both respects: the front of two objectives under noise."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["front"]


def front(
    points: Mapping[int, tuple[float, float]], *, noise: tuple[float, float] = (0.0, 0.0)
) -> tuple[int, ...]:
    """Return the numbers of the configs that no other dominates, in rising order.

    One dominates another if it is somewhere better, and nowhere worse, by more than noise. What
    differs by less in both stays beside it: a measurement does not tell the two apart. Of two
    objectives the front is never empty: whoever dominates gains more, in units of the noise, than
    it gives away, so that no circle closes.

    Args:
        points: Number of a config -> its objectives, each to be maximised and not negative.
        noise: By objective: share by which a better value must exceed the other to count.
    """
    return tuple(
        number
        for number, own in sorted(points.items())
        if not any(
            _dominates(other, own, noise) for rival, other in points.items() if rival != number
        )
    )


def _dominates(
    point: tuple[float, float], other: tuple[float, float], noise: tuple[float, float]
) -> bool:
    triples = list(zip(point, other, noise, strict=True))
    if any(theirs > own * (1.0 + share) for own, theirs, share in triples):
        return False
    return any(own > theirs * (1.0 + share) for own, theirs, share in triples)
