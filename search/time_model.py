"""Time of an optimizer step, part by part, in seconds.

Sources: pipeline schedule T = (m + (p - 1) / v) * t_micro (Narayanan et al., arXiv 2104.04473);
ring exchanges send 2 (n - 1) / n of the data per rank (Patarasuk and Yuan, 2009); tensor parallel
layers exchange their output twice forward and twice backward, and twice more where they are
recomputed (Shoeybi et al., arXiv 1909.08053); parameter sharding sends half as much again (ZeRO,
arXiv 1910.02054, section 7). The optimizer's own time and the data pipeline are left to
calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindtune.search import layout
from mindtune.search.facts import StudyFacts
from mindtune.search.knobs import Config
from mindtune.search.model_shape import ModelShape, recomputed_layers

__all__ = ["TimeParts", "time_parts"]

_EFFICIENCY = 0.5
"""Share of the peak that large products reach before any calibration: about what published
runs report (40 - 60 %); one scalar that every calibration replaces."""
_LAUNCH_S, _LAUNCH_FACTOR = 1e-3, 3.0
"""Seconds per layer and micro-batch that launching costs whatever the size, and how much more
with tensor parallelism, whose collectives wait for each other. Chosen among a few round values on
published tables (so an in-sample figure): nanotron's 1.3B rows rank at 0.80 instead of 0.53
(Spearman, median over groups) with it, bigscience's V100 rows at 0.94 instead of 0.62."""
_OVERLAPPED = 0.7
"""Share of a gradient exchange that hides behind the backward pass where overlap is on."""


@dataclass(frozen=True)
class TimeParts:
    """Seconds of one step; None: unknown because a bandwidth or the peak is."""

    compute: float | None
    """Matrix products of all micro-batches, recomputation included."""
    bubble: float | None
    launch: float
    """Fixed cost per layer and micro-batch."""
    tensor: float | None
    context: float | None
    pipeline: float | None
    expert: float | None
    data: float | None
    work: float
    """FLOPs on the critical path of one rank, bubble included: known without any peak."""

    @property
    def total(self) -> float | None:
        """The step; None if any part is unknown."""
        parts = (
            self.compute, self.bubble, self.launch, self.tensor, self.context, self.pipeline,
            self.expert, self.data,
        )  # fmt: skip
        total = 0.0
        for part in parts:
            if part is None:
                return None
            total += part
        return total


def time_parts(config: Config, facts: StudyFacts) -> TimeParts | None:
    """Return the parts of a step; None without a model or with a batch that does not divide."""
    model = facts.model
    rounds = layout.micro_batch_num(config, facts)
    if model is None or rounds is None:
        return None
    stages, chunks = layout.pipeline_stage(config), layout.interleave(config)
    tokens = layout.micro_batch_size(config) * model.seq_length / layout.context_parallel(config)
    flops = tokens / layout.model_parallel(config) * _stage_flops(config, model)
    waiting = (stages - 1) / chunks
    peak = facts.cluster.peak_flops
    per_round = None if peak is None else flops / (peak * _EFFICIENCY)
    return TimeParts(
        compute=None if per_round is None else rounds * per_round,
        bubble=0.0 if stages == 1 else None if per_round is None else waiting * per_round,
        launch=_launch(config, model, rounds + waiting),
        tensor=_tensor(config, facts, model, tokens, rounds + waiting),
        context=_context(config, facts, model, tokens, rounds + waiting),
        pipeline=_pipeline(config, facts, model, tokens, rounds + waiting),
        expert=_expert(config, facts, model, tokens, rounds + waiting),
        data=_data(config, facts, model),
        work=flops * (rounds + waiting),
    )


def _stage_flops(config: Config, model: ModelShape) -> float:
    """Return FLOPs per token of the last stage, which has the output layer."""
    stages = layout.pipeline_stage(config)
    recompute = model.recompute_flops(str(config["recompute"]))
    layers = 3.0 * model.num_layers * model.layer_flops.total + recompute
    return layers / stages + 3.0 * model.head_flops


