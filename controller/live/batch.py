"""What the shapes of a batch tell."""

from __future__ import annotations

from typing import Any, NamedTuple

from mindspore import Tensor

__all__ = ["BatchShape", "batch_facts"]


class BatchShape(NamedTuple):
    """Size of one call's data on one rank; None: the batch does not say."""

    shapes: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and type of every Tensor."""
    samples: int | None
    """Length of the first Tensor."""
    tokens: int | None
    """Width of the first integer matrix: token ids of shape (samples, tokens)."""


def batch_facts(batch: Any) -> BatchShape:
    """Return the sizes of what a dataset gave to one call of the training step."""
    columns = batch if isinstance(batch, (tuple, list)) else (batch,)
    shapes = tuple(
        (tuple(column.shape), str(column.dtype))
        for column in columns
        if isinstance(column, Tensor)
    )
    samples = shapes[0][0][0] if shapes and shapes[0][0] else None
    tokens = next((shape[1] for shape, kind in shapes if len(shape) == 2 and "Int" in kind), None)
    return BatchShape(shapes, samples, tokens)
