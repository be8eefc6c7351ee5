"""Looks inside the model every few optimizer steps.

Theory of operation. In a sampled step, in this order: the model's own function runs on the first
micro-batch, with the weights that the step begins with; the step itself runs in two graphs, so
that the gradients pass this hook, which reduces them and keeps a copy of the weights; after the
update the copy is compared with the weights. What leaves the device is one small vector for the
gradients, one for the weights, and what the function returned. Nothing is written to, so losses
stay bit-identical. On every rank the same steps are sampled: sums over ranks are collectives.

The time of it is taken out of the step's, which detectors compare with that of other steps, and
stands in the record instead. Memory: one float32 copy of this rank's weights, in sampled steps.

After a step with overflow the next one is sampled as well, once per interval: a gradient that is
broken for good then shows in which layer. The backward pass goes from the last layer to the
first, so a fault has its origin in the last layer that is not finite (`broken_gradient`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from mindspore import Tensor
from mindspore import dtype as mstype

from mindtune.controller.contract import ModelSignalRecord
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.controller import LiveController
from mindtune.controller.live.layers import broken_gradient, group_by_layer
from mindtune.controller.live.layout import is_tp_sharded
from mindtune.controller.live.model_cells import (
    NUM_GRADIENT_FIELDS,
    GradientStatistics,
    UpdateStatistics,
    WeightCopy,
)
from mindtune.controller.live.sensors import StepSignals
from mindtune.controller.live.update_step import UpdateStep
from mindtune.controller.records import Recorder
from mindtune.policies.decisions import Advise
from mindtune.policies.findings import Finding, FindingKind, Severity

__all__ = ["ModelFunction", "ModelSignals", "Sample"]

ModelFunction = Callable[..., Mapping[str, Any]]
"""Takes a batch as the network does; returns named arrays. Every rank calls it at the same steps.

