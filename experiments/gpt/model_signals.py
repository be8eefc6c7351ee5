"""What the model tells of itself in sampled steps: an example for the owner of any model.

MindSpore calls no hooks in graph mode, so what happens inside a model can only be told by the
model. `GptSignals` runs a second forward pass over the batch in a graph of its own, compiled with
the first sample, and leaves the training graph alone. Attention weights are reduced to one number
per head where they arise and never leave their block; without a backward pass nothing is kept, so
recomputation plays no part. Under tensor parallelism each rank has its own heads, and under data
parallelism its own samples: one small AllReduce puts them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

if TYPE_CHECKING:
    from mindtune.experiments.gpt.model import GptLoss
    from mindtune.experiments.gpt.ranks import Ranks

__all__ = ["GptSignals"]


class GptSignals(nn.Cell):
    """`signals(tokens, weights)` returns named arrays, for `TuneCallback(model_signals=signals)`.

    Args:
        network: Shares its weights.
        ranks: This process among the ranks.
    """

    def __init__(self, network: GptLoss, ranks: Ranks) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.blocks = network.backbone.blocks
        layers, heads = len(self.blocks), self.blocks[0].attention.heads
        self._several = ranks.layout.world_size > 1
        if self._several:
            from mindspore.communication import GlobalComm  # noqa: PLC0415 - one rank needs none

            self._all_reduce = ops.AllReduce(ops.ReduceOp.SUM, GlobalComm.WORLD_COMM_GROUP)
        self._replicas = float(ranks.layout.data_parallel)
        self._ranks = float(ranks.layout.world_size)
        self._shape = (layers, heads * ranks.shards.count)
        before = heads * ranks.shards.index
        after = heads * (ranks.shards.count - 1) - before
        # Heads of other ranks: zeros beside, so that a NaN stays with its own head.
        self._before = Tensor([[0.0] * before] * layers, mstype.float32) if before else None
        self._after = Tensor([[0.0] * after] * layers, mstype.float32) if after else None

    def __call__(self, tokens: Any, weights: Any) -> dict[str, Any]:
        """Return entropy `[layers, heads]`, losses `[layers]`, confidence."""
        packed = super().__call__(tokens, weights).asnumpy()
        layers, heads = self._shape
        return {
            "attention_entropy": packed[: layers * heads].reshape(self._shape),
            "layer_losses": packed[layers * heads : -1],
            "token_confidence": packed[-1],
        }

    def construct(self, tokens: Any, _weights: Any) -> Any:
        """Return all of it as one vector, the same on all ranks."""
        entropies, losses, confidence = self.network.look_inside(tokens)
        if self._before is not None:
            entropies = ops.concat((self._before, entropies), 1)
        if self._after is not None:
            entropies = ops.concat((entropies, self._after), 1)
        entropies = entropies.reshape((-1,)) / self._replicas
        whole = ops.concat((losses, confidence.reshape((1,)))) / self._ranks
        packed = ops.concat((entropies, whole))
        if self._several:
            return self._all_reduce(packed)
        return packed
