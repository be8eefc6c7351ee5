"""One line of model_signals.jsonl: what was seen inside the model at a sampled step."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from mindtune.controller.contract.base import ContractModel, Count, Number, PositiveCount

__all__ = ["LOG10_EDGES", "ModelSignalRecord"]

LOG10_EDGES: tuple[int, ...] = tuple(range(-12, 3))
"""Edges of the histogram of log10 |gradient|: one bin per decade from 1e-12 to 100. float16 ends
below at 6e-8 (scaled) and float32 training gradients lie well inside."""

Vector = list[Number]
Matrix = list[list[Number]]


class ModelSignalRecord(ContractModel):
    """What a sampled step showed. A list runs over `layers`, in the optimizer's order."""

    FILE: ClassVar[str] = "model_signals.jsonl"

    step: PositiveCount
    """Optimizer steps attempted, this one included."""
    run: Count = 0
    """Segment of the run, as in signals.csv."""
    layers: list[str] = Field(default_factory=list)
    """Groups of weights by the beginning of their names; see `layer_of`."""
    gradient_norms: Vector | None = None
    """L2 norm of the mean gradient over micro-batches and data-parallel ranks, unscaled, before
    compression and clipping; a sharded weight counts the shards of all ranks."""
    gradient_counts: list[list[int]] | None = None
    """Per layer the number of gradient entries in each bin of log10 |gradient|: below the first of
    `log10_edges`, between two edges each, from the last edge up. Zeros and non-finite entries are
    in none. Above 2^24 entries a count is rounded to float32."""
    gradient_zeros: list[int] | None = None
    """Entries that are exactly 0."""
    gradient_non_finite: list[int] | None = None
    """Entries that are NaN or infinite."""
    log10_edges: list[int] = Field(default_factory=lambda: list(LOG10_EDGES))
    weight_norms: Vector | None = None
    """L2 norm of the weights before the update."""
    update_ratios: Vector | None = None
    """L2 norm of the weights' change over that of the weights before; 0 for a skipped update."""
    update_norm: Number | None = None
    """L2 norm of the change of all weights together; the column of signals.csv."""
    update_skipped: bool | None = None
    attention_entropy: Matrix | None = None
    """Per block and head, in nats: mean over queries of the entropy of the attention weights."""
    token_confidence: Number | None = None
    """Mean over tokens of the largest probability that the model gives to any token."""
    layer_losses: Vector | None = None
    """Loss of each block's output, put through the model's own end."""
    arrays: dict[str, Number | Vector | Matrix] = Field(default_factory=dict)
    """What else the model's function returned, by its names."""
    sample_time_s: Number | None = None
    """What taking this sample cost on this rank; not part of the step's time in signals.csv."""

    @model_validator(mode="after")
    def _one_value_per_layer(self) -> Self:
        for name in (
            "gradient_norms", "gradient_counts", "gradient_zeros", "gradient_non_finite",
            "weight_norms", "update_ratios",
        ):  # fmt: skip
            values = getattr(self, name)
            if values is not None and len(values) != len(self.layers):
                raise ValueError(
                    f"{name} must have one value per layer, but got {len(values)} for "
                    f"{len(self.layers)} layers"
                )
        return self
