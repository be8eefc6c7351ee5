"""Reads the knobs back from what was really built, never from the config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor, communication

from mindtune.experiments.gpt.config import recomputed_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mindtune.controller import TrainStep
    from mindtune.experiments.gpt.model import Gpt
    from mindtune.search.knobs import KnobValue

__all__ = ["effective_knobs", "recompute_of"]

_DTYPES = {ms.float16: "float16", ms.float32: "float32"}


def effective_knobs(*, step: TrainStep, backbone: Gpt, dataset: Any) -> dict[str, KnobValue]:
    """Return the knobs that really act, in their canonical spelling.

    `micro_batch_size` is missing here: `TuneCallback` reads it from the batches themselves.

    Args:
        step: The training step, for groups, micro-batches and compression.
        backbone: The network, for compute type and recomputation.
        dataset: The training dataset, for its workers.
    """
    layout = step.layout
    return {
        "data_parallel": _group_size(layout.data_parallel_group),
        "model_parallel": _group_size(layout.model_parallel_group),
        "micro_batch_num": step.num_microbatches,
        "precision": _precision(backbone),
        "recompute": recompute_of([_is_recomputed(block) for block in backbone.blocks]),
        "gradient_compression": str(step.compression),
        "data_workers": int(dataset.num_parallel_workers),
        "prefetch": int(ds.config.get_prefetch_size()),
    }


def recompute_of(flags: Sequence[bool]) -> str:
    """Return the canonical spelling of which blocks are recomputed.

    Args:
        flags: Per block, whether it is recomputed.

    Raises:
        ValueError: The pattern has no spelling.
    """
    chosen = tuple(index for index, flag in enumerate(flags) if flag)
    if not chosen:
        return "none"
    if len(chosen) == len(flags):
        return "full"
    spelled = f"interval:{chosen[0] + 1}"
    if recomputed_blocks(spelled, len(flags)) != chosen:
        raise ValueError(
            f"Recomputed blocks must be every K-th, but got {chosen} of {len(flags)}."
        )
    return spelled


def _is_recomputed(block: Any) -> bool:
    # `Cell.recompute` leaves this flag, and it is what the compiler reads.
    return "output_recompute" in block.get_flags()


def _group_size(group: str | None) -> int:
    return 1 if group is None else int(communication.get_group_size(group))


def _precision(backbone: Gpt) -> str:
    """Return the type in which an activation reaches the head."""
    width = backbone.byte_embedding.shape[1]
    return _DTYPES[backbone.final_norm(Tensor(np.zeros((1, 1, width), np.float32))).dtype]
