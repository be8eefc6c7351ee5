"""The packed tensor in which a step's signals leave the device, and what it means.

One float32 vector is copied to the host per optimizer step: `PACKED_FIELDS` in order, then one row
per rank (`NUM_ROW_FIELDS` values each).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "NUM_HOST_SIGNALS",
    "NUM_ROW_FIELDS",
    "PACKED_FIELDS",
    "StepReport",
    "unpack",
]

NUM_HOST_SIGNALS = 10
"""Free slots in which every rank tells all ranks what its host measured."""

PACKED_FIELDS = (
    "loss",
    "grad_norm",
    "overflow",
    "update_skipped",
    "loss_scale",
    "learning_rate",
    "learning_rate_scale",
    "clip_norm",
    "clip_factor",
    "skip_threshold",
    "skip_non_finite",
    "compression_ratio",
    "num_microbatches",
    "clean_steps",
)

NUM_ROW_FIELDS = 2 + NUM_HOST_SIGNALS
"""Of one rank: its loss, its local gradient norm (NaN: not measured), its host signals."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step measured and which knob values acted in it.

    All values are equal on all ranks. None means not measured or not in use; NaN and infinity are
    measured values.
    """

    loss: float
    """Mean loss over micro-batches and data-parallel ranks, unscaled."""
    grad_norm: float
    """Global L2 norm of the mean gradient, unscaled, before clipping."""
    overflow: bool
    """Whether the gradient norm or the loss was non-finite on any rank."""
    update_skipped: bool
    """Whether weights and moments were left as they were."""
    loss_scale: float | None
    """The scale used in this step; None without loss scaling."""
    learning_rate: float
    """The rate that acted, scale included; that of the first group if rates are grouped."""
    learning_rate_scale: float
    """The factor over the schedule that acted."""
    clip_norm: float
    """The bound that acted; infinity: no clipping."""
    clip_factor: float
    """What the gradient was multiplied with by clipping; 1: untouched."""
    skip_threshold: float
    """Gradient norm above which the update is skipped; infinity: never."""
    skip_non_finite: bool
    """Whether a non-finite gradient or loss skips the update."""
    compression_ratio: float
    """Share of gradient entries that were exchanged; 1 without top-k compression."""
    num_microbatches: int
    """Micro-batches whose mean gradient acted; parts count where each came in parts."""
    clean_steps: int
    """Steps without overflow in a row, this one included."""
    rank_losses: tuple[float, ...]
    """Mean loss over micro-batches of every rank."""
    rank_grad_norms: tuple[float, ...] | None
    """Norm of every rank's own gradient before reduction; None without compression."""
    rank_rows: tuple[tuple[float, ...], ...]
    """The host signals of every rank, as `set_host_signals` was last given them."""
    micro_batch_split: int = 1
    """Parts in which each incoming micro-batch was run."""


def unpack(
    values: Sequence[float],
    *,
    world_size: int,
    uses_loss_scale: bool,
    micro_batch_split: int = 1,
) -> StepReport:
    """Return the report held by one packed vector.

    Args:
        values: The vector as fetched, `len(PACKED_FIELDS) + world_size * NUM_ROW_FIELDS` numbers.
        world_size: Number of ranks.
        uses_loss_scale: Whether a loss scale is in use; else it is reported as None.
        micro_batch_split: Parts of each incoming micro-batch, which the host counts.
    """
    head = dict(zip(PACKED_FIELDS, values, strict=False))
    rows = [
        tuple(values[start : start + NUM_ROW_FIELDS])
        for start in range(
            len(PACKED_FIELDS),
            len(PACKED_FIELDS) + world_size * NUM_ROW_FIELDS,
            NUM_ROW_FIELDS,
        )
    ]
    local_norms = tuple(row[1] for row in rows)
    return StepReport(
        loss=head["loss"],
        grad_norm=head["grad_norm"],
        overflow=head["overflow"] != 0,
        update_skipped=head["update_skipped"] != 0,
        loss_scale=head["loss_scale"] if uses_loss_scale else None,
        learning_rate=head["learning_rate"],
        learning_rate_scale=head["learning_rate_scale"],
        clip_norm=head["clip_norm"],
        clip_factor=head["clip_factor"],
        skip_threshold=head["skip_threshold"],
        skip_non_finite=head["skip_non_finite"] != 0,
        compression_ratio=head["compression_ratio"],
        num_microbatches=round(head["num_microbatches"]),
        clean_steps=round(head["clean_steps"]),
        rank_losses=tuple(row[0] for row in rows),
        rank_grad_norms=None if all(map(math.isnan, local_norms)) else local_norms,
        rank_rows=tuple(row[2:] for row in rows),
        micro_batch_split=micro_batch_split,
    )
