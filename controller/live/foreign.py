"""Training steps that are not ours: what their outputs mean and which knobs can be reached.

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
scale, and None for a norm, that it does not have.

The scale in these outputs may already be the one of the next step, lowered by an overflow: where
the step has its Parameter `scale_sense`, the scale that acted is the one it held before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, ops
from typing_extensions import assert_never

from mindtune.controller.errors import ConfigError
from mindtune.controller.live.actuators import Actuators
from mindtune.controller.live.learning_rate import LearningRate
from mindtune.controller.live.sensors import StepSignals
from mindtune.controller.live.step_adapter import (
    DEVICES,
    optimizer_family,
    optimizer_updates,
)
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

__all__ = ["ForeignActuators", "ForeignStep", "decode", "find_scale_sense"]

_WITH_SCALE = (3, 4, 5, 7)


def decode(outputs: Any, *, scale_before: float | None = None) -> StepSignals:
    """Return the signals in what a training step returned.

    Args:
        outputs: `cb_params.net_outputs`.
        scale_before: Loss scale that the step's Parameter held before the call.
    """
    if not isinstance(outputs, (tuple, list)):
        return StepSignals(loss=_mean(outputs))
    if not outputs:
        return StepSignals()
    if len(outputs) not in _WITH_SCALE:
        return StepSignals(loss=_mean(outputs[0]))
    loss, overflow, scale, *more = outputs
    overflowed = None if overflow is None else float(np.any(_array(overflow) != 0))
    rate = more[0] if more else None
    norm = more[1] if len(more) > 1 else None
    return StepSignals(
        loss=_mean(loss),
        overflow=overflowed,
        # These steps skip the update on an overflow, and for nothing else.
        update_skipped=overflowed,
        loss_scale=scale_before if scale_before is not None else _mean(scale),
        learning_rate=_first(rate),
        grad_norm=_mean(norm),
    )


def find_scale_sense(train_network: Any) -> Parameter | None:
    """Return the Parameter in which a step keeps its loss scale; None if it has none."""
    found = getattr(train_network, "scale_sense", None)
    return found if isinstance(found, Parameter) else None


class ForeignActuators:
    """Turns what can be reached of a step that is not ours: learning rate and loss scale.

    Both are written by `ops.assign` only: after `set_data` a compiled branch would go on with the
    old value. The step does not say what acted, so obedience cannot be checked.

    Args:
        train_network: The step.
        optimizer: Its optimizer; None if it could not be found.
        acts: Whether anything will be turned. If so, a schedule is wrapped at once, before the
            graph is compiled; if not, nothing is touched.
    """

    def __init__(self, train_network: Any, optimizer: Any, *, acts: bool) -> None:
        self._scale_sense = find_scale_sense(train_network)
        self._has_rate = optimizer is not None
        self._rate = LearningRate(optimizer) if acts and optimizer is not None else None
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
        """Changes nothing: the step's own rule for the loss scale cannot be switched off."""
        del knobs

    def apply(self, action: SetPoint) -> None:
        """Set a knob for the next step.

        Raises:
            ConfigError: The step has no such knob.
        """
        match action:
            case SetLearningRateScale(value) if self._rate is not None:
                self._rate.set_scale(value)
            case SetLossScale(value) if self._scale_sense is not None:
                parameter = self._scale_sense
                ops.assign(parameter, Tensor(np.full(parameter.shape, value), parameter.dtype))
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


class ForeignStep:
    """A training step that is not ours: what it returns is read, what can be reached is turned.

    Args:
        train_network: The step.
        optimizer: Its optimizer; None if it could not be found.
        acts: Whether anything will be turned.
        data_parallel: Ranks with different samples; None: unknown.
        job_size: Ranks of the job.
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
    ) -> None:
        self.name = type(train_network).__name__
        self.data_parallel = data_parallel
        self._job_size = job_size
        self._optimizer = optimizer
        self._scale_sense = find_scale_sense(train_network)
        self._scale_before: float | None = None
        self._manages_scale = getattr(train_network, "loss_scaling_manager", None) is not None
        foreign = ForeignActuators(train_network, optimizer, acts=acts)
        self.actuators: Actuators = foreign
        self.unreachable = foreign.unreachable

    def graph_key(self) -> str:
        """One graph per batch shape."""
        return "step"

    def begin_call(self) -> None:
        """Remember the loss scale that is about to act."""
        self._scale_before = _mean(self._scale_sense)

    def take(self, outputs: Any) -> StepSignals:
        """Return what the step returned."""
        return decode(outputs, scale_before=self._scale_before)

    def send_host_signals(self, row: Sequence[float]) -> None:
        """Changes nothing: such a step brings nothing to other ranks."""
        del row

    def watch_own_time(self, gradients_ready: Callable[[], None] | None) -> None:
        """Changes nothing: such a step does not tell when its gradients are there."""
        del gradients_ready

    def facts(
        self, *, micro_batch_size: int | None, max_num_microbatches: int | None, device: str
    ) -> RunFacts:
        """Return what can be seen from outside."""
        dynamic = self._manages_scale if self._scale_sense is not None else False
        return RunFacts(
            reachable=self.actuators.reachable,
            data_parallel=self.data_parallel or 1,
            num_ranks=self._job_size,
            micro_batch_size=micro_batch_size,
            optimizer_family=optimizer_family(self._optimizer),
            loss_scale_dynamic=dynamic,
            max_num_microbatches=max_num_microbatches,
            device=DEVICES.get(device, device.lower()),
        )

    def updates(self) -> int | None:
        """Return the optimizer's own count."""
        return optimizer_updates(self._optimizer)

    def effective(self, *, micro_batch_size: int | None) -> dict[str, Any]:
        """Return the only knob that shows from outside."""
        return {} if micro_batch_size is None else {"micro_batch_size": micro_batch_size}


def _array(value: Any) -> Any:
    return value.asnumpy() if isinstance(value, Tensor) else np.asarray(value)


def _mean(value: Any) -> float | None:
    """The mean of a number, array or Tensor; of a tuple, of its first (a total loss)."""
    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    # False stands for "no loss scale".
    if value is None or value is False:
        return None
    return float(np.mean(_array(value).astype(np.float64)))


def _first(value: Any) -> float | None:
    """The first entry: the rate of the first group."""
    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    if value is None or value is False:
        return None
    return float(_array(value).reshape(-1)[0])
