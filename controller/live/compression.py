"""Spelling of gradient compression, and the two codecs that run inside the training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from mindtune.controller.errors import ConfigError

__all__ = ["Compression", "Float16Codec", "TopKCodec", "parse_compression"]

_REFUSED = {
    "int8": "its sum over ranks needs an integer gather or AllReduce, which the CPU back end has "
    "no kernel for, and a per-rank scale would make the ranks' sums differ from one another",
    "powersgd": "its orthogonalisation needs every weight as a matrix and two more collectives a "
    "step, which only pays off on networks slower than any this step was measured on",
}

# float16 holds up to 65504; the norm bound is mapped to a quarter of it, so that no partial sum of
# the entries can reach infinity.
_FLOAT16_TARGET = 16384.0
_TINY = 1e-30


@dataclass(frozen=True)
class Compression:
    """A parsed value of the knob `gradient_compression`."""

    kind: str
    """none, float16 or topk."""
    ratio: float = 1.0
    """Share of entries that top-k sends; 1 for the others."""

    def __str__(self) -> str:
        return f"topk:{self.ratio:g}" if self.kind == "topk" else self.kind


def parse_compression(text: str) -> Compression:
    """Return the compression that the canonical spelling names.

    Args:
        text: `none`, `float16` or `topk:R` with 0 < R <= 1.

    Raises:
        ConfigError: The spelling is unknown, R is out of range, or the kind is refused.
    """
    kind, _, value = text.partition(":")
    if kind in _REFUSED:
        raise ConfigError(
            f"gradient_compression {text!r} is refused: {_REFUSED[kind]}; "
            "use none, float16 or topk:R."
        )
    if kind in ("none", "float16") and not value:
        return Compression(kind)
    if kind == "topk":
        try:
            ratio = float(value)
        except ValueError:
            ratio = float("nan")
        if 0 < ratio <= 1:
            return Compression(kind, ratio)
    raise ConfigError(
        "gradient_compression must be none, float16 or topk:R with 0 < R <= 1, "
        f"but got {text!r}; for example topk:0.1."
    )


class Float16Codec(nn.Cell):
    """Sum a flat gradient over the data-parallel ranks in float16.

    Entries are first scaled so that the largest norm any rank could contribute fits: gradients of
    1e-7 survive and nothing overflows, whatever the loss scale. The bound is the same number on
    all ranks, so the ranks stay bit-equal.
    """

    def __init__(self, group: str, divisor: float) -> None:
        super().__init__(auto_prefix=False)
        self._all_reduce = ops.AllReduce(ops.ReduceOp.SUM, group)
        self._inverse_divisor = 1.0 / divisor

    def construct(self, flat: Any, bound: Any) -> Any:
        """Return (mean over ranks, nothing held back).

        Args:
            flat: Unscaled float32 gradient of this rank, shape (n,).
            bound: Scalar at least as large as the norm of the ranks' gradients put together.
        """
        wire = _FLOAT16_TARGET / ops.maximum(bound, _TINY)
        sent = self._all_reduce((flat * wire).astype(mstype.float16))
        return sent.astype(mstype.float32) / wire * self._inverse_divisor, bound


class TopKCodec(nn.Cell):
    """Exchange only the entries of largest magnitude; what is held back is added next time.

    Whoever calls it stores what is held back in `residual`, and only where the update acts.

    Error feedback as in "Sparsified SGD with Memory" (Stich et al., 2018). The size of the
    exchange is fixed by the ratio at construction; a lower live ratio masks the smallest of the
    selected entries, so it needs no compile, and saves no bytes.
    """

    def __init__(
        self, group: str, divisor: float, *, data_parallel: int, size: int, ratio: float
    ) -> None:
        super().__init__(auto_prefix=False)
        self._all_gather = ops.AllGather(group)
        self._inverse_divisor = 1.0 / divisor
        self._ranks = data_parallel
        self._size = size
        self._sent = max(1, round(ratio * size))
        self._built_ratio = Tensor(ratio, mstype.float32)
        # Integers: float32 counts exactly up to 2^24 entries only.
        self._position = Tensor(np.arange(self._sent), mstype.int32)
        self._all_sent = Tensor(self._sent, mstype.int32)
        self.ratio = Parameter(
            Tensor(ratio, mstype.float32), name="mindtune.compression_ratio", requires_grad=False
        )
        self.residual = Parameter(
            Tensor(np.zeros(size, np.float32)), name="mindtune.residual", requires_grad=False
        )

    def construct(self, flat: Any, bound: Any) -> Any:
        """Return (mean over ranks of what was sent, what this rank holds back).

        Args:
            flat: Unscaled float32 gradient of this rank, shape (n,).
            bound: Unused; the signature is that of the other codec.
        """
        corrected = flat + self.residual
        _, indices = ops.topk(ops.abs(corrected), self._sent)
        ratio = self.ratio.value()
        wanted = ops.maximum(ops.round(ratio * self._size), ops.ones_like(bound))
        live = ops.where(ratio >= self._built_ratio, self._all_sent, wanted.astype(mstype.int32))
        values = ops.gather(corrected, indices, 0)
        values = ops.where(self._position < live, values, ops.zeros_like(values))
        indices = indices.astype(mstype.int32)
        held_back = corrected - self._scatter(indices, values)
        all_values = self._all_gather(values)
        all_indices = self._all_gather(indices)
        # One scatter per rank, then add: indices are unique within a rank, and adding duplicates
        # in one scatter loses additions now and then on CPU.
        total = ops.zeros_like(flat)
        for rank in range(self._ranks):
            part = slice(rank * self._sent, (rank + 1) * self._sent)
            total = total + self._scatter(all_indices[part], all_values[part])
        return total * self._inverse_divisor, held_back

    def _scatter(self, indices: Any, values: Any) -> Any:
        return ops.scatter_nd(indices.reshape((-1, 1)), values, (self._size,))