Known names are `attention_entropy` (blocks x heads), `token_confidence` (a number) and
`layer_losses` (one per block); others are recorded under `arrays`. It must not draw random
numbers, which would change those of the training."""

_MAX_ENTRIES: Final = 65536
_DIMENSIONS: Final = {"attention_entropy": 2, "token_confidence": 0, "layer_losses": 1}
_STUBBORN: Final = 8
"""Overflows in a row that a search of the loss scale does not explain: from 2^24 with halving it
takes 4 to 12 (README, float16)."""
_REMEDY: Final = (
    "give TuneCallback or tune_loop a function, model_signals=fn, that takes a batch and returns "
    "{'attention_entropy': array of blocks x heads}, as experiments/gpt/model_signals.py does"
)


@dataclass(kw_only=True)
class Sample:
    """A sampled step."""

    record: ModelSignalRecord
    advice: dict[str, str] = field(default_factory=dict)
    """Id -> what to tell the user, once."""
    finding: Finding | None = None


class _GradientSampler:
    """The cells around one training step."""

    def __init__(self, step: UpdateStep) -> None:
        weights = tuple(step.optimizer.parameters)
        groups = group_by_layer(weight.name for weight in weights)
        indices = tuple(groups.values())
        self.layers = list(groups)
        self._sizes = _layer_sizes(weights, indices, step.layout.model_parallel)
        self._gradients = GradientStatistics(weights, indices, step.update.loss_scale, step.layout)
        self._copy = WeightCopy(weights)
        self._updates = UpdateStatistics(weights, indices, step.layout)
        self._before: Any = None

    def before_update(self, count: int, gradients: tuple[Any, ...]) -> dict[str, Any]:
        """Reduce the gradients and keep the weights."""
        fields = self._gradients(Tensor(count, mstype.float32), *gradients).asnumpy()
        self._before = self._copy()
        fields = fields.reshape(len(self.layers), NUM_GRADIENT_FIELDS)
        from_edge_up = fields[:, 3:]
        below = self._sizes - fields[:, 1] - fields[:, 2] - from_edge_up[:, 0]
        between = from_edge_up[:, :-1] - from_edge_up[:, 1:]
        counts = np.column_stack([below, between, from_edge_up[:, -1]])
        return {
            "layers": self.layers,
            "gradient_norms": np.sqrt(fields[:, 0]).tolist(),
            "gradient_counts": np.maximum(counts, 0).round().astype(int).tolist(),
            "gradient_zeros": np.maximum(fields[:, 2], 0).round().astype(int).tolist(),
            "gradient_non_finite": fields[:, 1].round().astype(int).tolist(),
        }

    def after_update(self) -> dict[str, Any]:
        """Compare the weights with those kept."""
        fields = self._updates(self._before).asnumpy()
        self._before = None
        changes, sizes = np.sqrt(fields[:, 0]), np.sqrt(fields[:, 1])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(changes == 0, 0.0, changes / sizes)
        return {
            "weight_norms": sizes.tolist(),
            "update_ratios": ratios.tolist(),
            "update_norm": math.sqrt(float(np.sum(fields[:, 0], dtype=np.float64))),
        }


class ModelSignals:
    """Samples every `every`-th step; a `GradientHook` where the step is ours.

    Args:
        every: Optimizer steps from sample to sample, at least 1.
        step: Our training step; None: somebody else's, of which only `function` is sampled.
        function: The model's own function; None: the model gives nothing.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        *,
        every: int,
        step: UpdateStep | None,
        function: ModelFunction | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._step = step
        self._function = function
        self._clock = clock
        self._gradients: _GradientSampler | None = None
        self._exclude: Callable[[float], None] = lambda _seconds: None
        self._offset = 0
        self._extra: int | None = None
        self._extra_used = 0
        self._overflows = 0
        self._all_zero = 0
        self._given: dict[str, Any] | None = None
        self._found: dict[str, Any] | None = None
        self._spent_s = 0.0

    def begin(self, *, step: int, exclude: Callable[[float], None]) -> None:
        """Training begins after `step` optimizer steps.

        Args:
            step: Optimizer steps attempted by all segments of the run so far.
            exclude: Takes seconds out of the step in progress.
        """
        self._exclude = exclude
        if self._step is not None:
            self._offset = step - self._step.optimizer_steps
            if self not in self._step.gradient_hooks:
                self._step.gradient_hooks.append(self)

    def end(self) -> None:
        """Training is over: leave the step as it was."""
        if self._step is not None and self in self._step.gradient_hooks:
            self._step.gradient_hooks.remove(self)

    def samples(self, step: int) -> bool:
        """Tell whether a step (counted over the whole run, from 1) is sampled."""
        return step % self._every == 0 or step == self._extra

    def wants(self, optimizer_step: int) -> bool:
        """Tell whether a step's gradients are looked at."""
        return self.samples(optimizer_step + self._offset)

    def begin_call(self, step: int, batch: Any) -> None:
        """The batch of a call for optimizer step `step` is there."""
        if self._function is None or self._given is not None or not self.samples(step):
            return
        begin_s = self._clock()
        arguments = batch if isinstance(batch, (tuple, list)) else (batch,)
        self._given = _plain_values(self._function(*arguments))
        self._spend(begin_s)

    def __call__(
        self, optimizer_step: int, loss: Any, gradients: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Look at the gradients of a step and hand them on."""
        del optimizer_step
        assert self._step is not None, "only our step calls hooks"  # noqa: S101
        # What the step itself computes is waited for here, and is no cost of looking.
        loss.asnumpy()
        begin_s = self._clock()
        if self._gradients is None:
            self._gradients = _GradientSampler(self._step)
        count = self._step.num_microbatches * self._step.micro_batch_split
        self._found = self._gradients.before_update(count, gradients)
        self._spend(begin_s)
        return loss, gradients

    def after_call(self) -> None:
        """A call has returned; if it ended a sampled step, the weights are as the update left."""
        if self._found is not None and self._gradients is not None:
            begin_s = self._clock()
            self._found |= self._gradients.after_update()
            self._spend(begin_s)

    def complete(
        self,
        step: int,
        signals: StepSignals,
        controller: LiveController,
        recorder: Recorder | None,
    ) -> StepSignals:
        """Write down what was sampled in a step that is complete, and say what is wrong in it.

        Returns:
            The step's signals, with the length of the update where it was sampled.
        """
        sample = self.take(step, signals, run=0 if recorder is None else recorder.run)
        if sample is None:
            return signals
        if recorder is not None:
            recorder.model_signals(sample.record)
        for name, message in sample.advice.items():
            controller.advise(step, Advise(name, message), source="sensors")
        if sample.finding is not None:
            controller.report_once(sample.finding)
        return replace(signals, update_norm=sample.record.update_norm)

    def take(self, step: int, signals: StepSignals, *, run: int) -> Sample | None:
        """Return what was sampled in a step that is complete; None where nothing was.

        Args:
            step: Optimizer steps attempted, this one included.
            signals: What the step reported.
            run: Segment of the run.
        """
        overflow = bool(signals.overflow)
        self._overflows = self._overflows + 1 if overflow else 0
        given, found, spent_s = self._given, self._found, self._spent_s
        self._given, self._found, self._spent_s = None, None, 0.0
        self._plan_extra(step, overflow=overflow)
        if given is None and found is None:
            return None
        skipped = None if signals.update_skipped is None else bool(signals.update_skipped)
        record = ModelSignalRecord(
            step=step,
            run=run,
            update_skipped=skipped,
            sample_time_s=spent_s,
            **(found or {}),
            **(given or {}),
        )
        sample = Sample(record=record)
        self._advise(sample)
        sample.finding = self._untrained(record)
        return sample

    def _spend(self, begin_s: float) -> None:
        seconds = self._clock() - begin_s
        self._spent_s += seconds
        self._exclude(seconds)

    def _plan_extra(self, step: int, *, overflow: bool) -> None:
        """Look again in the next step after an overflow, once per interval."""
        interval = step // self._every
        if overflow and self._extra_used != interval + 1:
            self._extra, self._extra_used = step + 1, interval + 1

    def _advise(self, sample: Sample) -> None:
        record = sample.record
        if self._step is None:
            sample.advice["gradient_signals_unreachable"] = (
                "gradient norms and update ratios per layer need mindtune.controller.TrainStep; "
                "on this step only what the model's function returns is sampled"
            )
        if record.attention_entropy is None:
            given = "no function is given" if self._function is None else "the function gives none"
            sample.advice["attention_entropy_missing"] = (
                f"attention entropy is not sampled, since {given}: {_REMEDY}"
            )
        # While a loss scale is searched, single overflows are its way of searching.
        rule = None if self._step is None else self._step.loss_scale_rule
        searched = rule is not None and rule.dynamic
        explained = searched and self._overflows < _STUBBORN
        told = broken_gradient(record.layers, record.gradient_non_finite or ())
        if told is not None and not explained:
            layer, message = told
            sample.advice[f"broken_gradient:{layer}"] = f"at step {record.step} {message}"

    def _untrained(self, record: ModelSignalRecord) -> Finding | None:
        """Say that no gradient is there at all, once two samples in a row show it."""
        norms = record.gradient_norms
        if norms is None:
            return None
        self._all_zero = self._all_zero + 1 if not any(norms) else 0
        if self._all_zero == 1:
            # Perhaps a batch of which nothing counts: look again.
            self._extra = record.step + 1
        if self._all_zero < 2:
            return None
        return Finding(
            step=record.step,
            last_step=record.step,
            kind=FindingKind.NO_TRAINABLE_PARAMETERS,
            severity=Severity.CRITICAL,
            message=f"all gradients are exactly 0 at step {record.step} and in the sample before: "
            "the loss does not depend on any weight that the optimizer holds; look for "
            "stop_gradient, weights that were frozen, or a loss that is a constant",
            evidence={"layers": len(norms)},
        )


def _layer_sizes(
    weights: tuple[Any, ...], groups: tuple[tuple[int, ...], ...], shards: int
) -> npt.NDArray[np.float64]:
    """Entries of each layer, the shards of all ranks counted."""
    sizes = [int(weight.size) * (shards if is_tp_sharded(weight) else 1) for weight in weights]
    return np.array([sum(sizes[index] for index in group) for group in groups], np.float64)


def _plain_values(returned: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model's function gave as the fields of a record.

    Raises:
        ConfigError: An array is too large to be a signal, or has the wrong dimensions.
    """
    values: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, value in returned.items():
        array = value.asnumpy() if isinstance(value, Tensor) else np.asarray(value)
        wanted = _DIMENSIONS.get(name)
        if array.size > _MAX_ENTRIES or array.ndim > 2:
            raise ConfigError(
                f"{name} of model_signals must have at most 2 dimensions and {_MAX_ENTRIES} "
                f"entries, but got shape {array.shape}; reduce it on the device, inside the "
                "function."
            )
        if wanted is not None and array.ndim != wanted:
            array = _reshaped(name, array, wanted)
        (arrays if wanted is None else values)[name] = array.astype(np.float64).tolist()
    if arrays:
        values["arrays"] = arrays
    return values


def _reshaped(name: str, array: npt.NDArray[Any], dimensions: int) -> npt.NDArray[Any]:
    if dimensions == 0 and array.size == 1:
        return array.reshape(())
    raise ConfigError(
        f"{name} of model_signals must have {dimensions} dimensions, but got shape {array.shape}."
    )
