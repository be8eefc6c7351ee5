"""A factor on the learning rate below the policies' own scale."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from mindtune.controller.errors import ConfigError
from mindtune.controller.live.learning_rate import ScaledSchedule
from mindtune.controller.live.update_step import UpdateStep

__all__ = ["PlantedRate"]


class _FaultySchedule(ScaledSchedule):
    """A schedule times the fault's factor; by its type a later plan finds it again."""


class PlantedRate:
    """Multiplies what the optimizer holds as its rate; the policies' scale stays as it is.

    A schedule gets one more factor, in the graph, and so before the first step; Parameters are
    written between steps, and whoever else writes them is followed.

    Args:
        step: The training step.

    Raises:
        ConfigError: The step has compiled a schedule without the factor.
    """

    def __init__(self, step: UpdateStep) -> None:
        rate = step.update.learning_rate
        self._rates = tuple(rate.rates)
        self._written: list[np.float32] = []
        self._bases: list[np.float32] = []
        self._factor = 1.0
        self._factors = [] if self._rates else _planted_factors(step)

    def hold(self, factor: float) -> None:
        """Let `factor` act from the next update on; to be called before every step."""
        if factor != self._factor:
            for parameter in self._factors:
                ops.assign(parameter, Tensor(factor, mstype.float32))
        if self._rates and (factor != 1.0 or self._factor != 1.0):
            self._write(factor)
        self._factor = factor

    def _write(self, factor: float) -> None:
        current = [np.float32(rate.asnumpy()) for rate in self._rates]
        if self._factor == 1.0:
            self._bases = current
        else:
            pairs = zip(current, self._written, self._bases, strict=True)
            self._bases = [base if now == ours else now for now, ours, base in pairs]
        self._written = [np.float32(base * np.float32(factor)) for base in self._bases]
        for rate, value in zip(self._rates, self._written, strict=True):
            ops.assign(rate, Tensor(value, rate.dtype))


def _planted_factors(step: UpdateStep) -> list[Parameter]:
    """Return the factors inside the schedules, put in if no earlier plan has."""
    held = step.optimizer.learning_rate
    cells: list[Any] = list(held) if isinstance(held, nn.CellList) else [held]
    factors: dict[int, Parameter] = {}
    for cell in cells:
        inner = cell.schedule
        if not isinstance(inner, _FaultySchedule):
            if step.optimizer_steps:
                raise ConfigError(
                    "learning_rate_jump must be planted before the first step, since a schedule "
                    f"is compiled then, but {step.optimizer_steps} have run; make a new TrainStep."
                )
            factor = Parameter(
                Tensor(1.0, mstype.float32),
                name=f"mindtune.planted_rate_factor.{len(factors)}",
                requires_grad=False,
            )
            inner = cell.schedule = _FaultySchedule(inner, factor)
        factors[id(inner)] = inner.scale
    return list(factors.values())
