"""Compiled cells that reduce gradients and weights to a few numbers per layer.

Each returns one float32 vector, so that a sample costs one copy to the host per cell, however many
weights there are. Sums over shards travel in one AllReduce per cell; every rank must call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from mindtune.controller.contract.model_signals import LOG10_EDGES
from mindtune.controller.live.compression import parse_compression
from mindtune.controller.live.layout import is_tp_sharded
from mindtune.controller.live.reduction import make_reduction

if TYPE_CHECKING:
    from mindtune.controller.live.layout import ParallelLayout

__all__ = ["NUM_GRADIENT_FIELDS", "GradientStatistics", "UpdateStatistics", "WeightCopy"]

NUM_GRADIENT_FIELDS = 3 + len(LOG10_EDGES)
"""Of one layer: sum of squares, non-finite entries, zeros, entries from each edge up."""


class _OverShards(nn.Cell):
    """Adds what the shards of a tensor-parallel group hold; whole weights are counted once.

    A layer's sharded and replicated weights come as two matrices `[layers, fields]`.
    """

    def __init__(self, layout: ParallelLayout) -> None:
        super().__init__(auto_prefix=False)
        self._sums = layout.model_parallel_group is not None
        if self._sums:
            self._all_reduce = ops.AllReduce(ops.ReduceOp.SUM, layout.model_parallel_group)

    def construct(self, sharded: Any, replicated: Any) -> Any:
        """Return the fields of the whole layers."""
        if self._sums:
            return self._all_reduce(sharded) + replicated
        return sharded + replicated


class GradientStatistics(nn.Cell):
    """Norm and histogram of the gradient of each layer.

    Args:
        weights: In the optimizer's order.
        groups: Per layer the indices of its weights.
        loss_scale: What the gradients are scaled by.
        layout: The ranks.
    """

    def __init__(
        self,
        weights: tuple[Parameter, ...],
        groups: Sequence[tuple[int, ...]],
        loss_scale: Parameter,
        layout: ParallelLayout,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.loss_scale = loss_scale
        # The mean gradient is looked at, whatever is compressed on the way to the update.
        self.reduction = make_reduction(layout, parse_compression("none"), weights)
        self._parts = _split_groups(weights, groups)
        self._over_shards = _OverShards(layout)
        self._edges = tuple(10.0**edge for edge in LOG10_EDGES)
        self._one = Tensor(1.0, mstype.float32)
        self._nothing = Tensor([0.0] * NUM_GRADIENT_FIELDS, mstype.float32)

    def construct(self, count: Any, *gradients: Any) -> Any:
        """Return `[layers, NUM_GRADIENT_FIELDS]`.

        Args:
            count: Micro-batches that were summed, float32 scalar.
            gradients: Their scaled sums on this rank, float32.
        """
        inverse = self._one / (self.loss_scale.value() * count)
        reduced, factor, _ = self.reduction(gradients, inverse, self._one)
        sharded: Any = ()
        replicated: Any = ()
        for mine, whole in self._parts:
            sharded += (self._fields(reduced, mine, factor),)
            replicated += (self._fields(reduced, whole, factor),)
        return self._over_shards(ops.stack(sharded), ops.stack(replicated))

    def _fields(self, gradients: Any, indices: Any, factor: Any) -> Any:
        if len(indices) == 0:
            return self._nothing
        pieces: Any = ()
        for index in indices:
            pieces += (gradients[index].reshape((-1,)),)
        flat = ops.concat(pieces) if len(pieces) > 1 else pieces[0]
        finite = ops.isfinite(flat)
        size = ops.where(finite, flat.abs(), ops.zeros_like(flat))
        non_finite = ops.sum(ops.logical_not(finite).astype(mstype.float32))
        zeros = ops.sum((size == 0).astype(mstype.float32)) - non_finite
        fields: Any = (ops.sum(ops.square(flat)) * ops.square(factor), non_finite, zeros)
        for edge in self._edges:
            # The bound is scaled, one number, instead of the gradient.
            fields += (ops.sum((size >= edge / factor).astype(mstype.float32)),)
        return ops.stack(fields)


class WeightCopy(nn.Cell):
    """All weights as one vector, a copy that the update does not touch."""

    def __init__(self, weights: tuple[Parameter, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.weights = ParameterTuple(weights)
        # Of a single weight the concatenation alone would be the weight itself.
        self._end = Tensor([0.0], mstype.float32)

    def construct(self) -> Any:
        """Return float32 `[entries + 1]`."""
        pieces: Any = ()
        for weight in self.weights:
            pieces += (weight.value().astype(mstype.float32).reshape((-1,)),)
        return ops.concat((*pieces, self._end))


class UpdateStatistics(nn.Cell):
    """How far the weights of each layer moved.

    Args:
        weights: In the optimizer's order.
        groups: Per layer the indices of its weights.
        layout: The ranks.
    """

    def __init__(
        self,
        weights: tuple[Parameter, ...],
        groups: Sequence[tuple[int, ...]],
        layout: ParallelLayout,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.weights = ParameterTuple(weights)
        self._parts = _split_groups(weights, groups)
        self._over_shards = _OverShards(layout)
        self._nothing = Tensor([0.0, 0.0], mstype.float32)
        bounds = [0]
        for weight in weights:
            bounds.append(bounds[-1] + int(weight.size))
        self._bounds = tuple(bounds)

    def construct(self, before: Any) -> Any:
        """Return `[layers, 2]`: sums of squares of the change, and of the weights before.

        Args:
            before: What `WeightCopy` returned before the update.
        """
        sharded: Any = ()
        replicated: Any = ()
        for mine, whole in self._parts:
            sharded += (self._fields(before, mine),)
            replicated += (self._fields(before, whole),)
        return self._over_shards(ops.stack(sharded), ops.stack(replicated))

    def _fields(self, before: Any, indices: Any) -> Any:
        if len(indices) == 0:
            return self._nothing
        changes: Any = ()
        sizes: Any = ()
        for index in indices:
            old = before[self._bounds[index] : self._bounds[index + 1]]
            new = self.weights[index].value().astype(mstype.float32).reshape((-1,))
            changes += (ops.sum(ops.square(new - old)),)
            sizes += (ops.sum(ops.square(old)),)
        return ops.stack((ops.sum(ops.stack(changes)), ops.sum(ops.stack(sizes))))


def _split_groups(
    weights: tuple[Parameter, ...], groups: Sequence[tuple[int, ...]]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Per layer the indices of its sharded and of its replicated weights."""
    sharded = [is_tp_sharded(weight) for weight in weights]
    return tuple(
        (
            tuple(index for index in group if sharded[index]),
            tuple(index for index in group if not sharded[index]),
        )
        for group in groups
    )
