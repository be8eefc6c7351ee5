"""Memory of each pipeline stage, part by part, in bytes.

Sources: states per parameter as Megatron-LM and ZeRO count them (Rajbhandari et al., arXiv
1910.02054, section 3; half-precision weights with float32 gradients and master weights: 18 bytes
with Adam); activations per layer as in Korthikanti et al., arXiv 2205.05198, table 2, with their
constants split by width so that gated MLPs, grouped keys and experts count right; micro-batches in
flight by the 1F1B and interleaved schedules of Narayanan et al., arXiv 2104.04473, section 2.2.
The parts are what the tensors take; `MemoryRates` says how much of each is really seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mindtune.search import layout
from mindtune.search.facts import StudyFacts
from mindtune.search.knobs import Config
from mindtune.search.model_shape import ModelShape

__all__ = ["MemoryParts", "MemoryRates", "memory_parts", "moment_bytes", "stage_memory"]

_HALF = 2
_FULL = 4
_OPTIMIZER_BYTES = (("adam", 8), ("lamb", 8), ("momentum", 4), ("adagrad", 4), ("sgd", 0))
"""Float32 moments per parameter, by a part of the optimizer's name."""
_MINDSPORE_SGD = 8
"""MindSpore's `nn.SGD` keeps `accum` and `stat` of every parameter, with momentum and without."""
_BUCKET_BYTES = 0.5
"""Bytes per parameter of the buckets in which gradients and weights are exchanged: Megatron-LM
and PyTorch fill buckets of a fixed size, so this is an average over models (model_accuracy)."""
_UNSHARDED_LAYERS = 2
"""Layers that parameter sharding holds whole at once: the one at work and the one fetched ahead
(PyTorch FSDP, arXiv 2304.11277, section 3.3)."""
_FIXED_SHARE = 0.0025
"""Share of the device memory that allocator and libraries take (model_accuracy)."""


@dataclass(frozen=True)
class MemoryRates:
    """How many bytes are seen for each byte that the formula counts.

    The defaults are means over the tables of experiments/model_accuracy; trials replace them.
    """

    states: float = 1.0
    buffers: float = 1.1
    activations: float = 1.0
    gathered: float = 0.19
    """A program that gathers again in the backward pass keeps none of it."""
    logits: float = 1.3
    fixed: float = 0.64


_DEFAULT_RATES = MemoryRates()


class MemoryParts(NamedTuple):
    """What one rank of a stage holds, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    residual: float
    """Error feedback of a top-k reducer."""
    buffers: float
    """Communication buckets, and layers that parameter sharding holds whole."""
    activations: float
    gathered: float
    """Inputs that sequence parallelism gathers for the matrix products."""
    logits: float
    fixed: float
    """Allocator and libraries; 0 where the device's memory is unknown."""

    @property
    def static(self) -> float:
        """What is held all the time: no estimate may ever be lower."""
        return self.weights + self.gradients + self.optimizer + self.residual

    @property
    def amounts(self) -> tuple[float, ...]:
        """The parts in the order of `MemoryRates`."""
        return (
            self.static, self.buffers, self.activations, self.gathered, self.logits, self.fixed,
        )  # fmt: skip

    def total(self, rates: MemoryRates) -> float:
        """Return everything at these rates."""
        return (
            rates.states * self.static
            + rates.buffers * self.buffers
            + rates.activations * self.activations
            + rates.gathered * self.gathered
            + rates.logits * self.logits
            + rates.fixed * self.fixed
        )


def memory_parts(
    config: Config, facts: StudyFacts, rates: MemoryRates = _DEFAULT_RATES
) -> MemoryParts | None:
    """Return the parts of the worst pipeline stage; None where they cannot be known.

    Args:
        config: Complete config.
        facts: What holds for the whole study.
        rates: They decide which stage is the worst.
    """
    stages = stage_memory(config, facts)
    return None if stages is None else max(stages, key=lambda parts: parts.total(rates))


def stage_memory(config: Config, facts: StudyFacts) -> tuple[MemoryParts, ...] | None:
    """Return the parts of every stage that can be the worst, the first and the last included.

    None where they cannot be known: no model, an optimizer of unknown moments, or a list per
    stage that is not as long as there are stages. Where all
    stages have the same layers, only the first (most micro-batches in flight, the embedding) and
    the last (the output layer and its logits) can be.
    """
    model = facts.model
    moments = moment_bytes(facts)
    if model is None or moments is None:
        return None
    stages = layout.pipeline_stage(config)
    whole = layout.stage_layers(config, model.num_layers)
    repeated = layout.repeated_among(str(config["recompute"]), whole)
    layers: tuple[float, ...] = whole
    if config["offset"] == "even":
        layers = (model.num_layers / stages,) * stages
    if len(layers) != stages or len(repeated) != stages:
        return None
    alike = len(set(layers)) == 1 and len(set(repeated)) == 1
    candidates = sorted({0, stages - 1}) if alike else range(stages)
    return tuple(
        _Stage(config, facts, model, number, layers[number], *repeated[number]).parts(moments)
        for number in candidates
    )


def moment_bytes(facts: StudyFacts) -> int | None:
    """Return the bytes of moments that the optimizer keeps per parameter; None: unknown."""
    return _moment_bytes(facts.training.optimizer, facts.limits.framework)


@lru_cache
def _moment_bytes(optimizer: str, framework: str) -> int | None:
    name = optimizer.lower()
    for part, size in _OPTIMIZER_BYTES:
        if part in name:
            return _MINDSPORE_SGD if part == "sgd" and framework != "other" else size
    return None


