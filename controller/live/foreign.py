"""Training steps that are not ours: their outputs are read, what can be reached is turned.

How the outputs are read stands in `foreign_outputs`. Three things of such a step act on a knob
besides us, and are dealt with here:

- MindFormers' step reports the rate of a *copy* that it made of the optimizer's schedule: the copy
  is scaled by the same Parameter, so that the log shows the rate that acts.
- A step whose manager moves the loss scale by its own rule goes on doing so inside its graph. Once
  a policy owns the scale, what the rule wrote is taken back right after the call, so that there is
  one writer: an isolated overflow halves nothing, and a growth is not made twice.
- There is neither a skip threshold nor a state to go back to: those knobs are not reachable, and
  `RunFacts.can_rewind` is false, so that policies advise or stop instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from typing_extensions import assert_never

from mindtune.controller.errors import ConfigError
from mindtune.controller.live.actuators import Actuators
from mindtune.controller.live.foreign_outputs import (
    StepConventions,
    conventions_of,
    decode,
    find_scale_sense,
    number,
)
from mindtune.controller.live.learning_rate import LearningRate, has_learning_rate
from mindtune.controller.live.sensors import StepSignals
from mindtune.controller.live.step_adapter import (
    DEVICES,
    optimizer_family,
    optimizer_updates,
)
from mindtune.controller.live.timing import StepTimer
from mindtune.policies.decisions import (
    KNOBS,
    SetBatchSize,
    SetClipNorm,
    SetCompressionRatio,
    SetLearningRateScale,
    SetLossScale,
    SetMicroBatch,
    SetPoint,
    SetSkipThreshold,
)
from mindtune.policies.facts import RunFacts

__all__ = ["ForeignActuators", "ForeignStep"]

_COPIES: Final = ("learning_rate", "default_lr", "grouped_lr")
"""Attributes in which MindFormers' steps keep schedules for their report."""


class ForeignActuators:
    """Turns what can be reached of a step that is not ours: learning rate and loss scale.

    Both are written by `ops.assign` only: after `set_data` a compiled branch would go on with the
    old value.

    Args:
        train_network: The step.
        optimizer: Its optimizer; None if it could not be found.
        acts: Whether anything will be turned. If so, a schedule is wrapped at once, before the
            graph is compiled; if not, nothing is touched.
    """

    def __init__(self, train_network: Any, optimizer: Any, *, acts: bool) -> None:
        self._scale_sense = find_scale_sense(train_network)
        self._has_rate = optimizer is not None and has_learning_rate(optimizer)
        self._rate: LearningRate | None = None
        self._reports_rate = False
        if acts and self._has_rate:
            self._rate = LearningRate(optimizer, reports=True)
            self._reports_rate = _follow(train_network, optimizer, self._rate)
        self._previous = self._current = 1.0
        self._owns_loss_scale = False
        self._values: dict[str, float] = {}

    @property
    def reachable(self) -> frozenset[str]:
        """At most the learning-rate scale and the loss scale."""
        names = set()
        if self._has_rate:
            names.add(SetLearningRateScale.knob)
        if self._scale_sense is not None:
            names.add(SetLossScale.knob)
        return frozenset(names)

    @property
    def unreachable(self) -> tuple[str, ...]:
        """The knobs that only our own step has, sorted."""
        return tuple(sorted(set(KNOBS) - self.reachable))

    def learn_batch(self, micro_batch_size: int) -> None:
        """Changes nothing: the batch of such a step is what the dataset gives."""
        del micro_batch_size

    def take_over(self, knobs: frozenset[str]) -> None:
        """From now on the step's own rule does not move a loss scale that a policy owns."""
        self._owns_loss_scale = SetLossScale.knob in knobs

    def apply(self, action: SetPoint) -> None:
        """Set a knob for the next step.

        Raises:
            ConfigError: The step has no such knob.
        """
        match action:
            case SetLearningRateScale(value) if self._rate is not None:
                self._rate.set_scale(value)
                self._previous, self._current = self._current, float(value)
            case SetLossScale(value) if self._scale_sense is not None:
                _assign(self._scale_sense, value)
            case (
                SetLearningRateScale()
                | SetLossScale()
                | SetBatchSize()
                | SetMicroBatch()
                | SetClipNorm()
                | SetSkipThreshold()
                | SetCompressionRatio()
            ):
                raise ConfigError(
                    f"{action.knob} cannot be set to {action.value} on this training step; wrap "
                    "the network in mindtune.controller.TrainStep."
                )
            case _:
                assert_never(action)
        self._values[action.knob] = float(action.value)

    def values(self) -> dict[str, float]:
        """Return what was set."""
        return dict(self._values)

    def restore(self, values: Mapping[str, float]) -> None:
        """Set the learning-rate scale again; the loss scale comes with the checkpoint."""
        name = SetLearningRateScale.knob
        if name in values and self._rate is not None:
            self.apply(SetLearningRateScale(values[name]))

    def keep_loss_scale(self, acted: float | None) -> None:
        """Take back what the step's own rule made of the loss scale, if a policy owns it."""
        if acted is None or not self._owns_loss_scale or self._scale_sense is None:
            return
        if number(self._scale_sense) != acted:
            _assign(self._scale_sense, acted)

    def acted_rate_scale(self, learning_rate: float | None) -> float | None:
        """Return the factor over the schedule that acted in a step; None where it does not show.

        A schedule leaves it in a Parameter, from inside the graph. A plain rate must be one of
        those that were set here: else somebody else wrote it.

        Args:
            learning_rate: The rate that the step reported.
        """
        rate = self._rate
        if rate is None:
            return None
        if rate.acted is not None:
            return number(rate.acted)
        if learning_rate is None or not self._reports_rate or not rate.bases:
            return None
        base = number(rate.bases[0]) or 0.0
        for scale in (self._current, self._previous):
            if math.isclose(learning_rate, base * scale, rel_tol=1e-5):
                return scale
        return None


