"""Advice: what experience says about a config. It orders, it never rejects.

The thresholds are the project's rules of thumb for large clusters; the study file's constraints
turn some of them into hard limits (`rules.py`).
"""

from __future__ import annotations

from mindtune.search import layout
from mindtune.search.cost_model import CostModel
from mindtune.search.knobs import Config

__all__ = ["advice"]

MIN_MICRO_BATCHES_PER_STAGE = 4
MAX_PIPELINE_BUBBLE = 0.15
MAX_RECOMPUTE_OVERHEAD = 0.30
"""Over the step without recomputation; repeating every layer adds about a third."""
OVERLAP_HEADROOM = 0.15
"""Share of the device memory that overlapped communication buffers may need."""
MIN_COMPRESSION = 2.0


def advice(config: Config, cost: CostModel) -> tuple[str, ...]:
    """Return what speaks against a complete config, in words and numbers; empty: nothing."""
    found = (check(config, cost) for check in _CHECKS)
    return tuple(message for message in found if message is not None)


def _tensor_parallel(config: Config, cost: CostModel) -> str | None:
    tensor, node = layout.model_parallel(config), cost.facts.cluster.node_size
    if node % tensor == 0:
        return None
    return f"model_parallel = {tensor} spans nodes of {node} devices: slow links in every layer"


def _micro_batches(config: Config, cost: CostModel) -> str | None:
    stages, rounds = layout.pipeline_stage(config), layout.micro_batch_num(config, cost.facts)
    if stages == 1 or rounds is None or rounds >= MIN_MICRO_BATCHES_PER_STAGE * stages:
        return None
    return (
        f"micro_batch_num = {rounds} is below {MIN_MICRO_BATCHES_PER_STAGE} x pipeline_stage = "
        f"{MIN_MICRO_BATCHES_PER_STAGE * stages}"
    )


def _bubble(config: Config, cost: CostModel) -> str | None:
    bubble = layout.pipeline_bubble(config, cost.facts)
    if bubble <= MAX_PIPELINE_BUBBLE:
        return None
    return f"pipeline bubble = {bubble:.2f} of the step is above {MAX_PIPELINE_BUBBLE:g}"


def _recompute(config: Config, cost: CostModel) -> str | None:
    overhead = layout.recompute_overhead(config, cost.facts)
    if overhead is None or overhead <= MAX_RECOMPUTE_OVERHEAD:
        return None
    return (
        f"recompute = {config['recompute']} adds {overhead:.2f} of the step's FLOPs: more than "
        f"{MAX_RECOMPUTE_OVERHEAD:g}"
    )


def _overlap(config: Config, cost: CostModel) -> str | None:
    device_memory = cost.facts.cluster.device_memory
    if not config["comm_overlap"] or device_memory is None:
        return None
    predicted = cost.memory_bytes(config)
    if predicted is None or predicted <= (1 - OVERLAP_HEADROOM) * device_memory:
        return None
    return (
        f"comm_overlap wants {OVERLAP_HEADROOM:.0%} of the memory free, but "
        f"{1 - predicted / device_memory:.0%} is predicted"
    )


def _compression(config: Config, _cost: CostModel) -> str | None:
    method, _, ratio = str(config["gradient_compression"]).partition(":")
    # A kept entry costs a float32 value and an int32 index.
    if method != "topk" or 1 / (2 * float(ratio)) >= MIN_COMPRESSION:
        return None
    return (
        f"gradient_compression = topk:{ratio} sends {2 * float(ratio):.2g} of the bytes with its "
        f"indices: less than {MIN_COMPRESSION:g}x saved"
    )


_CHECKS = (_tensor_parallel, _micro_batches, _bubble, _recompute, _overlap, _compression)
