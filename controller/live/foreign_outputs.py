"""What a training step that is not ours returns, and what its attributes say about that.

Known shapes of `net_outputs`:

| Values | Step |
|---|---|
| loss | `nn.TrainOneStepCell` |
| (loss, gradients) | the same with `return_grad=True` |
| (loss, overflow, scale) | `nn.TrainOneStepWithLossScaleCell`, MindFormers |
| (loss, overflow, scale, learning rate) | MindFormers |
| (loss, overflow, scale, learning rate, global norm) | MindFormers |
| the same, local norms, their sizes | MindFormers with `local_norm` |

Of a tuple of any other length the first value is taken as the loss. MindFormers gives False for a
scale, and None for a norm, that it does not have. What is not a number is not measured.

The numbers are not always what they are called. `MicroBatchInterleaved` and the cells of pipeline
and accumulation return the *sum* of the losses of their parts, which MindFormers divides for its
log line alone; the norm of `MicroBatchInterleaved` is that of the sum as well, and stays: it is
what gets clipped. The scale is the one of the next step, if the step has lowered or raised it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from mindtune.controller.live.sensors import StepSignals

__all__ = ["StepConventions", "conventions_of", "decode", "find_scale_sense", "number"]

_WITH_SCALE: Final = (3, 4, 5, 7)

_SUMMING: Final = {
    "MicroBatchInterleaved": "interleave_num",
    "GradAccumulationCell": "micro_size",
    "PipelineCell": "micro_size",
}
"""Cells of MindSpore that return the sum of the losses of so many parts."""

_SUMMING_MEANS: Final = {
    "GradAccumulationCellWithMultiOutputs": "micro_size",
    "PipelineCellWithMultiOutputs": "micro_size",
}
"""Cells of MindFormers that do so unless the loss is taken per token."""


@dataclass(frozen=True, kw_only=True)
class StepConventions:
    """How the outputs of a step are meant."""

    num_losses: int = 1
    """Losses that the returned one is the sum of."""
    clip_norm: float | None = None
    """Bound of the gradient norm; infinity: none; None: unknown."""
    skip_threshold: float | None = None
    """Norm at which the step skips its update; infinity: none; None: unknown."""
    scales_loss: bool = True
    """Whether the loss scale is one: a fixed 1 is none."""


def conventions_of(train_network: Any) -> StepConventions:
    """Return what the attributes of a training step say about its outputs."""
    scale = number(find_scale_sense(train_network))
    managed = getattr(train_network, "loss_scaling_manager", None) is not None
    return StepConventions(
        num_losses=_num_losses(train_network),
        clip_norm=_clip_norm(train_network),
        skip_threshold=_skip_threshold(train_network),
        scales_loss=managed or scale != 1,
    )


def find_scale_sense(train_network: Any) -> Parameter | None:
    """Return the Parameter in which a step keeps its loss scale; None if it has none."""
    found = getattr(train_network, "scale_sense", None)
    return found if isinstance(found, Parameter) else None


def decode(
    outputs: Any,
    *,
    scale_before: float | None = None,
    conventions: StepConventions | None = None,
) -> StepSignals:
    """Return the signals in what a training step returned.

    Args:
        outputs: `cb_params.net_outputs`.
        scale_before: Loss scale that acted, where that is known better than by the outputs.
        conventions: How they are meant; None: nothing is known of the step.
    """
    meant = conventions or StepConventions()
    several = isinstance(outputs, (tuple, list))
    if several and not outputs:
        return StepSignals()
    loss = number(outputs[0] if several else outputs)
    if loss is not None:
        loss /= meant.num_losses
    if not several or len(outputs) not in _WITH_SCALE:
        return StepSignals(loss=loss)
    _, overflow, scale, *more = outputs
    overflowed = number(overflow, largest=True)
    norm = number(more[1]) if len(more) > 1 else None
    acting_scale = scale_before if scale_before is not None else number(scale)
    return StepSignals(
        loss=loss,
        overflow=None if overflowed is None else float(overflowed != 0),
        update_skipped=_skipped(overflowed, norm, meant.skip_threshold),
        loss_scale=acting_scale if meant.scales_loss else None,
        learning_rate=number(more[0], first=True) if more else None,
        grad_norm=norm,
        clip_norm=meant.clip_norm,
        skip_threshold=meant.skip_threshold,
    )


def number(value: Any, *, first: bool = False, largest: bool = False) -> float | None:
    """Return a number, array or Tensor as one number: the mean, unless told otherwise.

    Of a tuple the first entry counts (a total loss, the rate of the first group). What is no
    number, False included (MindFormers' "no loss scale"), is None.

    Args:
        value: What a step returned.
        first: Take the first entry: the rate of the first group.
        largest: Take the largest absolute entry, of flags too: whether any is set.
    """
    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    if isinstance(value, Tensor):
        # NumPy has no bfloat16, and `asnumpy` refuses it.
        value = value.float() if value.dtype == mstype.bfloat16 else value
        array = value.asnumpy()
    elif value is None or (value is False and not largest):
        return None
    else:
        array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.size == 0:
        return None
    if first:
        return float(array.reshape(-1)[0])
    if largest:
        return float(np.max(np.abs(array.astype(np.float64))))
    return float(np.mean(array, dtype=np.float64))


def _skipped(overflow: float | None, norm: float | None, threshold: float | None) -> float | None:
    """These steps skip the update on an overflow, and some above a norm; NaN is never below."""
    if overflow is None:
        return None
    if threshold is None or math.isinf(threshold) or norm is None:
        return float(overflow != 0)
    return float(overflow != 0 or not norm < threshold)


def _num_losses(train_network: Any) -> int:
    cells = getattr(train_network, "cells_and_names", None)
    if cells is None:
        return 1
    per_token = bool(getattr(train_network, "calculate_per_token_loss", False))
    summing = _SUMMING if per_token else _SUMMING | _SUMMING_MEANS
    found = 1
    for _, cell in cells():
        count = getattr(cell, summing.get(type(cell).__name__, ""), 1)
        found *= count if isinstance(count, int) and count > 0 else 1
    return found


def _clip_norm(train_network: Any) -> float | None:
    clips = getattr(train_network, "use_clip_grad", None)
    if not isinstance(clips, bool):
        return None
    clip = getattr(train_network, "clip_grad_norm", None)
    return number(getattr(clip, "clip_norm", None)) if clips else math.inf


def _skip_threshold(train_network: Any) -> float | None:
    skips = getattr(train_network, "use_skip_data_by_global_norm", None)
    if not isinstance(skips, bool):
        return None
    return (
        number(getattr(train_network, "global_norm_spike_threshold", None)) if skips else math.inf
    )