class ForeignStep:
    """A training step that is not ours, as the session sees it.

    Args:
        train_network: The step.
        optimizer: Its optimizer; None if it could not be found.
        acts: Whether anything will be turned.
        data_parallel: Ranks with different samples; None: unknown.
        job_size: Ranks of the job.
        has_loss: Whether what it returns as its loss is one: in a pipeline another stage has it.
    """

    ranks_agree = False
    snapshots: None = None

    def __init__(
        self,
        train_network: Any,
        optimizer: Any,
        *,
        acts: bool,
        data_parallel: int | None,
        job_size: int,
        has_loss: bool = True,
    ) -> None:
        self._has_loss = has_loss
        self.name = type(train_network).__name__
        self.data_parallel = data_parallel
        self._job_size = job_size
        self._optimizer = optimizer
        self._conventions: StepConventions = conventions_of(train_network)
        self._scale_sense = find_scale_sense(train_network)
        self._scale_before: float | None = None
        self._manager = getattr(train_network, "loss_scaling_manager", None)
        self._hands = ForeignActuators(train_network, optimizer, acts=acts)
        self.actuators: Actuators = self._hands
        self.unreachable = self._hands.unreachable

    def graph_key(self) -> str:
        """One graph per batch shape."""
        return "step"

    def begin_call(self) -> None:
        """Remember the loss scale that is about to act."""
        self._scale_before = number(self._scale_sense)

    def take(self, outputs: Any) -> StepSignals:
        """Return what the step returned."""
        returned = decode(outputs, conventions=self._conventions)
        acted = self._acted_scale(returned.loss_scale)
        self._hands.keep_loss_scale(acted)
        return replace(
            returned,
            loss=returned.loss if self._has_loss else None,
            loss_scale=acted,
            learning_rate_scale=self._hands.acted_rate_scale(returned.learning_rate),
        )

    def send_host_signals(self, row: Sequence[float]) -> None:
        """Changes nothing: such a step brings nothing to other ranks."""
        del row

    def watch_own_time(self, timer: StepTimer | None) -> None:
        """Changes nothing: such a step does not tell when its gradients are there."""
        del timer

    def facts(
        self, *, micro_batch_size: int | None, max_num_microbatches: int | None, device: str
    ) -> RunFacts:
        """Return what can be seen from outside."""
        return RunFacts(
            reachable=self.actuators.reachable,
            data_parallel=self.data_parallel or 1,
            num_ranks=self._job_size,
            micro_batch_size=micro_batch_size,
            optimizer_family=optimizer_family(self._optimizer),
            loss_scale_dynamic=self._scales_dynamically(),
            max_num_microbatches=max_num_microbatches,
            device=DEVICES.get(device, device.lower()),
        )

    def updates(self) -> int | None:
        """Return the optimizer's own count."""
        return optimizer_updates(self._optimizer)

    def effective(self, *, micro_batch_size: int | None) -> dict[str, Any]:
        """Return the only knob that shows from outside."""
        return {} if micro_batch_size is None else {"micro_batch_size": micro_batch_size}

    def _scales_dynamically(self) -> bool:
        fixed = isinstance(self._manager, nn.FixedLossScaleUpdateCell)
        return self._scale_sense is not None and self._manager is not None and not fixed

    def _acted_scale(self, returned: float | None) -> float | None:
        """Return the loss scale that acted: what the Parameter held, if the outputs agree.

        They hold the scale after the step's own rule, so they agree where that leads from the one
        to the other. If it does not, another value than the Parameter's was at work.
        """
        before = self._scale_before
        if returned is None or before is None:
            return returned
        factor = number(getattr(self._manager, "scale_factor", None))
        if self._manager is not None and factor is None:
            return before
        steps = (1.0, factor or 1.0, 1 / (factor or 1.0))
        follows = (max(before * step, 1.0) if step < 1 else before * step for step in steps)
        agree = any(math.isclose(returned, value, rel_tol=1e-5) for value in follows)
        return before if agree else returned


def _follow(train_network: Any, optimizer: Any, rate: LearningRate) -> bool:
    """Let a step's own copies of the schedule follow the scale; tell whether a plain rate does.

    The copies are put in by name, without the prefix that would rename Parameters in checkpoints.
    """
    shares = False
    for name in _COPIES:
        copy = getattr(train_network, name, None)
        if isinstance(copy, nn.CellList):
            scaled = nn.CellList([rate.wrap(cell) for cell in copy], auto_prefix=False)
        elif isinstance(copy, nn.Cell):
            scaled = rate.wrap(copy)
        else:
            if isinstance(copy, Parameter) and isinstance(optimizer.learning_rate, Parameter):
                delattr(train_network, name)
                train_network.insert_param_to_cell(name, optimizer.learning_rate)
                shares = True
            continue
        if scaled is not copy:
            delattr(train_network, name)
            train_network.insert_child_to_cell(name, scaled)
    return shares


def _assign(parameter: Parameter, value: float) -> None:
    ops.assign(parameter, Tensor(np.full(parameter.shape, value), parameter.dtype))
