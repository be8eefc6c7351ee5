"""Memory of the worst rank, part by part, in bytes.

Sources: states per parameter as Megatron-LM and ZeRO count them (Rajbhandari et al., arXiv
1910.02054, section 3; half-precision weights with float32 gradients and master weights: 18 bytes
with Adam); activations per layer as in Korthikanti et al., arXiv 2205.05198, table 2, with their
constants split by width so that gated MLPs, grouped keys and experts count right; in-flight
micro-batches of the 1F1B schedule from Narayanan et al., arXiv 2104.04473, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindtune.search import layout
from mindtune.search.facts import StudyFacts
from mindtune.search.knobs import Config
from mindtune.search.model_shape import ModelShape, recomputed_layers

__all__ = ["MemoryParts", "memory_parts"]

_HALF = 2
_FULL = 4
_OPTIMIZER_BYTES = (("adam", 8), ("lamb", 8), ("momentum", 4), ("adagrad", 4), ("sgd", 0))
"""Float32 moments per parameter, by a part of the optimizer's name."""


@dataclass(frozen=True)
class MemoryParts:
    """What one rank holds, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    residual: float
    """Error feedback of a top-k reducer."""
    activations: float
    logits: float

    @property
    def static(self) -> float:
        """What is held all the time: no estimate may ever be lower."""
        return self.weights + self.gradients + self.optimizer + self.residual

    @property
    def total(self) -> float:
        """Everything."""
        return self.static + self.activations + self.logits


def memory_parts(config: Config, facts: StudyFacts) -> MemoryParts | None:
    """Return the parts of the worst pipeline stage; None where they cannot be known.

    Args:
        config: Complete config.
        facts: What holds for the whole study.
    """
    model = facts.model
    moments = _moment_bytes(facts.training.optimizer)
    if model is None or moments is None:
        return None
    stages = layout.pipeline_stage(config)
    if stages == 1:
        return _stage(config, facts, model, moments, first=True, last=True)
    # The first stage holds most micro-batches, the last one the output layer and its logits.
    first = _stage(config, facts, model, moments, first=True, last=False)
    last = _stage(config, facts, model, moments, first=False, last=True)
    return max(first, last, key=lambda parts: parts.total)


def _moment_bytes(optimizer: str) -> int | None:
    name = optimizer.lower()
    return next((size for part, size in _OPTIMIZER_BYTES if part in name), None)


def _stage(
    config: Config, facts: StudyFacts, model: ModelShape, moments: int, *, first: bool, last: bool
) -> MemoryParts:
    dense, experts = _stage_parameters(config, model, first=first, last=last)
    sharding = str(config["optimizer_sharding"])
    half = layout.precision(config, facts) != "float32"
    replicas = layout.data_parallel(config)
    # Experts are replicated over the data-parallel ranks that do not share them.
    held = dense + experts
    spread = dense / replicas + experts / (replicas / layout.expert_parallel(config))
    weight_bytes = _HALF if half else _FULL
    state_bytes = moments + (_FULL if half else 0)  # master weights beside half-precision ones
    by_stage = {"none": 0, "optimizer": 1, "gradient": 2, "parameter": 3}[sharding]
    topk = str(config["gradient_compression"]).startswith("topk")
    return MemoryParts(
        weights=weight_bytes * (spread if by_stage >= 3 else held),
        gradients=_FULL * (spread if by_stage >= 2 else held),
        optimizer=0.0
        if config["optimizer_offload"]
        else state_bytes * (spread if by_stage >= 1 else held),
        residual=_FULL * held if topk else 0.0,
        activations=_activations(config, facts, model, first=first),
        logits=_logits(config, facts, model) if last else 0.0,
    )


def _stage_parameters(
    config: Config, model: ModelShape, *, first: bool, last: bool
) -> tuple[float, float]:
    """Return the parameters of one rank of a stage: all but the experts, and the experts."""
    layers = layout.layers_per_stage(config, model.num_layers)
    tensor = layout.model_parallel(config)
    tables = int(first) + int(last and not (model.tie_embeddings and first))
    dense = layers * model.dense_layer_parameters + tables * model.embedding_parameters
    dense += model.hidden_size if last else 0  # the last norm
    experts = layers * model.expert_layer_parameters / layout.expert_parallel(config)
    return dense / tensor, experts / tensor


def _activations(config: Config, facts: StudyFacts, model: ModelShape, *, first: bool) -> float:
    tokens = layout.micro_batch_size(config) * model.seq_length / layout.context_parallel(config)
    scale = 1.0 if layout.precision(config, facts) != "float32" else 2.0
    tensor = layout.model_parallel(config)
    outside = 1.0 / tensor if config["use_seq_parallel"] else 1.0
    hidden = model.hidden_size
    recompute = str(config["recompute"])
    # Half-precision bytes per token: norms and the two inputs (10 h in the source, split by
    # sequence parallelism only); queries, keys, values and the projection's input; the MLP.
    shared = 10 * hidden * outside
    attention = 2 * (2 * hidden + 2 * model.kv_size) / tensor
    mlp_tensors = 3 if model.gated_mlp else 2
    mlp = 2 * mlp_tensors * model.mlp_width * model.active_experts / tensor
    scores = 0.0
    if not model.flash_attention and recompute != "selective":
        scores = 5 * model.num_heads * model.seq_length / tensor
    layer = tokens * scale * (shared + attention + mlp + scores)
    layer_input = tokens * scale * 2 * hidden * outside
    layers = layout.layers_per_stage(config, model.num_layers)
    repeated = layers * recomputed_layers(recompute, model.num_layers) / model.num_layers
    stored = (layers - repeated) * layer + repeated * layer_input
    working = layer if repeated else 0.0  # the layer that is being repeated
    return stored * _in_flight(config, facts, first=first) + working


def _in_flight(config: Config, facts: StudyFacts, *, first: bool) -> float:
    """Return how many micro-batches' activations a stage holds at once."""
    stages, chunks = layout.pipeline_stage(config), layout.interleave(config)
    rounds = layout.micro_batch_num(config, facts) or 1
    held = min(rounds, stages if first else 1)
    if chunks == 1:
        return held
    # Interleaving holds more on the first stage: 1 + (p - 1) / (p v).
    return held * (1 + (stages - 1) / (stages * chunks)) if first else held


def _logits(config: Config, facts: StudyFacts, model: ModelShape) -> float:
    tokens = layout.micro_batch_size(config) * model.seq_length / layout.context_parallel(config)
    element = _HALF if layout.precision(config, facts) != "float32" else _FULL
    # The logits and their float32 softmax, which becomes their gradient.
    return tokens * model.vocab_size / layout.model_parallel(config) * (element + _FULL)
