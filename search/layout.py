"""The one definition of every size that follows from a complete config.

A complete config has a value for every knob (`Space.complete`). Experts lie inside data
parallelism: expert_parallel never multiplies the number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from mindtune.search.facts import StudyFacts
from mindtune.search.knobs import Config, KnobValue
from mindtune.search.stage_list import StageList, column_sums, parse_stage_list

__all__ = [
    "DEGREES",
    "balanced_offset",
    "chunk_layers",
    "compression_factor",
    "context_parallel",
    "data_parallel",
    "expert_parallel",
    "expert_ranks",
    "expert_tensor",
    "interleave",
    "layers_per_stage",
    "micro_batch_num",
    "micro_batch_size",
    "model_parallel",
    "num_ranks",
    "offset_rows",
    "padded_vocabulary",
    "pipeline_bubble",
    "pipeline_stage",
    "precision",
    "recompute_overhead",
    "recompute_share",
    "repeated_among",
    "repeated_layers",
    "replicas",
    "stage_layers",
]

DEGREES = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel")
"""Degrees whose product is the number of ranks."""


def data_parallel(config: Config) -> int:
    """Return the number of replicas."""
    return int(config["data_parallel"])


def model_parallel(config: Config) -> int:
    """Return the tensor parallel degree."""
    return int(config["model_parallel"])


def pipeline_stage(config: Config) -> int:
    """Return the number of pipeline stages."""
    return int(config["pipeline_stage"])


def context_parallel(config: Config) -> int:
    """Return the number of ranks that share each sequence."""
    return int(config["context_parallel"])


def expert_parallel(config: Config) -> int:
    """Return the number of ranks that share the experts."""
    return int(config["expert_parallel"])


def expert_ranks(config: Config, facts: StudyFacts) -> int:
    """Return the ranks that experts may be spread over.

    Those of data parallelism; in MindFormers those of its tensor groups besides: its
    `FFNGroupedGEMM` asks that expert_parallel divides data_parallel x model_parallel.
    """
    extended = facts.limits.framework == "mindformers"
    return data_parallel(config) * (model_parallel(config) if extended else 1)


def expert_tensor(config: Config, facts: StudyFacts) -> int:
    """Return the ranks that split each expert's matrices: none do in MindFormers."""
    return 1 if facts.limits.framework == "mindformers" else model_parallel(config)


def interleave(config: Config) -> int:
    """Return the number of model chunks per stage."""
    return int(config["pp_interleave_num"])


def micro_batch_size(config: Config) -> int:
    """Return the samples per rank and micro-batch."""
    return int(config["micro_batch_size"])


def num_ranks(config: Mapping[str, KnobValue]) -> int:
    """Return the devices that the config uses; a degree that it does not name is 1."""
    return math.prod(int(config.get(name, 1)) for name in DEGREES)


def replicas(config: Config) -> int:
    """Return the ranks that hold the same weights: those of data and of context parallelism."""
    return data_parallel(config) * context_parallel(config)


def micro_batch_num(config: Config, facts: StudyFacts) -> int | None:
    """Return the micro-batches per step; None where the batch does not divide."""
    per_round = data_parallel(config) * micro_batch_size(config)
    rounds, rest = divmod(facts.training.global_batch_size, per_round)
    return None if rest else rounds


def balanced_offset(num_layers: int, stages: int, chunks: int) -> StageList:
    """Return the layers beyond an even split, at most one per chunk, away from both ends.

    Every stage gets one before any gets two. They go to the last stage but one first, then to
    those before it: a later stage holds fewer micro-batches (1F1B), and the last one has the
    output layer besides. The very first and the very last chunk come last: beside embedding and
    output layer they may hold no layer at all.
    """
    order = [*range(stages - 2, -1, -1), stages - 1]
    rows = [[0] * stages for _ in range(chunks)]
    for number in range(num_layers % (stages * chunks)):
        turn, stage = number // stages, order[number % stages]
        rows[chunks - 1 - turn if stage == 0 else turn][stage] = 1
    return tuple(map(tuple, rows))


