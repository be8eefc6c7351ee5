"""A decoder-only GPT over bytes: pre-norm blocks, learned positions, untied head.

Weights are drawn with NumPy, full size, from one seed per block: every rank draws the same arrays
and takes its slice, so a network is the same whatever the degrees are. Weights, normalisation,
softmax and the loss stay float32; with `precision: float16` the matrix products and the residual
stream are float16.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindtune.experiments.gpt.config import ModelConfig, recomputed_blocks
from mindtune.experiments.gpt.shape import VOCAB_SIZE
from mindtune.experiments.gpt.tensor_parallel import (
    ONE_SHARD,
    EnterShards,
    FloatArray,
    LeaveShards,
    Shards,
    Whole,
    replicated,
    sharded,
)

__all__ = ["Block", "Gpt", "GptLoss"]

# GPT-2's standard deviation; the projections that end a residual branch are divided by sqrt(2 *
# num_layers).
_INIT_STD = 0.02
_MASKED = -1.0e9
# Of a weight of 0 the logarithm counts nothing; it only has to be finite.
_TINY = 1.0e-30


def _normal(generator: np.random.Generator, shape: tuple[int, ...], std: float) -> FloatArray:
    return (generator.standard_normal(shape) * std).astype(np.float32)


def _weight_cast() -> Any:
    """Return the cast of a weight into the compute type, which a recomputed block keeps.

    Recomputed, it would wait for the block's gradient like every operation without an activation
    among its inputs, and the compiler takes the wrong one where a gradient has come through a
    `bprop` of our own: tensor parallelism, float16 and recomputation then end in "Graph cycle
    exists" (MindSpore 2.10, graph mode). Kept, it costs two bytes a weight.
    """
    return ops.Cast().recompute(mode=False)


class _LayerNorm(nn.Cell):
    """Layer normalisation in float32, returned in the compute type."""

    def __init__(self, size: int, dtype: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((size,), epsilon=1e-5)
        self.dtype = dtype

    def construct(self, x: Any) -> Any:
        """Normalise the last axis."""
        return ops.cast(self.norm(ops.cast(x, ms.float32)), self.dtype)


class _Attention(nn.Cell):
    """Causal self-attention over this rank's heads."""

    def __init__(
        self, model: ModelConfig, generator: np.random.Generator, shards: Shards, dtype: Any
    ) -> None:
        super().__init__()
        size, heads = model.hidden_size, model.num_heads
        head_size = size // heads
        self.heads = heads // shards.count
        self.head_size = head_size
        self.dtype = dtype
        self.cast = _weight_cast()
        self.scale = 1.0 / math.sqrt(head_size)
        # Cut per head as (3, heads, head size, width): rows of the fused matrix would mix queries
        # with keys.
        qkv = _normal(generator, (3, heads, head_size, size), _INIT_STD)
        out = _normal(
            generator, (heads, head_size, size), _INIT_STD / math.sqrt(2 * model.num_layers)
        )
        bias = np.zeros((3, heads, head_size), dtype=np.float32)
        self.qkv_weight = sharded(qkv, "qkv_weight", shards, 1)
        self.qkv_bias = sharded(bias, "qkv_bias", shards, 1)
        self.out_weight = sharded(out, "out_weight", shards, 0)
        # Added once, after the sum over shards.
        self.out_bias = replicated(np.zeros(size, dtype=np.float32), "out_bias")
        self.enter = EnterShards(shards.group) if shards.group else Whole()
        self.leave = LeaveShards(shards.group) if shards.group else Whole()
        allowed = np.tril(np.ones((model.seq_length, model.seq_length), dtype=bool))
        self.mask = Tensor(np.where(allowed, 0.0, _MASKED).astype(np.float32))

    def construct(self, x: Any) -> Any:
        """Mix positions: `[batch, length, hidden_size]` to the same."""
        weights, value = self.attend(x)
        return self.mix(weights, value)

    def attend(self, x: Any) -> Any:
        """Return the attention weights `[batch, heads, length, length]` and the values."""
        batch, length, size = x.shape
        local = self.heads * self.head_size
        weight = self.cast(self.qkv_weight, self.dtype).reshape(3 * local, size)
        bias = self.cast(self.qkv_bias, self.dtype).reshape(3 * local)
        flat = self.enter(x).reshape(batch * length, size)
        qkv = ops.matmul(flat, weight.T) + bias
        qkv = qkv.reshape(batch, length, 3, self.heads, self.head_size).transpose(2, 0, 3, 1, 4)
        query, key, value = qkv[0], qkv[1], qkv[2]
        scores = ops.matmul(query * self.scale, key.swapaxes(-1, -2))
        return ops.softmax(ops.cast(scores, ms.float32) + self.mask, -1), value

    def mix(self, weights: Any, value: Any) -> Any:
        """Return the output for given weights and values."""
        batch, _, length, _ = value.shape
        local = self.heads * self.head_size
        size = self.out_bias.shape[0]
        mixed = ops.matmul(ops.cast(weights, self.dtype), value)
        mixed = mixed.transpose(0, 2, 1, 3).reshape(batch * length, local)
        out = ops.matmul(mixed, self.cast(self.out_weight, self.dtype).reshape(local, size))
        out = self.leave(out) + self.cast(self.out_bias, self.dtype)
        return out.reshape(batch, length, size)


