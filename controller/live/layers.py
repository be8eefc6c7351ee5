"""Groups weights into layers by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["group_by_layer", "layer_of"]

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
