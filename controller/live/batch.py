"""What the shapes of a batch tell."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from mindspore import Tensor

__all__ = ["BatchShape", "batch_facts"]


class BatchShape(NamedTuple):
    """Size of one call's data on one rank; None: the batch does not say."""

    shapes: tuple[tuple[tuple[int, ...], Any], ...]
    """Shape and type of every Tensor."""
    samples: int | None
    """Length of the first Tensor."""
    tokens: int | None
    """Width of the first integer matrix: token ids of shape (samples, tokens)."""


def batch_facts(batch: Any) -> BatchShape:
    """Return the sizes of what a dataset gave to one call of the training step."""
    columns = batch if isinstance(batch, (tuple, list)) else (batch,)
    return _facts(
        tuple((column.shape, column.dtype) for column in columns if isinstance(column, Tensor))
    )


@lru_cache(maxsize=256)
def _facts(shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> BatchShape:
    """Naming a type takes longer than all the rest, and shapes hardly ever change."""
    samples = shapes[0][0][0] if shapes and shapes[0][0] else None
    tokens = next(
        (shape[1] for shape, kind in shapes if len(shape) == 2 and "Int" in str(kind)), None
    )
    return BatchShape(shapes, samples, tokens)