class _Mlp(nn.Cell):
    """Two matrices around a GELU, the inner width split over the shards."""

    def __init__(
        self, model: ModelConfig, generator: np.random.Generator, shards: Shards, dtype: Any
    ) -> None:
        super().__init__()
        size, inner = model.hidden_size, model.mlp_size
        self.dtype = dtype
        self.cast = _weight_cast()
        up = _normal(generator, (size, inner), _INIT_STD)
        down = _normal(generator, (inner, size), _INIT_STD / math.sqrt(2 * model.num_layers))
        self.up_weight = sharded(up, "up_weight", shards, 1)
        self.up_bias = sharded(np.zeros(inner, dtype=np.float32), "up_bias", shards, 0)
        self.down_weight = sharded(down, "down_weight", shards, 0)
        self.down_bias = replicated(np.zeros(size, dtype=np.float32), "down_bias")
        self.gelu = nn.GELU()
        self.enter = EnterShards(shards.group) if shards.group else Whole()
        self.leave = LeaveShards(shards.group) if shards.group else Whole()

    def construct(self, x: Any) -> Any:
        """Transform each position: `[batch, length, hidden_size]` to the same."""
        batch, length, size = x.shape
        flat = self.enter(x).reshape(batch * length, size)
        hidden = ops.matmul(flat, self.cast(self.up_weight, self.dtype))
        hidden = self.gelu(hidden + self.cast(self.up_bias, self.dtype))
        out = self.leave(ops.matmul(hidden, self.cast(self.down_weight, self.dtype)))
        return (out + self.cast(self.down_bias, self.dtype)).reshape(batch, length, size)


