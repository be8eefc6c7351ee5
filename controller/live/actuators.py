"""Hands that turn the knobs of a training step."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Protocol

from typing_extensions import assert_never

from mindtune.controller.errors import ConfigError
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

__all__ = ["Actuators", "UpdateStepActuators", "UpdateStepLike"]


_LOGGER = logging.getLogger(__name__)
_COUNT = "num_microbatches"
_SPLIT = "micro_batch_split"


class Actuators(Protocol):
    """Turns knobs; whether they obeyed stands in the next step's observation."""

    @property
    def reachable(self) -> frozenset[str]:
        """Knobs that can be turned, by the names of `decisions.KNOBS`."""

    def learn_batch(self, micro_batch_size: int) -> None:
        """Take in the samples per rank and micro-batch, once the first batch is there."""

    def take_over(self, knobs: frozenset[str]) -> None:
        """Put to rest what manages these knobs otherwise: policies will."""

    def apply(self, action: SetPoint) -> None:
        """Set a knob for the next optimizer step.

        Raises:
            ConfigError: The value cannot be set.
        """

    def values(self) -> dict[str, float]:
        """Return what has been set, for a resume."""

    def restore(self, values: Mapping[str, float]) -> None:
        """Set what `values` returned; what cannot be set any more is left out."""


class UpdateStepLike(Protocol):
    """What is needed of `UpdateStep`; named here so that this module loads no framework."""

    loss_scale_managed_by_policy: bool

    @property
    def next_loss_scale(self) -> float:
        """The loss scale that the next optimizer step will use."""

    def set_learning_rate_scale(self, scale: float) -> None:
        """Set the factor over the schedule."""

    def set_loss_scale(self, scale: float) -> None:
        """Set the loss scale."""

    @property
    def micro_batch_rows(self) -> int | None:
        """Samples of the newest micro-batch as it came in; None where it cannot be split."""

    def set_num_microbatches(self, count: int) -> None:
        """Set the micro-batches per optimizer step."""

    def set_micro_batch_split(self, parts: int) -> None:
        """Set the parts in which every micro-batch is run."""

    def set_clip_norm(self, norm: float | None) -> None:
        """Set the bound of the gradient norm."""

    def set_skip_threshold(self, norm: float | None) -> None:
        """Set the norm above which an update is skipped."""

    def set_compression_ratio(self, ratio: float) -> None:
        """Set the share of gradient entries that is exchanged."""