class _Stage:
    """One stage of a config."""

    def __init__(
        self, config: Config, facts: StudyFacts, model: ModelShape, number: int, layers: float,
        repeated: float, attention_repeated: float,
    ) -> None:  # fmt: skip
        self._config, self._facts, self._model = config, facts, model
        self._number, self._layers = number, layers
        self._repeated, self._attention_repeated = repeated, attention_repeated
        self._is_last = number == layout.pipeline_stage(config) - 1
        self._tensor = layout.model_parallel(config)
        self._expert_tensor = layout.expert_tensor(config, facts)
        self._half = layout.precision(config, facts) != "float32"
        size = layout.micro_batch_size(config) * model.seq_length
        self._tokens = size / layout.context_parallel(config)

    def parts(self, moments: int) -> MemoryParts:
        config, model = self._config, self._model
        dense, experts = self._parameters()
        sharding = str(config["optimizer_sharding"])
        # Weights are replicated over context parallel ranks too; experts over the data-parallel
        # ranks that do not share them.
        replicas = layout.replicas(config)
        held = dense + experts
        holders = replicas * self._tensor / self._expert_tensor
        own = max(holders / layout.expert_parallel(config), 1.0)
        spread = dense / replicas + experts / own
        by_stage = {"none": 0, "optimizer": 1, "gradient": 2, "parameter": 3}[sharding]
        gradient = self._facts.program.gradient_bytes if self._half else _FULL
        # Master weights stand beside half-precision ones.
        state_bytes = moments + (_FULL if self._half else 0)
        activations, gathered = self._activations()
        memory = self._facts.cluster.device_memory
        element = _HALF if self._half else _FULL
        return MemoryParts(
            weights=element * (spread if by_stage >= 3 else held),
            gradients=gradient * (spread if by_stage >= 2 else held),
            optimizer=0.0
            if config["optimizer_offload"]
            else state_bytes * (spread if by_stage >= 1 else held),
            residual=_FULL * held
            if str(config["gradient_compression"]).startswith("topk")
            else 0.0,
            buffers=self._buffers(held, by_stage, replicas),
            activations=activations,
            gathered=gathered,
            # The logits and their float32 softmax, which becomes their gradient.
            logits=self._tokens * model.vocab_size / self._tensor * (element + _FULL)
            if self._is_last
            else 0.0,
            fixed=0.0 if memory is None else _FIXED_SHARE * memory,
        )

    def _parameters(self) -> tuple[float, float]:
        """Return the parameters of one rank: all but the experts, and the experts."""
        model, first, last = self._model, self._number == 0, self._is_last
        tables = int(first) + int(last and not (model.tie_embeddings and first))
        dense = self._layers * model.dense_layer_parameters + tables * model.embedding_parameters
        dense += model.hidden_size if last else 0  # the last norm
        shared = layout.expert_parallel(self._config)
        experts = self._layers * model.expert_layer_parameters / shared
        return dense / self._tensor, experts / self._expert_tensor

    def _buffers(self, held: float, by_stage: int, replicas: int) -> float:
        if replicas == 1:
            return 0.0
        if by_stage < 3:
            return _BUCKET_BYTES * held
        model = self._model
        experts = model.expert_layer_parameters / layout.expert_parallel(self._config)
        experts *= self._tensor / self._expert_tensor  # what follows splits all of it
        layer = max(model.dense_layer_parameters + experts, model.embedding_parameters)
        element = _HALF if self._half else _FULL
        return _UNSHARDED_LAYERS * 2 * element * layer / self._tensor

    def _activations(self) -> tuple[float, float]:
        config, model, tensor = self._config, self._model, self._tensor
        scale = self._tokens * (1.0 if self._half else 2.0)
        is_split = bool(config["use_seq_parallel"])
        outside = 1.0 / tensor if is_split else 1.0
        hidden = model.hidden_size
        # Half-precision bytes per token: norms and the two inputs (10 h in the source, split by
        # sequence parallelism only); queries, keys, values and the projection's input; the MLP,
        # where a gated one keeps gate, value, the gate's activation and their product.
        attention = 2 * (2 * hidden + 2 * model.kv_size) / tensor
        mlp_tensors = 4 if model.gated_mlp else 2
        mlp = 2 * mlp_tensors * model.mlp_width * model.active_experts / tensor
        plain = scale * (10 * hidden * outside + attention + mlp)
        # Softmax output, its dropout's mask and output; FlashAttention (arXiv 2205.14135) keeps
        # none, and selective recomputation makes them again.
        scores = 0.0
        if not model.flash_attention:
            scores = scale * 5 * model.num_heads * model.seq_length / tensor
        layer_input = scale * 2 * hidden * outside
        kept = self._layers - self._repeated
        stored = kept * plain + max(kept - self._attention_repeated, 0.0) * scores
        stored += self._repeated * layer_input
        # The layer that is being repeated.
        working = plain + scores if self._repeated else scores if self._attention_repeated else 0.0
        gathered = 2 * 2 * hidden * scale * kept if is_split else 0.0
        flying = self._in_flight()
        return stored * flying + working, gathered * flying

    def _in_flight(self) -> float:
        """Return how many micro-batches' activations the stage holds at once.

        1F1B: p - i of them on stage i. Interleaved: 2 (p - i - 1) + (v - 1) p chunks are warmed
        up and one more is at work, each a v-th of the stage (Megatron-LM's schedule); on the first
        stage that is p (1 + (p - 1) / (p v)) as in Korthikanti et al.
        """
        config = self._config
        stages, chunks = layout.pipeline_stage(config), layout.interleave(config)
        rounds = layout.micro_batch_num(config, self._facts) or 1
        left = stages - self._number
        if chunks == 1:
            return min(rounds, left)
        return min(2 * (left - 1) + (chunks - 1) * stages + 1, rounds * chunks) / chunks
