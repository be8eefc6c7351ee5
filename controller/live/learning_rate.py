"""One live factor over the learning rate, whatever form the optimizer holds it in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

__all__ = ["LearningRate", "ReportingSchedule", "ScaledSchedule", "has_learning_rate"]


class ScaledSchedule(LearningRateSchedule):
    """A schedule multiplied by a Parameter; a factor of 1 leaves every bit as it is."""

    def __init__(self, schedule: nn.Cell, scale: Parameter) -> None:
        super().__init__()
        # A prefix would rename the schedule's own Parameters in checkpoints.
        self._auto_prefix = False
        self.schedule = schedule
        self.scale = scale

    def construct(self, global_step: Any) -> Any:
        """Return the scaled rate of a step."""
        return self.schedule(global_step) * self.scale


class ReportingSchedule(ScaledSchedule):
    """The same, leaving the factor that it read in a Parameter: what acted, not what was asked."""

    def __init__(self, schedule: nn.Cell, scale: Parameter, acted: Parameter) -> None:
        super().__init__(schedule, scale)
        self.acted = acted

    def construct(self, global_step: Any) -> Any:
        """Return the scaled rate of a step."""
        scale = self.scale.value()
        ops.assign(self.acted, scale)
        return self.schedule(global_step) * scale


class LearningRate(nn.Cell):
    """The optimizer's learning rate as a scale over its schedule.

    Schedules and tables are cells: they are wrapped in `ScaledSchedule`, and the wrapper replaces
    them in the optimizer. A plain float is a Parameter that the optimizer reads, and groups hold
    one or the other per group; `mindspore.experimental.optim` and `mint.optim` hold Parameters.
    Such `rates` are scaled for the length of an update only: before it they are copied to `bases`,
    after it copied back. So whoever else writes or reads them between updates (a scheduler of
    `experimental.optim`, `ReduceLROnPlateau`, a checkpoint) deals with the unscaled rate.

    Args:
        optimizer: The optimizer.
        reports: Whether wrapped schedules leave the factor that acted in `acted`, for a training
            step whose outputs cannot hold it.
    """

    def __init__(self, optimizer: nn.Cell, *, reports: bool = False) -> None:
        super().__init__(auto_prefix=False)
        self._dynamic = bool(getattr(optimizer, "dynamic_lr", False))
        grouped = bool(getattr(optimizer, "is_group_lr", False))
        wrapped = _wrapper(optimizer) if self._dynamic else None
        self.scale = (
            _float_parameter(1.0, "mindtune.learning_rate_scale")
            if wrapped is None
            else wrapped.scale
        )
        if isinstance(wrapped, ReportingSchedule):
            self.acted = wrapped.acted
        elif reports and self._dynamic and wrapped is None:
            self.acted = _float_parameter(1.0, "mindtune.acted_learning_rate_scale")
        else:
            self.acted = None
        rates: tuple[Parameter, ...] = ()
        if self._dynamic:
            _wrap_schedules(optimizer, self.wrap, grouped=grouped)
            self.first = optimizer.learning_rate[0] if grouped else optimizer.learning_rate
            self.global_step = optimizer.global_step
        else:
            rates = _rate_parameters(optimizer, grouped=grouped)
        self.rates = ParameterTuple(rates)
        self.bases = ParameterTuple(
            _float_parameter(float(rate.asnumpy()), f"mindtune.base_learning_rate.{index}")
            for index, rate in enumerate(rates)
        )

    def wrap(self, schedule: nn.Cell) -> ScaledSchedule:
        """Return a schedule, scaled; one that is already stays as it is."""
        if isinstance(schedule, ScaledSchedule):
            return schedule
        if self.acted is None:
            return ScaledSchedule(schedule, self.scale)
        return ReportingSchedule(schedule, self.scale, self.acted)

    def construct(self) -> Any:
        """Copy the rates; return (scaled rate of the first group, scale)."""
        scale = self.scale.value()
        if self._dynamic:
            return self.first(self.global_step).reshape(()), scale
        for index in range(len(self.rates)):
            ops.assign(self.bases[index], self.rates[index])
        return self.bases[0] * scale, scale

    def set_scale(self, scale: float) -> None:
        """Scale the rates from the host, for a training step that is not ours.

        There nothing scales them for the length of an update, so `rates` stay scaled; a rate that
        somebody else wrote since the last call is taken as already scaled.
        """
        old = np.float32(self.scale.asnumpy())
        new = np.float32(scale)
        for rate, base in zip(self.rates, self.bases, strict=True):
            base_value = np.float32(base.asnumpy())
            current = np.float32(rate.asnumpy())
            if current != base_value * old:
                base_value = current / old if old else current
                ops.assign(base, Tensor(base_value, mstype.float32))
            ops.assign(rate, Tensor(base_value * new, rate.dtype))
        ops.assign(self.scale, Tensor(new, mstype.float32))


def _float_parameter(value: float, name: str) -> Parameter:
    return Parameter(Tensor(value, mstype.float32), name=name, requires_grad=False)


def has_learning_rate(optimizer: Any) -> bool:
    """Tell whether an optimizer holds its rate in one of the forms that can be scaled."""
    if hasattr(optimizer, "param_groups"):
        return True
    rate = getattr(optimizer, "learning_rate", None)
    if getattr(optimizer, "dynamic_lr", False):
        return isinstance(rate, nn.Cell)
    rates = rate if isinstance(rate, (tuple, list)) else (rate,)
    return bool(rates) and all(isinstance(each, Parameter) for each in rates)


def _wrapper(optimizer: nn.Cell) -> ScaledSchedule | None:
    """What an earlier training step has wrapped the optimizer's schedule in."""
    schedule = optimizer.learning_rate
    first = schedule[0] if isinstance(schedule, nn.CellList) else schedule
    return first if isinstance(first, ScaledSchedule) else None


def _wrap_schedules(
    optimizer: nn.Cell, wrap: Callable[[nn.Cell], ScaledSchedule], *, grouped: bool
) -> None:
    if not grouped:
        if not isinstance(optimizer.learning_rate, ScaledSchedule):
            optimizer.learning_rate = wrap(optimizer.learning_rate)
        return
    # The list holds one entry per weight; weights of one group share the cell.
    wrapped: dict[int, ScaledSchedule] = {}
    for schedule in optimizer.learning_rate:
        if id(schedule) not in wrapped:
            wrapped[id(schedule)] = wrap(schedule)
    cells = [wrapped[id(schedule)] for schedule in optimizer.learning_rate]
    optimizer.learning_rate = nn.CellList(cells, auto_prefix=False)


def _rate_parameters(optimizer: nn.Cell, *, grouped: bool) -> tuple[Parameter, ...]:
    """The distinct learning-rate Parameters of an optimizer, in the order of its groups."""
    if hasattr(optimizer, "param_groups"):
        found = [group["lr"] for group in optimizer.param_groups]
    else:
        found = list(optimizer.learning_rate) if grouped else [optimizer.learning_rate]
    return tuple({id(rate): rate for rate in found}.values())