class UpdateStepActuators:
    """Turns the knobs of our own training step; it reports every value that acted.

    Args:
        step: The step.
        data_parallel: Ranks with different samples.
        loss_scale_dynamic: Whether the step moves its loss scale by itself; None: it has none.
        compresses_top_k: Whether it exchanges a share of the gradient entries.
    """

    def __init__(
        self,
        step: UpdateStepLike,
        *,
        data_parallel: int,
        loss_scale_dynamic: bool | None,
        compresses_top_k: bool,
    ) -> None:
        self._values: dict[str, float] = {}
        self._step = step
        self._data_parallel = data_parallel
        self._loss_scale_dynamic = loss_scale_dynamic
        self._compresses_top_k = compresses_top_k
        self._micro_batch_size: int | None = None

    @property
    def reachable(self) -> frozenset[str]:
        """All knobs that the step was built for and the batches seen so far allow."""
        names = {"learning_rate_scale", "clip_norm", "skip_threshold"}
        if self._loss_scale_dynamic is not None:
            names.add("loss_scale")
        if self._compresses_top_k:
            names.add("compression_ratio")
        if self._micro_batch_size is not None:
            names.add("global_batch_size")
        if self._step.micro_batch_rows is not None:
            names.add("micro_batch_size")
        return frozenset(names)

    def learn_batch(self, micro_batch_size: int) -> None:
        """From now on the batch size can be turned, in multiples of `micro_batch_size`."""
        self._micro_batch_size = micro_batch_size
        parts = round(self._values.get(_SPLIT, 1))
        if micro_batch_size % parts:
            _LOGGER.warning(
                "%s of the saved run is left out: %d parts do not divide a micro-batch of %d",
                _SPLIT,
                parts,
                micro_batch_size,
            )
            del self._values[_SPLIT]
            self._step.set_micro_batch_split(1)

    def take_over(self, knobs: frozenset[str]) -> None:
        """Let the step's own loss-scale rule rest where a policy manages the scale.

        A skip threshold that a policy has set, and that none moves any more, is opened: left where
        it is, it would skip every update once the norms have grown past it.
        """
        self._step.loss_scale_managed_by_policy = SetLossScale.knob in knobs
        if SetSkipThreshold.knob not in knobs and SetSkipThreshold.knob in self._values:
            self._step.set_skip_threshold(None)
            del self._values[SetSkipThreshold.knob]

    def apply(self, action: SetPoint) -> None:
        """Set a knob; it acts in the next optimizer step that begins.

        Raises:
            ConfigError: The step cannot do that.
        """
        match action:
            case SetLearningRateScale(value):
                self._step.set_learning_rate_scale(value)
            case SetLossScale(value):
                self._step.set_loss_scale(value)
            case SetBatchSize(value):
                count = self._count(value)
                self._step.set_num_microbatches(count)
                self._values[_COUNT] = count
                return
            case SetClipNorm(value):
                self._step.set_clip_norm(value)
            case SetSkipThreshold(value):
                self._step.set_skip_threshold(value)
            case SetCompressionRatio(value):
                self._step.set_compression_ratio(value)
            case SetMicroBatch(value):
                parts = self._parts(value)
                self._step.set_micro_batch_split(parts)
                self._values[_SPLIT] = parts
                return
            case _:
                assert_never(action)
        self._values[action.knob] = float(action.value)

    def values(self) -> dict[str, float]:
        """Return what has been set here, and a loss scale that the step moves by itself."""
        if not self._loss_scale_dynamic:
            return dict(self._values)
        return {**self._values, SetLossScale.knob: self._step.next_loss_scale}

    def restore(self, values: Mapping[str, float]) -> None:
        """Set what a saved run had set; what no policy had set stays as the user has it now."""
        for name, value in values.items():
            if name not in (_COUNT, _SPLIT) and name not in self.reachable:
                _LOGGER.warning("%s of the saved run is left out: this step has none", name)
                continue
            try:
                if name == _COUNT:
                    self._step.set_num_microbatches(int(value))
                    self._values[_COUNT] = value
                elif name == _SPLIT:
                    self._step.set_micro_batch_split(int(value))
                    self._values[_SPLIT] = value
                else:
                    self.apply(KNOBS[name](value))  # type: ignore[arg-type] # of float knobs
            except (ConfigError, OverflowError, ValueError) as error:
                _LOGGER.warning("%s of the saved run is left out: %s", name, error)

    def _parts(self, micro_batch_size: int) -> int:
        rows = self._step.micro_batch_rows
        if rows is None:
            raise ConfigError(
                f"micro_batch_size cannot be set to {micro_batch_size}: no micro-batch was seen "
                "whose inputs are Tensors of one common first axis, along which it could be split."
            )
        if micro_batch_size < 1 or rows % micro_batch_size:
            sizes = ", ".join(str(size) for size in range(1, rows + 1) if rows % size == 0)
            raise ConfigError(
                f"micro_batch_size must divide the {rows} samples of the dataset's micro-batch, "
                f"but got {micro_batch_size}; use one of {sizes}."
            )
        return rows // micro_batch_size

    def _count(self, global_batch_size: int) -> int:
        if self._micro_batch_size is None:
            raise ConfigError(
                f"global_batch_size cannot be set to {global_batch_size} before the first batch, "
                "whose size is its unit."
            )
        unit = self._data_parallel * self._micro_batch_size
        count = math.floor(global_batch_size / unit)
        if count < 1 or count * unit != global_batch_size:
            raise ConfigError(
                "global_batch_size must be a multiple of data_parallel * micro_batch_size = "
                f"{unit}, but got {global_batch_size}; use {max(1, count) * unit}."
            )
        return count
