"""Tensor parallelism by explicit collectives around column- and row-split weights.

The columns of the first matrix and the rows of the second are split over the ranks of a
tensor-parallel group. Going in, the activation is replicated, and its gradient is the sum of the
ranks' parts; coming out, the ranks' parts are summed, and the gradient is replicated
(Megatron-LM's f and g, arXiv:1909.08053, section 3). Each direction has a `bprop` of its own: the
derivative that MindSpore takes of an AllReduce is another AllReduce, which would make the shards'
gradients as many times too large as there are ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Parameter, Tensor, nn, ops

__all__ = ["ONE_SHARD", "EnterShards", "LeaveShards", "Shards", "Whole", "replicated", "sharded"]

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Shards:
    """This rank's place in its tensor-parallel group."""

    count: int = 1
    index: int = 0
    group: str | None = None
    """Name of the communication group; None with one shard."""

    def slice(self, array: FloatArray, axis: int) -> FloatArray:
        """Return this rank's part of a full array."""
        return np.ascontiguousarray(np.split(array, self.count, axis=axis)[self.index])


ONE_SHARD = Shards()


class Whole(nn.Cell):
    """Identity, in place of both cells when there is one shard."""

    def construct(self, x: Any) -> Any:
        """Return the activation as it is."""
        return x


class EnterShards(nn.Cell):
    """Identity forward, AllReduce of the gradient."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, group)

    def construct(self, x: Any) -> Any:
        """Return the activation as it is."""
        return x

    def bprop(self, _x: Any, _out: Any, dout: Any) -> Any:
        """Sum the gradient over the shards."""
        return (self.all_reduce(dout),)


class LeaveShards(nn.Cell):
    """AllReduce forward, identity on the gradient."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, group)

    def construct(self, x: Any) -> Any:
        """Sum the shards' parts."""
        return self.all_reduce(x)

    def bprop(self, _x: Any, _out: Any, dout: Any) -> Any:
        """Return the gradient as it is."""
        return (dout,)


def replicated(array: FloatArray, name: str) -> Any:
    """Make a parameter that is whole on every rank."""
    return Parameter(Tensor(array), name=name)


def sharded(array: FloatArray, name: str, shards: Shards, axis: int) -> Any:
    """Make a parameter from this rank's part of the full array.

    The mark `tp_sharded` is an attribute, since a parameter's own name is overwritten inside a
    `CellList`; the step needs it for the global norm.
    """
    parameter = Parameter(Tensor(shards.slice(array, axis)), name=name)
    if shards.count > 1:
        parameter.tp_sharded = True
    return parameter
