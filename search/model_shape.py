"""Parameters and FLOPs of a decoder-only transformer, counted matrix by matrix.

A product of an (m, k) and a (k, n) matrix counts 2*m*k*n FLOPs. Attention is counted in full (no
causal halving), as Megatron-LM, PaLM and the MFU tables of most vendors do; the backward pass is
twice the forward pass. Normalisation, softmax, activation functions and the embedding lookup are
left out of FLOPs, as in all published MFU figures (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mindtune.search.errors import SearchError
from mindtune.search.stage_list import parse_stage_list

__all__ = ["BACKWARD_TO_FORWARD", "LayerFlops", "ModelShape", "recomputed_layers"]

BACKWARD_TO_FORWARD = 2.0
"""The backward pass multiplies once for the input's and once for the weight's gradient."""


@dataclass(frozen=True)
class LayerFlops:
    """Forward FLOPs of one layer per token, by matrix product."""

    query_key_value: float
    attention_scores: float
    attention_values: float
    output_projection: float
    router: float
    mlp: float

    @property
    def attention_core(self) -> float:
        """Scores and values: what selective recomputation repeats."""
        return self.attention_scores + self.attention_values

    @cached_property
    def total(self) -> float:
        """FLOPs per token of the whole layer."""
        return (
            self.query_key_value
            + self.attention_core
            + self.output_projection
            + self.router
            + self.mlp
        )


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer; the names are those of the study file."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    seq_length: int
    num_kv_heads: int | None = None
    """None: as many as heads."""
    gated_mlp: bool = False
    """Three matrices in the MLP instead of two."""
    tie_embeddings: bool = False
    """The output layer shares the embedding's matrix."""
    flash_attention: bool = False
    """Attention scores are never stored."""
    num_experts: int | None = None
    """None: a dense MLP; otherwise every layer has this many experts and a router."""
    experts_per_token: int | None = None
    """None: 1, where there are experts."""
    moe_intermediate_size: int | None = None
    """None: `intermediate_size`, where there are experts."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise SearchError(
                "hidden_size must be a multiple of num_heads, but got "
                f"{self.hidden_size} and {self.num_heads}."
            )
        if self.num_heads % self.kv_heads:
            raise SearchError(
                "num_heads must be a multiple of num_kv_heads, but got "
                f"{self.num_heads} and {self.kv_heads}."
            )

    @property
    def kv_heads(self) -> int:
        """Heads that keys and values have."""
        return self.num_kv_heads or self.num_heads

    @cached_property
    def kv_size(self) -> int:
        """Width of keys, and of values."""
        return self.kv_heads * (self.hidden_size // self.num_heads)

    @property
    def active_experts(self) -> int:
        """MLPs that each token passes: 1 without experts."""
        return (self.experts_per_token or 1) if self.num_experts else 1

    @cached_property
    def mlp_width(self) -> int:
        """Width of one MLP or expert."""
        if self.num_experts:
            return self.moe_intermediate_size or self.intermediate_size
        return self.intermediate_size

    @property
    def attention_parameters(self) -> int:
        """Matrices of one layer's attention."""
        hidden = self.hidden_size
        return hidden * (hidden + 2 * self.kv_size) + hidden * hidden

    @property
    def mlp_parameters(self) -> int:
        """Matrices of one MLP or of one expert."""
        return (3 if self.gated_mlp else 2) * self.hidden_size * self.mlp_width

    @property
    def router_parameters(self) -> int:
        """The matrix that scores the experts; 0 without experts."""
        return self.hidden_size * self.num_experts if self.num_experts else 0

    @cached_property
    def dense_layer_parameters(self) -> int:
        """One layer without its experts: attention, router, two norms, and a dense MLP."""
        mlp = 0 if self.num_experts else self.mlp_parameters
        return self.attention_parameters + self.router_parameters + 2 * self.hidden_size + mlp

    @cached_property
    def expert_layer_parameters(self) -> int:
        """All experts of one layer; 0 without experts."""
        return self.num_experts * self.mlp_parameters if self.num_experts else 0

    @cached_property
    def embedding_parameters(self) -> int:
        """The embedding's matrix."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def num_parameters(self) -> int:
        """All matrices and the norms' weights; biases and learnt positions are not counted."""
        layers = self.dense_layer_parameters + self.expert_layer_parameters
        tables = self.embedding_parameters * (1 if self.tie_embeddings else 2)
        return self.num_layers * layers + tables + self.hidden_size

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that a token is multiplied with: the N of the rule of 6 N FLOPs per token.

        Of the experts those that it passes; the embedding's lookup multiplies nothing, unless the
        output layer shares its matrix (Kaplan et al., arXiv 2001.08361, section 2.1).
        """
        experts = self.active_experts * self.mlp_parameters if self.num_experts else 0
        layers = self.num_layers * (self.dense_layer_parameters + experts)
        return layers + self.hidden_size + self.embedding_parameters

    @property
    def rule_of_six_flops(self) -> float:
        """FLOPs per token by the rule of 6 N, which leaves out the attention over the sequence."""
        return 6.0 * self.active_parameters

    @cached_property
    def layer_flops(self) -> LayerFlops:
        """Forward FLOPs of one layer per token."""
        hidden = self.hidden_size
        return LayerFlops(
            query_key_value=2.0 * hidden * (hidden + 2 * self.kv_size),
            attention_scores=2.0 * self.seq_length * hidden,
            attention_values=2.0 * self.seq_length * hidden,
            output_projection=2.0 * hidden * hidden,
            router=2.0 * self.router_parameters,
            mlp=2.0 * self.active_experts * self.mlp_parameters,
        )

    @cached_property
    def head_flops(self) -> float:
        """Forward FLOPs of the output layer per token."""
        return 2.0 * self.hidden_size * self.vocab_size

    @property
    def forward_flops(self) -> float:
        """Forward FLOPs of the whole model per token."""
        return self.num_layers * self.layer_flops.total + self.head_flops

    @cached_property
    def model_flops(self) -> float:
        """Forward and backward FLOPs per token: the numerator of MFU."""
        return (1.0 + BACKWARD_TO_FORWARD) * self.forward_flops

    def step_flops(self, tokens: float) -> float:
        """Return the model FLOPs of an optimizer step over `tokens` tokens."""
        return self.model_flops * tokens

    def recompute_flops(self, recompute: str) -> float:
        """Return the FLOPs per token that recomputation adds: they count in HFU only.

        Args:
            recompute: Canonical value of the knob. `interval:K` repeats every K-th layer;
                `selective` repeats the attention core (Korthikanti et al., arXiv 2205.05198).
        """
        kind, _, listed = recompute.partition(":")
        if kind == "selective":
            layers = _listed_layers(listed) if listed else self.num_layers
            return layers * self.layer_flops.attention_core
        return recomputed_layers(recompute, self.num_layers) * self.layer_flops.total


def recomputed_layers(recompute: str, num_layers: int) -> int:
    """Return how many of `num_layers` layers are repeated as a whole."""
    if recompute == "full":
        return num_layers
    kind, _, detail = recompute.partition(":")
    if kind == "layers":
        return _listed_layers(detail)
    return num_layers // int(detail) if kind == "interval" else 0


def _listed_layers(listed: str) -> int:
    return sum(map(sum, parse_stage_list(listed)))
