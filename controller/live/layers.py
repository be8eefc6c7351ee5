"""Groups weights into layers by their names, and tells in which layer a gradient broke."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["broken_gradient", "group_by_layer", "layer_of"]

_LEAVES = frozenset({"weight", "bias", "gamma", "beta", "embedding_table"})
"""Names that a weight has inside the cell that is the layer."""


def layer_of(name: str) -> str:
    """Return the layer that a weight belongs to.

    A weight inside a list of blocks belongs to its block: its name up to the first part that is a
    number (`backbone.blocks.3.attention.qkv_weight` to `backbone.blocks.3`; experts within a block
    belong to the block). Any other one belongs to its cell (`head.weight` to `head`), or is a
    layer by itself (`backbone.byte_embedding`).
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    if len(parts) > 1 and parts[-1] in _LEAVES:
        return ".".join(parts[:-1])
    return name


def group_by_layer(names: Iterable[str]) -> Mapping[str, tuple[int, ...]]:
    """Return layer -> indices of its weights, in the order in which the layers first appear."""
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(layer_of(name), []).append(index)
    return {layer: tuple(indices) for layer, indices in groups.items()}


def broken_gradient(layers: Sequence[str], non_finite: Sequence[int]) -> tuple[str, str] | None:
    """Return the layer in which the backward pass broke, and what to say; None: it did not.

    The backward pass goes through the layers from the last to the first, and what is broken stays
    so. Weights that a model holds beside its blocks, such as an output matrix, may stand first in
    the optimizer's order: where every layer is broken, only the model's end is known.

    Args:
        layers: In the optimizer's order.
        non_finite: Of each the number of gradient entries that are NaN or infinite.
    """
    broken = [layer for layer, count in zip(layers, non_finite, strict=False) if count]
    if not broken:
        return None
    if len(broken) == len(layers):
        return "all", (
            f"the gradient is non-finite in all {len(layers)} layers: it broke where the backward "
            "pass begins; look at the loss (a log of 0, a division by 0, an overflow) and at the "
            "model's last layer"
        )
    return broken[-1], (
        f"the gradient is first non-finite in {broken[-1]} as the backward pass comes to it "
        f"({len(broken)} of {len(layers)} layers are non-finite); look there for an overflow, a "
        "division by 0 or a log of 0"
    )
