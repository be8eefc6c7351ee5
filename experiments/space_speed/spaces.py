"""Spaces of about 100,000 configs that stress one part of the check each."""

from __future__ import annotations

from dataclasses import replace

from mindtune.search.facts import Cluster, Limits, StudyFacts, Training
from mindtune.search.model_shape import ModelShape
from mindtune.search.space import Space

__all__ = ["SPACES"]

_LLAMA_8B = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, intermediate_size=14336,
    gated_mlp=True, vocab_size=128256, seq_length=8192, flash_attention=True,
)  # fmt: skip
_CLUSTER = Cluster(
    num_devices=64, devices_per_node=8, device="Ascend910B", device_memory=64 * 2**30,
    peak_flops=313e12, intra_node_bandwidth=196e9, inter_node_bandwidth=25e9,
)  # fmt: skip
_FACTS = StudyFacts(
    cluster=_CLUSTER,
    training=Training(global_batch_size=512, precision="bfloat16"),
    model=_LLAMA_8B,
    limits=Limits(memory_utilization=0.85),
)
_LARGE = replace(
    _FACTS,
    cluster=replace(_CLUSTER, num_devices=16384),
    training=Training(global_batch_size=16384, precision="bfloat16"),
)
_ROOMY = replace(_FACTS, cluster=replace(_CLUSTER, device_memory=None, allow_idle=True))

_DEGREES = {"data_parallel": "auto", "model_parallel": "auto", "pipeline_stage": "auto"}
_REST: dict[str, object] = {
    "micro_batch_size": [1, 2, 4, 8],
    "recompute": ["none", "selective", "interval:2", "full"],
    "optimizer_sharding": ["none", "optimizer", "parameter"],
    "use_seq_parallel": "auto",
    "comm_overlap": "auto",
    "optimizer_offload": "auto",
}


def _usual() -> Space:
    return Space.from_spec({**_DEGREES, **_REST}, _FACTS)


def _large() -> Space:
    return Space.from_spec({**_DEGREES, **_REST}, _LARGE)


def _cheap_knobs() -> Space:
    """Return a space whose configs are all feasible and mostly alike to the cost model."""
    spec: dict[str, object] = {
        **_REST, "data_parallel": 64, "use_seq_parallel": False, "comm_fusion": [0, 2, 4, 8, 16],
        "data_workers": [1, 2, 4, 8], "prefetch": [2, 4, 8, 16], "env.A": [*"0123456789"],
        "micro_batch_size": [1, 2, 4],
    }  # fmt: skip
    return Space.from_spec(spec, _ROOMY)


def _own_costs() -> Space:
    """Return a space whose configs are all feasible, each with a cost of its own."""
    spec: dict[str, object] = {
        "data_parallel": [2, 4, 8], "model_parallel": [1, 2, 4, 8],
        "micro_batch_size": [1, 2, 4, 8, 16, 32, 64],
        "recompute": ["none", "selective", *(f"interval:{k}" for k in range(1, 33))],
        "optimizer_sharding": ["none", "optimizer", "gradient", "parameter"],
        "comm_overlap": "auto", "optimizer_offload": "auto", "precision": "auto",
    }  # fmt: skip
    return Space.from_spec(spec, _ROOMY)


SPACES = {
    "64 devices, usual knobs": _usual,
    "16,384 devices, usual knobs": _large,
    "all feasible, few costs": _cheap_knobs,
    "all feasible, each its own cost": _own_costs,
}
"""Name -> how it is built."""
