"""From gradients to updated weights: the part of a step that all kinds of loop share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from mindtune.controller.errors import ConfigError
from mindtune.controller.live.layout import is_tp_sharded
from mindtune.controller.live.learning_rate import LearningRate
from mindtune.controller.live.reduction import RowGather, make_reduction

if TYPE_CHECKING:
    from mindtune.controller.live.compression import Compression
    from mindtune.controller.live.layout import ParallelLayout

__all__ = ["ApplyUpdate"]


class ApplyUpdate(nn.Cell):
    """Reduce, unscale, measure, check and clip gradients, then update the weights or skip.

    Every knob is a Parameter that is read outside the branch around the optimizer, and what was
    read leaves in the packed tensor. With neutral knobs all factors are exactly 1 and the update
    is bit-identical to calling the optimizer with the gradients.
    """

    def __init__(
        self,
        optimizer: nn.Cell,
        *,
        layout: ParallelLayout,
        compression: Compression,
        num_sharded_parameters: int | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        weights = tuple(optimizer.parameters)
        self._dtypes = tuple(weight.dtype for weight in weights)
        self._sharded = tuple(is_tp_sharded(weight) for weight in weights)
        _check_sharded(self._sharded, layout, num_sharded_parameters)
        self._sums_shards = layout.model_parallel_group is not None
        if self._sums_shards:
            self._shard_sum = ops.AllReduce(ops.ReduceOp.SUM, layout.model_parallel_group)
        self.reduction = make_reduction(layout, compression, weights)
        self._needs_local_norm = self.reduction.needs_local_norm
        self._gather = RowGather(layout)
        self.learning_rate = LearningRate(optimizer)
        self._num_rates = len(self.learning_rate.rates)
        self._top_k = compression.kind == "topk"
        if self._top_k:
            self.residual = self.reduction.codec.residual
            self.compression_ratio = self.reduction.codec.ratio

        self.loss_scale = _knob(1.0, "loss_scale")
        self.clip_norm = _knob(math.inf, "clip_norm")
        self.skip_threshold = _knob(math.inf, "skip_threshold")
        self.skip_non_finite = _knob(1.0, "skip_non_finite")
        self.clean_steps = _knob(0.0, "clean_steps")
        self._one = Tensor(1.0, mstype.float32)
        self._zero = Tensor(0.0, mstype.float32)
        self._not_measured = Tensor(math.nan, mstype.float32)

    def construct(self, loss: Any, count: Any, host_signals: Any, *gradients: Any) -> Any:
        """Act on the sum of the gradients of `count` micro-batches.

        The gradients are arguments of their own: a tuple handed into a graph is a constant of it,
        and every new one a compile.

        Args:
            loss: Sum of their unscaled losses, float32 scalar.
            count: Number of micro-batches, float32 scalar.
            host_signals: This rank's row for the other ranks, float32 of shape
                (NUM_HOST_SIGNALS,).
            gradients: Sum of their gradients, scaled by `loss_scale`, float32.

        Returns:
            (mean loss over micro-batches and ranks, packed signals); see `packed`.
        """
        loss_scale = self.loss_scale.value()
        clip_norm = self.clip_norm.value()
        skip_threshold = self.skip_threshold.value()
        skip_non_finite = self.skip_non_finite.value()
        rate, rate_scale = self.learning_rate()

        inverse = self._one / (loss_scale * count)
        local_norm = self._not_measured
        if self._needs_local_norm:
            local_norm = ops.sqrt(self._sum_of_squares(gradients)) * inverse
        row = ops.concat((ops.stack((loss / count, local_norm)), host_signals))
        rows = self._gather(row)
        mean_loss = ops.mean(rows[:, 0])
        bound = self._one
        if self._needs_local_norm:
            # Non-finite if any rank's gradient is: top-k could leave a NaN behind.
            bound = ops.sqrt(ops.sum(ops.square(rows[:, 1])))

        reduced, factor, residual = self.reduction(gradients, inverse, bound)
        norm = ops.sqrt(self._global_sum_of_squares(reduced)) * factor

        finite = ops.logical_and(ops.isfinite(norm), ops.isfinite(mean_loss))
        finite = ops.logical_and(finite, ops.isfinite(bound))
        overflow = ops.logical_not(finite)
        skipped = ops.logical_or(
            ops.logical_and(overflow, skip_non_finite > 0), norm > skip_threshold
        )
        clip_factor = ops.where(norm > clip_norm, clip_norm / norm, self._one)
        if ops.logical_not(skipped):
            multiplier = factor * clip_factor
            updates: Any = ()
            for index in range(len(self._dtypes)):
                updates += ((reduced[index] * multiplier).astype(self._dtypes[index]),)
            for index in range(self._num_rates):
                ops.assign(
                    self.learning_rate.rates[index], self.learning_rate.bases[index] * rate_scale
                )
            self.optimizer(updates)
            for index in range(self._num_rates):
                ops.assign(self.learning_rate.rates[index], self.learning_rate.bases[index])
            if self._top_k:
                ops.assign(self.residual, residual)

        clean_steps = ops.where(overflow, self._zero, self.clean_steps + self._one)
        ops.assign(self.clean_steps, clean_steps)
        compression_ratio = self._one
        if self._top_k:
            compression_ratio = self.compression_ratio.value()
        packed = ops.stack(
            (
                mean_loss,
                norm,
                overflow.astype(mstype.float32),
                skipped.astype(mstype.float32),
                loss_scale,
                rate,
                rate_scale,
                clip_norm,
                clip_factor,
                skip_threshold,
                skip_non_finite,
                compression_ratio,
                count,
                clean_steps,
            )
        )
        return mean_loss, ops.concat((packed, rows.reshape((-1,))))

    def _sum_of_squares(self, gradients: Any) -> Any:
        total = self._zero
        for gradient in gradients:
            total = total + ops.sum(ops.square(gradient))
        return total

    def _global_sum_of_squares(self, gradients: Any) -> Any:
        """Sum over all weights, where a sharded weight counts every rank's shard."""
        if not self._sums_shards:
            return self._sum_of_squares(gradients)
        replicated = self._zero
        sharded = self._zero
        for index in range(len(self._sharded)):
            square = ops.sum(ops.square(gradients[index]))
            if self._sharded[index]:
                sharded = sharded + square
            else:
                replicated = replicated + square
        return self._shard_sum(sharded) + replicated


def _knob(value: float, name: str) -> Parameter:
    """A scalar that only `ops.assign` writes once training runs."""
    return Parameter(Tensor(value, mstype.float32), name=f"mindtune.{name}", requires_grad=False)


def _check_sharded(
    sharded: tuple[bool, ...], layout: ParallelLayout, expected: int | None
) -> None:
    """Refuse a marking of shards under which the ranks would clip by different norms."""
    found = sum(sharded)
    if expected is not None and found != expected:
        raise ConfigError(
            f"{expected} weights must be marked `tp_sharded = True`, but got {found}; set the "
            "attribute on the Parameter (its name is overwritten inside a CellList)."
        )
    if layout.model_parallel > 1 and not found:
        raise ConfigError(
            f"model_parallel = {layout.model_parallel} needs weights marked `tp_sharded = True`, "
            "but got none; without the mark every rank clips by its own norm."
        )
