"""The faults of one process's run, as its session calls them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from mindtune.controller.contract.fault_plan import (
    AnyFault,
    Hang,
    LearningRateJump,
    MemoryClimb,
    NumericFault,
    SlowData,
    SlowRank,
    StuckUtilization,
)
from mindtune.controller.device import DeviceReading
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.faults.gradients import GradientFaults
from mindtune.controller.live.faults.memory import Leak
from mindtune.controller.live.faults.rates import PlantedRate
from mindtune.controller.live.ranks import JobRank
from mindtune.controller.live.update_step import UpdateStep

__all__ = ["PlantedFaults"]

_LOGGER = logging.getLogger(__name__)
_IN_THE_STEP: Final = (NumericFault, LearningRateJump)
"""Kinds that need our training step."""


class PlantedFaults:
    """Plants faults around and inside the calls of a training step.

    Args:
        faults: What to plant, and when.
        step: Our training step; None: it is not ours, and then waits and readings alone can be
            planted.
        place: This process's rank.
        sleep: Waits for some seconds.

    Raises:
        ConfigError: A fault cannot be planted in this run.
    """

    def __init__(
        self,
        faults: Sequence[AnyFault],
        *,
        step: UpdateStep | None,
        place: JobRank,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        _check(faults, step, place)
        self._sleep = sleep
        self._training_step = step
        self._step = 0
        self._entered = 0
        self._ahead = 0
        self._told: set[int] = set()
        self._all = tuple(faults)
        own = [fault for fault in faults if fault.rank in (None, place.rank)]
        self._own = tuple(own)
        self._leaks = [(fault, Leak(fault)) for fault in own if isinstance(fault, MemoryClimb)]
        self._rate: PlantedRate | None = None
        self._hook: GradientFaults | None = None
        if step is None:
            return
        if any(isinstance(fault, LearningRateJump) for fault in faults):
            self._rate = PlantedRate(step)
        numeric = [fault for fault in faults if isinstance(fault, NumericFault)]
        if numeric:
            self._hook = GradientFaults(
                numeric,
                names=[weight.name for weight in step.optimizer.parameters],
                rank=place.rank,
                loss_scale=lambda: step.loss_scale,
                ahead=lambda: self._ahead,
            )
            step.gradient_hooks.append(self._hook)

    @property
    def summary(self) -> str:
        """What is planted, for a reader of the run's records."""
        kinds = ", ".join(f"{fault.kind} from step {fault.first_step} on" for fault in self._all)
        return f"This is no real run: faults are planted on purpose ({kinds})"

    def wait_for_data(self, step: int) -> None:
        """The data of a call of this optimizer step is there; let it seem late."""
        if step == self._step:
            # Another micro-batch of the same step.
            return
        self._step = step
        if self._training_step is not None:
            self._ahead = step - (self._training_step.optimizer_steps + 1)
        self._tell(step)
        for fault in self._acting(step):
            if isinstance(fault, SlowData):
                self._sleep(fault.seconds)

    def enter_step(self) -> None:
        """The step is about to be called; what is done here counts as its own time."""
        step = self._step
        if step == self._entered:
            return
        self._entered = step
        if self._rate is not None:
            jumps = [f.factor for f in self._acting(step) if isinstance(f, LearningRateJump)]
            self._rate.hold(math.prod(jumps))
        for climb, leak in self._leaks:
            if climb.acts(step):
                leak.grow()
        for fault in self._acting(step):
            if isinstance(fault, (SlowRank, Hang)):
                self._sleep(fault.seconds)

    def reading(self, reading: DeviceReading) -> DeviceReading:
        """Return what the device says about the step in progress."""
        for fault in self._acting(self._step):
            if isinstance(fault, StuckUtilization):
                reading = replace(reading, device_utilization=fault.value)
        for _, leak in self._leaks:
            reading = leak.reading(reading)
        return reading

    def remove(self) -> None:
        """Leave the training step as it was; harmless when called twice."""
        if self._training_step is not None and self._hook in self._training_step.gradient_hooks:
            self._training_step.gradient_hooks.remove(self._hook)
        if self._rate is not None:
            self._rate.hold(1.0)
        self._leaks.clear()

    def _acting(self, step: int) -> list[AnyFault]:
        return [fault for fault in self._own if fault.acts(step)]

    def _tell(self, step: int) -> None:
        for fault in self._acting(step):
            if id(fault) not in self._told:
                self._told.add(id(fault))
                _LOGGER.warning("step %d: planted %s begins", step, fault.kind)


def _check(faults: Sequence[AnyFault], step: UpdateStep | None, place: JobRank) -> None:
    """Refuse what this run cannot have."""
    for fault in faults:
        if fault.rank is not None and fault.rank >= place.size:
            raise ConfigError(
                f"rank of a planted {fault.kind} must be below the number of ranks = "
                f"{place.size}, but got {fault.rank}."
            )
        if isinstance(fault, _IN_THE_STEP) and step is None:
            raise ConfigError(
                f"a planted {fault.kind} acts inside mindtune's training step, but this run has "
                "another; wrap the network in mindtune.controller.TrainStep."
            )
        sharded = step is not None and step.layout.model_parallel > 1
        if isinstance(fault, NumericFault) and fault.rank is not None and sharded:
            raise ConfigError(
                f"a planted {fault.kind} must act on all ranks under model_parallel, where ranks "
                f"share their weights, but got rank = {fault.rank}; leave the rank out."
            )
