"""Reduction of gradients over data-parallel ranks and of one small row over all ranks."""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.communication import GlobalComm, get_group_size, get_rank

from mindtune.controller.errors import ConfigError
from mindtune.controller.live.compression import Compression, Float16Codec, TopKCodec
from mindtune.controller.live.layout import ParallelLayout
from mindtune.controller.live.packed import NUM_ROW_FIELDS

__all__ = [
    "CompressedReduction",
    "DenseReduction",
    "NoReduction",
    "RowGather",
    "layout_from_context",
    "make_reduction",
]

_DATA_PARALLEL_MODES = ("data_parallel", "hybrid_parallel")


def layout_from_context() -> ParallelLayout:
    """Return the layout that MindSpore's own training step would act on.

    In data-parallel mode that is one replica per rank, reduced over the world group. In the other
    modes the step communicates nothing: there is one rank, or the compiler inserts collectives.
    """
    if ms.get_auto_parallel_context("parallel_mode") not in _DATA_PARALLEL_MODES:
        return ParallelLayout()
    size = get_group_size()
    return ParallelLayout(
        data_parallel=size,
        data_parallel_group=GlobalComm.WORLD_COMM_GROUP,
        rank=get_rank(),
        world_size=size,
        gradients_mean=bool(ms.get_auto_parallel_context("gradients_mean")),
    )


class RowGather(nn.Cell):
    """Every rank's row on every rank, by one AllReduce in which each rank fills its own row.

    Zeros are padded around the row, never multiplied into it: a NaN must stay in its own row. (An
    AllReduce of maxima does not exist on CPU, and AllGather only for the world group.)
    """

    def __init__(self, layout: ParallelLayout) -> None:
        super().__init__(auto_prefix=False)
        self._single = layout.world_size == 1
        if not self._single:
            width = NUM_ROW_FIELDS
            self._before = Tensor([0.0] * (layout.rank * width), mstype.float32)
            self._after = Tensor(
                [0.0] * ((layout.world_size - layout.rank - 1) * width), mstype.float32
            )
            self._first = layout.rank == 0
            self._last = layout.rank == layout.world_size - 1
            self._all_reduce = ops.AllReduce(ops.ReduceOp.SUM, GlobalComm.WORLD_COMM_GROUP)
        self._shape = (layout.world_size, NUM_ROW_FIELDS)

    def construct(self, row: Any) -> Any:
        """Return the matrix of shape (ranks, fields) whose row r rank r gave."""
        if self._single:
            return row.reshape(self._shape)
        if self._first:
            matrix = ops.concat((row, self._after))
        elif self._last:
            matrix = ops.concat((self._before, row))
        else:
            matrix = ops.concat((self._before, row, self._after))
        return self._all_reduce(matrix).reshape(self._shape)


class NoReduction(nn.Cell):
    """Leave the gradients as they are."""

    needs_local_norm = False

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, gradients: Any, inverse: Any, bound: Any) -> Any:
        """Return (gradients, the factor that makes them the mean, residual)."""
        return gradients, inverse, bound


class DenseReduction(nn.Cell):
    """Sum the gradients over the data-parallel ranks, bit-identical to MindSpore's reducer.

    On CPU all gradients travel in one AllReduce (a quarter faster than one each, measured on
    3.5 MB over two ranks); elsewhere each has its own, which the compiler fuses and overlaps.
    """

    needs_local_norm = False

    def __init__(self, layout: ParallelLayout, parameters: tuple[Parameter, ...]) -> None:
        super().__init__(auto_prefix=False)
        self._all_reduce = ops.AllReduce(ops.ReduceOp.SUM, layout.data_parallel_group)
        self._joined = ms.get_context("device_target") == "CPU"
        self._flat = _Flattening(parameters)
        self._inverse_divisor = 1.0 / layout.gradient_divisor

    def construct(self, gradients: Any, inverse: Any, bound: Any) -> Any:
        """Return (sums, the factor that makes them the mean, residual)."""
        reduced: Any = ()
        if self._joined:
            reduced = self._flat.split(self._all_reduce(self._flat.join(gradients)))
        else:
            for gradient in gradients:
                reduced += (self._all_reduce(gradient),)
        return reduced, inverse * self._inverse_divisor, bound


class CompressedReduction(nn.Cell):
    """Unscale, then reduce the joined gradient through a codec."""

    needs_local_norm = True

    def __init__(self, codec: nn.Cell, parameters: tuple[Parameter, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.codec = codec
        self._flat = _Flattening(parameters)

    def construct(self, gradients: Any, inverse: Any, bound: Any) -> Any:
        """Return (mean gradients, the factor 1, what this rank holds back).

        Args:
            gradients: This rank's gradients, float32, scaled.
            inverse: Scalar that makes them the unscaled mean over micro-batches. They are unscaled
                before they are compressed, because what is held back outlives the loss scale.
            bound: Norm of the unscaled gradients of all ranks put together.
        """
        reduced, residual = self.codec(self._flat.join(gradients) * inverse, bound)
        return self._flat.split(reduced), ops.ones_like(inverse), residual


class _Flattening(nn.Cell):
    """Joins tensors of known shapes into one vector and splits it again."""

    def __init__(self, parameters: tuple[Parameter, ...]) -> None:
        super().__init__(auto_prefix=False)
        self._shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        self._sizes = tuple(math.prod(shape) for shape in self._shapes)

    def join(self, tensors: Any) -> Any:
        """Return one vector of all entries."""
        pieces: Any = ()
        for tensor in tensors:
            pieces += (tensor.reshape((-1,)),)
        return ops.concat(pieces)

    def split(self, flat: Any) -> Any:
        """Return the tensors that `join` had joined."""
        tensors: Any = ()
        start = 0
        for index in range(len(self._sizes)):
            stop = start + self._sizes[index]
            tensors += (flat[start:stop].reshape(self._shapes[index]),)
            start = stop
        return tensors


def make_reduction(
    layout: ParallelLayout, compression: Compression, parameters: tuple[Parameter, ...]
) -> nn.Cell:
    """Return the reduction for a layout and a compression.

    Raises:
        ConfigError: Compression is asked for where this step reduces nothing, or top-k on CPU in a
            sub-group, whose AllGather has no kernel there.
    """
    group = layout.data_parallel_group
    if group is None or not layout.reduces_gradients:
        if compression.kind != "none":
            raise ConfigError(
                "gradient_compression acts where this step reduces gradients over more than one "
                f"data-parallel rank, but got {compression} with data_parallel = "
                f"{layout.data_parallel}; use none, or give the layout a data_parallel_group."
            )
        return NoReduction()
    if compression.kind == "none":
        return DenseReduction(layout, parameters)
    if compression.kind == "float16":
        return CompressedReduction(Float16Codec(group, layout.gradient_divisor), parameters)
    if ms.get_context("device_target") == "CPU" and layout.data_parallel != layout.world_size:
        raise ConfigError(
            "topk on CPU needs data_parallel = world_size, because AllGather exists there for the "
            f"world group only, but got {layout.data_parallel} of {layout.world_size} ranks; "
            "use float16 or none."
        )
    size = sum(math.prod(parameter.shape) for parameter in parameters)
    codec = TopKCodec(
        group,
        layout.gradient_divisor,
        data_parallel=layout.data_parallel,
        size=size,
        ratio=compression.ratio,
    )
    return CompressedReduction(codec, parameters)
