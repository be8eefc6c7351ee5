"""Cuts a micro-batch into equal parts along its first axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspore import Tensor

__all__ = ["batch_rows", "cut", "fitting_parts"]


def batch_rows(batch: Sequence[Any]) -> int | None:
    """Return the samples of a micro-batch; None where it cannot be cut.

    It can if every input is a Tensor whose first axis is as long as that of all others: those are
    taken as samples. Tensors without axes, numbers, texts and None go to every part as they are.

    Args:
        batch: Inputs of one call of the training step.
    """
    found: set[int] = set()
    for entry in batch:
        if isinstance(entry, Tensor):
            if entry.ndim:
                found.add(entry.shape[0])
        elif entry is not None and not isinstance(entry, (bool, int, float, str)):
            return None
    return found.pop() if len(found) == 1 else None


def fitting_parts(rows: int, parts: int) -> int:
    """Return the fewest equal parts, at least `parts`, of a micro-batch of `rows` samples.

    A ragged last micro-batch is cut finer rather than coarser, so that no part is larger than
    those of a whole one; one with fewer samples than parts is cut into single samples.
    """
    return next((count for count in range(parts, rows) if rows % count == 0), max(rows, 1))


def cut(batch: Sequence[Any], rows: int, parts: int) -> Iterator[tuple[Any, ...]]:
    """Yield the parts of a micro-batch of `rows` samples, which `parts` divides."""
    size = rows // parts
    for start in range(0, rows, size):
        yield tuple(
            entry[start : start + size] if isinstance(entry, Tensor) and entry.ndim else entry
            for entry in batch
        )