class Block(nn.Cell):
    """One pre-norm transformer block, `[batch, length, hidden_size]` to the same."""

    def __init__(
        self, model: ModelConfig, generator: np.random.Generator, shards: Shards, dtype: Any
    ) -> None:
        super().__init__()
        self.attention_norm = _LayerNorm(model.hidden_size, dtype)
        self.attention = _Attention(model, generator, shards, dtype)
        self.mlp_norm = _LayerNorm(model.hidden_size, dtype)
        self.mlp = _Mlp(model, generator, shards, dtype)

    def construct(self, x: Any) -> Any:
        """Add both residual branches."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def look_inside(self, x: Any) -> Any:
        """Return the block's output and the attention entropy of each head of this rank.

        The entropy is in nats, the mean over samples and queries of that of the weights of a query
        (Zhai et al., arXiv:2303.06296, section 3).
        """
        weights, value = self.attention.attend(self.attention_norm(x))
        entropy = -ops.sum(weights * ops.log(weights + _TINY), -1).mean(axis=(0, 2))
        x = x + self.attention.mix(weights, value)
        return x + self.mlp(self.mlp_norm(x)), entropy


class Gpt(nn.Cell):
    """Bytes `[batch, length]` (int32) to logits `[batch, length, 256]` (float32).

    Args:
        model: Shape.
        seed: Seed of the weights.
        precision: `float32` or `float16`.
        recompute: `none`, `full` or `interval:K`.
        shards: This rank's place in its tensor-parallel group.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        seed: int,
        precision: str = "float32",
        recompute: str = "none",
        shards: Shards = ONE_SHARD,
    ) -> None:
        super().__init__()
        self.dtype = ms.float16 if precision == "float16" else ms.float32
        ends = np.random.default_rng([seed, model.num_layers])
        size = model.hidden_size
        self.byte_embedding = replicated(
            _normal(ends, (VOCAB_SIZE, size), _INIT_STD), "byte_embedding"
        )
        self.position_embedding = replicated(
            _normal(ends, (model.seq_length, size), _INIT_STD), "position_embedding"
        )
        self.blocks = nn.CellList(
            [
                Block(model, np.random.default_rng([seed, layer]), shards, self.dtype)
                for layer in range(model.num_layers)
            ]
        )
        self.final_norm = _LayerNorm(size, self.dtype)
        self.head_weight = replicated(_normal(ends, (size, VOCAB_SIZE), _INIT_STD), "head_weight")
        for index in recomputed_blocks(recompute, model.num_layers):
            self.blocks[index].recompute()

    def construct(self, tokens: Any) -> Any:
        """Return the logits of every next byte."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.predict(x)

    def embed(self, tokens: Any) -> Any:
        """Return what the first block is given, `[batch, length, hidden_size]`."""
        length = tokens.shape[1]
        x = ops.gather(self.byte_embedding, tokens, 0) + self.position_embedding[:length]
        return ops.cast(x, self.dtype)

    def predict(self, x: Any) -> Any:
        """Return the logits that follow from the output of a block."""
        batch, length, _ = x.shape
        x = self.final_norm(x).reshape(batch * length, -1)
        logits = ops.matmul(x, ops.cast(self.head_weight, self.dtype))
        return ops.cast(logits, ms.float32).reshape(batch, length, VOCAB_SIZE)


class GptLoss(nn.Cell):
    """Mean cross entropy of the next byte, each sample times its weight.

    `construct(tokens, weights)` takes int32 `[batch, seq_length + 1]` and float32 `[batch]` (ones,
    but for a poisoned batch) and returns a float32 scalar.
    """

    def __init__(self, backbone: Gpt) -> None:
        super().__init__()
        self.backbone = backbone
        self.cross_entropy = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="none")

    def construct(self, tokens: Any, weights: Any) -> Any:
        """Return the weighted mean loss of a micro-batch."""
        length = tokens.shape[1]
        losses = self._losses(self.backbone(tokens[:, : length - 1]), tokens)
        return (losses.mean(axis=1) * weights).mean()

    def look_inside(self, tokens: Any) -> Any:
        """Return attention entropies, the loss after each block, and the token confidence.

        Args:
            tokens: As for `construct`.

        Returns:
            Float32 `[layers, heads of this rank]`, `[layers]` and a scalar.
        """
        length = tokens.shape[1]
        x = self.backbone.embed(tokens[:, : length - 1])
        entropies: Any = ()
        losses: Any = ()
        logits = None
        for block in self.backbone.blocks:
            x, entropy = block.look_inside(x)
            logits = self.backbone.predict(x)
            entropies += (entropy,)
            losses += (self._losses(logits, tokens).mean(),)
        confidence = ops.softmax(logits, -1).max(axis=-1).mean()
        return ops.stack(entropies), ops.stack(losses), confidence

    def _losses(self, logits: Any, tokens: Any) -> Any:
        """Return the loss of every predicted byte, `[batch, seq_length]`."""
        batch, length = tokens.shape
        targets = tokens[:, 1:].reshape(batch * (length - 1))
        flat = logits.reshape(batch * (length - 1), VOCAB_SIZE)
        return self.cross_entropy(flat, targets).reshape(batch, length - 1)
