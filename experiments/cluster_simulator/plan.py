"""What a complete config asks for, in plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from mindtune.experiments.cluster_simulator.kernels import HALF, WHOLE
from mindtune.search import layout
from mindtune.search.facts import StudyFacts
from mindtune.search.knobs import Config
from mindtune.search.model_shape import ModelShape

__all__ = ["LAYOUT_KNOBS", "Plan", "read_plan"]

LAYOUT_KNOBS = (
    "data_parallel", "model_parallel", "pipeline_stage", "context_parallel", "expert_parallel",
    "pp_interleave_num", "offset", "use_seq_parallel", "micro_batch_size", "precision",
    "recompute", "optimizer_sharding",
)  # fmt: skip
"""Knobs that `Plan` holds: what happens in each micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model lies on a machine."""

    model: ModelShape
    data: int
    tensor: int
    stages: int
    context: int
    experts: int
    """Ranks, inside data parallelism, that share the experts."""
    chunks: int
    is_split: bool
    """Sequence parallelism."""
    samples: int
    """Of a micro-batch."""
    micro_batches: int
    element: int
    """Bytes of a number in matrix products."""
    sharding: str
    layers: tuple[tuple[int, ...], ...]
    """Chunk -> stage -> layers."""
    repeated: tuple[tuple[float, float], ...]
    """Stage -> layers that are recomputed whole, and those whose attention is."""

    @property
    def ranks(self) -> int:
        """Devices that the config uses."""
        return self.data * self.tensor * self.stages * self.context

    @property
    def replicas(self) -> int:
        """Ranks with the same weights, but for the experts'."""
        return self.data * self.context

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, before sequence parallelism."""
        return self.samples * self.model.seq_length // self.context

    def parameters(self, stage: int) -> tuple[float, float]:
        """Return the parameters of a rank: all but the experts, and the experts."""
        model, count = self.model, sum(chunk[stage] for chunk in self.layers)
        first, last = stage == 0, stage == self.stages - 1
        tables = int(first) + int(last and not (first and model.tie_embeddings))
        dense = count * model.dense_layer_parameters + tables * model.embedding_parameters
        experts = count * model.expert_layer_parameters / self.experts
        return dense / self.tensor, experts / self.tensor


def read_plan(config: Config, facts: StudyFacts) -> Plan | None:
    """Return the plan of a complete config; None where it is none: sizes do not divide."""
    model, micro_batches = facts.model, layout.micro_batch_num(config, facts)
    if model is None or micro_batches is None:
        return None
    layers = layout.chunk_layers(config, model.num_layers)
    stages = layout.pipeline_stage(config)
    repeated = layout.repeated_layers(config, model.num_layers)
    if sum(map(sum, layers)) != model.num_layers or {len(repeated), len(layers[0])} != {stages}:
        return None
    return Plan(
        model=model,
        data=layout.data_parallel(config),
        tensor=layout.model_parallel(config),
        stages=stages,
        context=layout.context_parallel(config),
        experts=layout.expert_parallel(config),
        chunks=layout.interleave(config),
        is_split=bool(config["use_seq_parallel"]),
        samples=layout.micro_batch_size(config),
        micro_batches=micro_batches,
        element=WHOLE if layout.precision(config, facts) == "float32" else HALF,
        sharding=str(config["optimizer_sharding"]),
        layers=layers,
        repeated=repeated,
    )
