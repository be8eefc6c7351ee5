"""The one definition of every size that follows from a complete config.

A complete config has a value for every knob (`Space.complete`). Experts lie inside data
parallelism: expert_parallel never multiplies the number of devices.
"""

from __future__ import annotations

from mindtune.search.facts import StudyFacts
from mindtune.search.knobs import Config

__all__ = [
    "DEGREES",
    "context_parallel",
    "data_parallel",
    "expert_parallel",
    "interleave",
    "layers_per_stage",
    "micro_batch_num",
    "micro_batch_size",
    "model_parallel",
    "num_ranks",
    "pipeline_bubble",
    "pipeline_stage",
    "precision",
    "recompute_overhead",
    "recompute_share",
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


def interleave(config: Config) -> int:
    """Return the number of model chunks per stage."""
    return int(config["pp_interleave_num"])


def micro_batch_size(config: Config) -> int:
    """Return the samples per rank and micro-batch."""
    return int(config["micro_batch_size"])


def num_ranks(config: Config) -> int:
    """Return the devices that the config uses."""
    return (
        data_parallel(config)
        * model_parallel(config)
        * pipeline_stage(config)
        * context_parallel(config)
    )


def micro_batch_num(config: Config, facts: StudyFacts) -> int | None:
    """Return the micro-batches per step; None where the batch does not divide."""
    per_round = data_parallel(config) * micro_batch_size(config)
    rounds, rest = divmod(facts.training.global_batch_size, per_round)
    return None if rest else rounds


def layers_per_stage(config: Config, num_layers: int) -> float:
    """Return the layers of one pipeline stage."""
    return num_layers / pipeline_stage(config)


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


def precision(config: Config, facts: StudyFacts) -> str:
    """Return the number format of the matrix products."""
    return str(config.get("precision", facts.training.precision))
