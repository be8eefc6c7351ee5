"""Numeric faults: between the backward pass and the update, on the host's side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from typing_extensions import assert_never

from mindtune.controller.contract.fault_plan import (
    Burst,
    Drift,
    LevelShift,
    NanGradient,
    NanLoss,
    OverflowStorm,
    PoisonedBatch,
    ScalingFault,
    Spike,
)
from mindtune.controller.errors import ConfigError

__all__ = ["GradientFaults"]

_Step = tuple[Any, tuple[Any, ...]]
"""Loss and gradients."""

_Fault = NanLoss | NanGradient | Spike | Burst | LevelShift | Drift | PoisonedBatch | OverflowStorm


class GradientFaults:
    """A `GradientHook` that spoils loss and gradients in the steps of its faults.

    All ranks take the wanted steps in the same form, so that their graphs match; only the ranks
    of a fault are spoilt.

    Args:
        faults: What to plant.
        names: Names of the optimizer's weights, in its order.
        rank: This process's rank.
        loss_scale: Returns the loss scale of the step in progress.
        ahead: Returns by how much the run's steps are ahead of the training step's own count, as
            after a resume.

    Raises:
        ConfigError: A parameter is none of the optimizer's.
    """

    def __init__(
        self,
        faults: Sequence[_Fault],
        *,
        names: Sequence[str],
        rank: int,
        loss_scale: Callable[[], float],
        ahead: Callable[[], int],
    ) -> None:
        self._faults = tuple(faults)
        self._rank = rank
        self._loss_scale = loss_scale
        self._ahead = ahead
        self._indices = {
            id(fault): _index(fault, names)
            for fault in self._faults
            if isinstance(fault, NanGradient)
        }

    def wants(self, optimizer_step: int) -> bool:
        """Tell whether a fault acts in this step, on whatever rank."""
        step = optimizer_step + self._ahead()
        return any(fault.acts(step) for fault in self._faults)

    def __call__(self, optimizer_step: int, loss: Any, gradients: tuple[Any, ...]) -> _Step:
        """Return loss and gradients as the faults of this rank leave them."""
        step = optimizer_step + self._ahead()
        for fault in self._faults:
            if fault.acts(step) and fault.rank in (None, self._rank):
                loss, gradients = self._spoil(fault, step, loss, gradients)
        return loss, gradients

    def _spoil(self, fault: _Fault, step: int, loss: Any, gradients: tuple[Any, ...]) -> _Step:
        match fault:
            case NanLoss():
                value = float(fault.value)
                return loss * value, _times(gradients, value)
            case NanGradient():
                index = self._indices[id(fault)]
                spoilt = gradients[index] * float(fault.value)
                return loss, (*gradients[:index], spoilt, *gradients[index + 1 :])
            case PoisonedBatch():
                draw = np.random.default_rng([fault.seed, step])
                spoilt = tuple(_turned(gradient, fault.factor, draw) for gradient in gradients)
                return loss * fault.factor, spoilt
            case OverflowStorm():
                if self._loss_scale() <= fault.max_loss_scale:
                    return loss, gradients
                return loss, _times(gradients, math.inf)
            case ScalingFault():
                factor = fault.factor_at(step)
                if fault.signal != "gradient":
                    loss = loss * factor
                if fault.signal != "loss":
                    gradients = _times(gradients, factor)
                return loss, gradients
            case _:
                assert_never(fault)


def _times(gradients: tuple[Any, ...], factor: float) -> tuple[Any, ...]:
    return tuple(gradient * factor for gradient in gradients)


def _turned(gradient: Any, factor: float, draw: np.random.Generator) -> Any:
    """Return a gradient of `factor` times the norm, in a direction of its own."""
    # In float32, whatever type the gradient has.
    values = gradient.astype(ms.float32).asnumpy()
    noise = draw.standard_normal(values.shape)
    length = float(np.linalg.norm(noise))
    scale = factor * float(np.linalg.norm(values)) / length if length else 0.0
    return Tensor((noise * scale).astype(np.float32), gradient.dtype)


def _index(fault: NanGradient, names: Sequence[str]) -> int:
    """Return the number of a fault's parameter."""
    named = fault.parameter
    if isinstance(named, int) and 0 <= named < len(names):
        return named
    if named in names:
        return list(names).index(str(named))
    some = ", ".join(names[:3])
    raise ConfigError(
        f"parameter of nan_gradient must be 0..{len(names) - 1} or the name of a weight that the "
        f"optimizer trains, but got {named!r}; the first are {some}."
    )
