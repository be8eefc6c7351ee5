"""Advice: what experience says about a config. It orders, and rejects only what users set.

The numbers are the project's rules of thumb for large clusters. A key of the study file's
`constraints` makes a piece of advice a hard rule, with the user's number: see `SoftRule`. They
stay advice otherwise, since no rule of thumb holds everywhere: of 45 groups of published runs that
tried pipelines, the best config has 4 to 8 micro-batches per stage in 14, fewer in 5, more in 17,
and no pipeline in 9.
"""

from __future__ import annotations

from mindtune.search import layout
from mindtune.search.cost_model import COST_KNOBS, CostModel
from mindtune.search.facts import size_text
from mindtune.search.knobs import Config
from mindtune.search.rule import SoftRule

__all__ = ["ADVICE", "advice"]


def advice(config: Config, cost: CostModel) -> tuple[str, ...]:
    """Return what speaks against a complete config, in words and numbers; empty: nothing."""
    found = (soft.advise(config, cost) for soft in ADVICE)
    return tuple(message for message in found if message is not None)


def _tensor_parallel(config: Config, cost: CostModel, _limit: float) -> str | None:
    tensor, node = layout.model_parallel(config), cost.facts.cluster.node_size
    if node % tensor == 0:
        return None
    return (
        f"model_parallel = {tensor} does not divide devices_per_node = {node}: groups span nodes, "
        "with slow links in every layer"
    )


def _vocabulary(config: Config, cost: CostModel, _limit: float) -> str | None:
    model, tensor = cost.facts.model, layout.model_parallel(config)
    if model is None or model.vocab_size % tensor == 0:
        return None
    padded = layout.padded_vocabulary(model.vocab_size, tensor)
    return (
        f"vocab_size = {model.vocab_size} is no multiple of model_parallel = {tensor}: pad it to "
        f"{padded}, or the output layer stays whole on every rank"
    )


def _few_micro_batches(config: Config, cost: CostModel, limit: float) -> str | None:
    stages, rounds = layout.pipeline_stage(config), layout.micro_batch_num(config, cost.facts)
    if stages == 1 or rounds is None or rounds >= limit * stages:
        return None
    return f"micro_batch_num = {rounds} is below {limit:g} x pipeline_stage = {limit * stages:g}"


def _many_micro_batches(config: Config, cost: CostModel, limit: float) -> str | None:
    stages, rounds = layout.pipeline_stage(config), layout.micro_batch_num(config, cost.facts)
    if stages == 1 or rounds is None or rounds <= limit * stages:
        return None
    return (
        f"micro_batch_num = {rounds} is above {limit:g} x pipeline_stage = {limit * stages:g}: "
        "the bubble is small, larger micro-batches use a device better"
    )


def _bubble(config: Config, cost: CostModel, limit: float) -> str | None:
    bubble = layout.pipeline_bubble(config, cost.facts)
    if bubble <= limit:
        return None
    return f"pipeline bubble = {bubble:.3f} of the step is above {limit:g}"


def _recompute(config: Config, cost: CostModel, limit: float) -> str | None:
    share = layout.recompute_share(config, cost.facts)
    if share is None or share <= limit:
        return None
    return (
        f"recompute = {config['recompute']} takes {share:.3f} of the step's FLOPs: more than "
        f"{limit:.3g}"
    )


def _overlap(config: Config, cost: CostModel, limit: float) -> str | None:
    device_memory = cost.facts.cluster.device_memory
    if not config["comm_overlap"] or device_memory is None:
        return None
    predicted = cost.memory_bytes(config)
    if predicted is None or predicted <= (1 - limit) * device_memory:
        return None
    return (
        f"comm_overlap wants {limit:.0%} of the memory free for its buffers, but "
        f"{size_text(predicted)} of {size_text(device_memory)} are predicted"
    )


def _compression(config: Config, _cost: CostModel, limit: float) -> str | None:
    method = str(config["gradient_compression"])
    saved = layout.compression_factor(method)
    if saved is None or saved >= limit:
        return None
    return f"gradient_compression = {method} saves {saved:.3g}x of the bytes: less than {limit:g}x"


_PIPELINE = ("data_parallel", "micro_batch_size", "pipeline_stage")

ADVICE: tuple[SoftRule, ...] = (
    SoftRule("tensor_parallel_inside_node", "tensor parallel groups lie inside a node",
             ("model_parallel",), "tensor_parallel_inside_node", 1, _tensor_parallel),
    # Both frameworks run without: Megatron-LM pads to a multiple of 128 x tensor parallel
    # (make_vocab_size_divisible_by), MindFormers leaves the output layer whole and warns.
    SoftRule("vocab_divisible", "model_parallel divides vocab_size",
             ("model_parallel",), "vocab_divisible", 1, _vocabulary),
    SoftRule("micro_batches_per_stage", "micro_batch_num is large against pipeline_stage",
             _PIPELINE, "min_micro_batches_per_stage", 4, _few_micro_batches),
    SoftRule("max_micro_batches_per_stage", "micro_batch_num is not too large for its stages",
             _PIPELINE, "max_micro_batches_per_stage", 8, _many_micro_batches),
    SoftRule("max_pipeline_bubble", "the pipeline's bubble is small",
             (*_PIPELINE, "pp_interleave_num"), "max_pipeline_bubble", 0.15, _bubble),
    # Work worth 30 % of the step without it, as a share of the step with it.
    SoftRule("max_recompute_share", "recomputation is cheap",
             ("recompute",), "max_recompute_share", 0.3 / 1.3, _recompute),
    SoftRule("compression_pays", "gradient compression saves bytes enough",
             ("gradient_compression",), "min_compression", 2.0, _compression),
    SoftRule("overlap_headroom", "comm_overlap leaves memory for its buffers",
             COST_KNOBS, "min_overlap_headroom", 0.15, _overlap),
)  # fmt: skip
"""In the order in which they are told."""