def offset_rows(config: Config, num_layers: int) -> StageList:
    """Return the layers of every chunk and stage beyond an even split."""
    offset, stages, chunks = str(config["offset"]), pipeline_stage(config), interleave(config)
    if offset == "even":
        return ((0,) * stages,) * chunks
    if offset == "balanced":
        return balanced_offset(num_layers, stages, chunks)
    return parse_stage_list(offset)


def chunk_layers(config: Config, num_layers: int) -> StageList:
    """Return the layers of every chunk (row) and stage (column).

    As in MindFormers: num_layers // (stages x chunks) plus the offset. The sum is num_layers only
    where the rule `layers_per_stage` holds.
    """
    share = num_layers // (pipeline_stage(config) * interleave(config))
    rows = offset_rows(config, num_layers)
    return tuple(tuple(share + extra for extra in row) for row in rows)


@lru_cache(maxsize=4096)
def _stage_layers(offset: str, stages: int, chunks: int, num_layers: int) -> tuple[int, ...]:
    config: Config = {
        "offset": offset, "pipeline_stage": stages, "pp_interleave_num": chunks,
    }  # fmt: skip
    return column_sums(chunk_layers(config, num_layers))


def stage_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return the layers of every pipeline stage, over its chunks."""
    return _stage_layers(
        str(config["offset"]), pipeline_stage(config), interleave(config), num_layers
    )


def layers_per_stage(config: Config, num_layers: int) -> float:
    """Return the layers of the pipeline stage that has the most: it sets the pace."""
    if config["offset"] == "even":
        return num_layers / pipeline_stage(config)
    return float(max(stage_layers(config, num_layers)))


def repeated_layers(config: Config, num_layers: int) -> tuple[tuple[float, float], ...]:
    """Return, per pipeline stage, the layers repeated whole and those whose attention is."""
    return repeated_among(str(config["recompute"]), stage_layers(config, num_layers))


@lru_cache(maxsize=4096)
def repeated_among(recompute: str, layers: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
    """Return `repeated_layers` where the layers of each stage are known."""
    kind, _, detail = recompute.partition(":")
    if kind == "none":
        return ((0.0, 0.0),) * len(layers)
    if kind in ("full", "interval"):
        return tuple((count / int(detail or 1), 0.0) for count in layers)
    counts = column_sums(parse_stage_list(detail)) if detail else layers
    return tuple((float(n), 0.0) if kind == "layers" else (0.0, float(n)) for n in counts)


def pipeline_bubble(config: Config, facts: StudyFacts) -> float:
    """Return the share of a step that stages wait: (p - 1) / (m * v + p - 1).

    Narayanan et al., arXiv 2104.04473, section 2.2. A batch that does not divide counts as its
    next smaller number of micro-batches.
    """
    stages = pipeline_stage(config)
    per_round = data_parallel(config) * micro_batch_size(config)
    rounds = max(facts.training.global_batch_size // per_round, 1) * interleave(config)
    return (stages - 1) / (rounds + stages - 1)


def recompute_overhead(config: Config, facts: StudyFacts) -> float | None:
    """Return recomputation's FLOPs over those of the same step without it; None: no model."""
    if config["recompute"] == "none":
        return 0.0
    if facts.model is None:
        return None
    return facts.model.recompute_flops(str(config["recompute"])) / facts.model.model_flops


def recompute_share(config: Config, facts: StudyFacts) -> float | None:
    """Return the share of a step's FLOPs that recomputation takes; None without a model."""
    overhead = recompute_overhead(config, facts)
    return None if overhead is None else overhead / (1.0 + overhead)


def padded_vocabulary(vocab_size: int, tensor: int) -> int:
    """Return the vocabulary padded to a multiple of 128 x tensor parallel, as by Megatron-LM."""
    multiple = 128 * tensor
    return -(-vocab_size // multiple) * multiple


def compression_factor(method: str) -> float | None:
    """Return how many times fewer bytes than float32 gradients a method sends; None: no method.

    A kept entry of `topk:R` is a float32 value and an int32 index.
    """
    kind, _, ratio = method.partition(":")
    if kind == "topk":
        return 1 / (2 * float(ratio))
    return {"float16": 2.0, "int8": 4.0}.get(kind)


def precision(config: Config, facts: StudyFacts) -> str:
    """Return the number format of the matrix products."""
    return str(config.get("precision", facts.training.precision))