def _launch(config: Config, model: ModelShape, rounds: float) -> float:
    factor = _LAUNCH_FACTOR if layout.model_parallel(config) > 1 else 1.0
    return _LAUNCH_S * factor * rounds * layout.layers_per_stage(config, model.num_layers)


def _bandwidth(facts: StudyFacts, span: int) -> float | None:
    """Return bytes per second and rank of a group that spans `span` neighbouring devices."""
    cluster = facts.cluster
    if span <= cluster.node_size:
        return cluster.intra_node_bandwidth
    return cluster.inter_node_bandwidth


def _seconds(volume: float, bandwidth: float | None) -> float | None:
    if volume == 0.0:
        return 0.0
    return None if bandwidth is None else volume / bandwidth


def _activation_bytes(
    config: Config, facts: StudyFacts, model: ModelShape, tokens: float
) -> float:
    return tokens * model.hidden_size * (2 if layout.precision(config, facts) != "float32" else 4)


def _tensor(
    config: Config, facts: StudyFacts, model: ModelShape, tokens: float, rounds: float
) -> float | None:
    tensor = layout.model_parallel(config)
    repeated = recomputed_layers(str(config["recompute"]), model.num_layers) / model.num_layers
    exchanges = (4 + 2 * repeated) * layout.layers_per_stage(config, model.num_layers)
    ring = 2 * (tensor - 1) / tensor
    volume = exchanges * ring * rounds * _activation_bytes(config, facts, model, tokens)
    return _seconds(volume, _bandwidth(facts, tensor))


def _context(
    config: Config, facts: StudyFacts, model: ModelShape, tokens: float, rounds: float
) -> float | None:
    context = layout.context_parallel(config)
    tensor = layout.model_parallel(config)
    # Ring attention passes every rank's keys and values around once forward, and backward again
    # together with their gradients (Liu et al., arXiv 2310.01889).
    layers = layout.layers_per_stage(config, model.num_layers)
    element = 2 if layout.precision(config, facts) != "float32" else 4
    passed = 3.0 * 2 * (context - 1) * tokens * model.kv_size / tensor * element
    return _seconds(passed * layers * rounds, _bandwidth(facts, context * tensor))


def _pipeline(
    config: Config, facts: StudyFacts, model: ModelShape, tokens: float, rounds: float
) -> float | None:
    stages, chunks = layout.pipeline_stage(config), layout.interleave(config)
    if stages == 1:
        return 0.0
    # One activation forward and one gradient back per micro-batch and chunk.
    volume = 2.0 * chunks * rounds * _activation_bytes(config, facts, model, tokens)
    return _seconds(volume, _bandwidth(facts, layout.num_ranks(config)))


def _expert(
    config: Config, facts: StudyFacts, model: ModelShape, tokens: float, rounds: float
) -> float | None:
    experts = layout.expert_parallel(config)
    # Dispatch and combine, forward and backward: four all-to-alls per layer.
    sent = 4.0 * layout.layers_per_stage(config, model.num_layers) * (experts - 1) / experts
    routed = model.active_experts * _activation_bytes(config, facts, model, tokens)
    return _seconds(
        sent * rounds * routed, _bandwidth(facts, experts * layout.model_parallel(config))
    )


def _data(config: Config, facts: StudyFacts, model: ModelShape) -> float | None:
    replicas = layout.data_parallel(config) * layout.context_parallel(config)
    shards = layout.model_parallel(config) * layout.pipeline_stage(config)
    all_experts = model.num_layers * model.expert_layer_parameters
    own_experts = all_experts / layout.expert_parallel(config)
    held = model.num_parameters - all_experts + own_experts
    volume = 2 * (replicas - 1) / replicas * 4.0 * held / shards
    method, _, ratio = str(config["gradient_compression"]).partition(":")
    if method == "float16":
        volume /= 2
    elif method == "topk":
        # Every rank gathers the others' values and 32-bit indices.
        volume = (replicas - 1) * 8.0 * float(ratio) * held / shards
    if config["optimizer_sharding"] == "parameter":
        volume *= 1.5
    if config["comm_overlap"]:
        volume *= 1 - _OVERLAPPED
    return _seconds(volume, _bandwidth(facts, layout.num_ranks(config)))
