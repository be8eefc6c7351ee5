"""The named problems: models, machines and spaces of about 200, 2,000 and 100,000 configs.

`problem("dense_64_2000", seed)` is a space of about 2,000 configs of a dense model on the
64-device cluster of that seed.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindtune.experiments.cluster_simulator.machine import draw_machine
from mindtune.experiments.cluster_simulator.problem import SimulatedProblem
from mindtune.search.facts import Limits, StudyFacts, Training
from mindtune.search.model_shape import ModelShape
from mindtune.search.space import Space

__all__ = ["KINDS", "problem"]

_GPT_1B = ModelShape(
    num_layers=24, hidden_size=2048, num_heads=16, intermediate_size=8192, vocab_size=51200,
    seq_length=2048, flash_attention=True,
)  # fmt: skip
_LLAMA_8B = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, intermediate_size=14336,
    gated_mlp=True, vocab_size=128256, seq_length=8192, flash_attention=True,
)  # fmt: skip
_LLAMA_70B = ModelShape(
    num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, intermediate_size=28672,
    gated_mlp=True, vocab_size=128256, seq_length=8192, flash_attention=True,
)  # fmt: skip
_LLAMA_405B = ModelShape(
    num_layers=128, hidden_size=16384, num_heads=128, num_kv_heads=8, intermediate_size=53248,
    gated_mlp=True, vocab_size=128256, seq_length=8192, flash_attention=True,
)  # fmt: skip
_MOE_13B = ModelShape(
    num_layers=24, hidden_size=2048, num_heads=16, intermediate_size=5632, vocab_size=51200,
    seq_length=4096, gated_mlp=True, flash_attention=True, num_experts=32, experts_per_token=4,
    moe_intermediate_size=2816,
)  # fmt: skip
_MIXTRAL = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, intermediate_size=14336,
    gated_mlp=True, vocab_size=32000, seq_length=8192, flash_attention=True, num_experts=8,
    experts_per_token=2,
)  # fmt: skip
"""Shapes as published for Llama 3 (arXiv 2407.21783, table 3; 128 layers instead of 126, which
divide over stages) and Mixtral (arXiv 2401.04088, table 1), and two small ones."""

_BY_LAYER = ["none", "interval:2", "full"]
_RECOMPUTE = ["none", "selective", "interval:2", "full"]
_INPUT: dict[str, object] = {"data_workers": [1, 2, 4], "prefetch": [2, 8]}
"""Knobs that matter little where data is ready."""


def _large(**own: object) -> dict[str, object]:
    """Return the space of a large cluster.

    Args:
        **own: Degrees besides data and tensor parallelism, then micro-batches and recomputation.
    """
    return {
        "data_parallel": "auto", "model_parallel": [1, 2, 4, 8], **own,
        "optimizer_sharding": ["none", "optimizer", "parameter"],
        "use_seq_parallel": "auto", "comm_overlap": "auto",
    }  # fmt: skip


_DENSE_1024 = _large(
    pipeline_stage=[1, 2, 4, 8, 16, 20], pp_interleave_num=[1, 2],
    micro_batch_size=[1, 2, 4, 8], recompute=_RECOMPUTE,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Kind:
    devices: int
    model: ModelShape
    batch: int
    space: dict[str, object]
    node_size: int = 8


KINDS: dict[str, _Kind] = {
    "dense_8_200": _Kind(
        devices=8, model=_GPT_1B, batch=64,
        space={
            "data_parallel": "auto", "model_parallel": "auto", "micro_batch_size": [1, 2, 4, 8],
            "recompute": _BY_LAYER,
        },
    ),
    "compressed_8_200": _Kind(
        # Nodes of two, so that gradients cross slow links.
        devices=8, model=_GPT_1B, batch=64, node_size=2,
        space={
            "data_parallel": [2, 4, 8], "model_parallel": [1, 2, 4],
            "micro_batch_size": [1, 2, 4], "recompute": ["none", "full"],
            "gradient_compression": ["none", "float16", "topk:0.01", "topk:0.1"],
        },
    ),
    "dense_64_2000": _Kind(
        devices=64, model=_LLAMA_8B, batch=256,
        space={
            "data_parallel": "auto", "model_parallel": [1, 2, 4, 8],
            "pipeline_stage": [1, 2, 4, 8], "micro_batch_size": [1, 2, 4], "recompute": _BY_LAYER,
            "optimizer_sharding": ["none", "optimizer"],
        },
    ),
    "experts_64_2000": _Kind(
        devices=64, model=_MOE_13B, batch=256,
        space={
            "data_parallel": "auto", "model_parallel": [1, 2, 4, 8],
            "expert_parallel": [1, 4, 8, 16], "micro_batch_size": [1, 2, 4],
            "recompute": _BY_LAYER,
            "optimizer_sharding": ["none", "optimizer"],
        },
    ),
    "compressed_64_2000": _Kind(
        devices=64, model=_GPT_1B, batch=512,
        space={
            "data_parallel": "auto", "model_parallel": [1, 2, 4, 8],
            "micro_batch_size": [1, 2, 4, 8], "recompute": _BY_LAYER,
            "gradient_compression": ["none", "float16", "topk:0.1"],
            "comm_overlap": "auto",
        },
    ),
    "dense_1024_100000": _Kind(
        devices=1024, model=_LLAMA_70B, batch=2048, space=_DENSE_1024,
    ),
    "dense_1024_2000000": _Kind(
        # As above, with knobs that every layout has: 138,240 of its configs fill the cluster.
        devices=1024, model=_LLAMA_70B, batch=2048,
        space={**_DENSE_1024, "comm_fusion": [0, 8, 32], **_INPUT},
    ),
    "experts_1024_100000": _Kind(
        devices=1024, model=_MIXTRAL, batch=4096,
        space=_large(
            pipeline_stage=[1, 2, 4, 8, 16], expert_parallel=[1, 2, 4, 8],
            micro_batch_size=[1, 2, 4, 8], recompute=_BY_LAYER,
        ),
    ),
    "compressed_64_100000": _Kind(
        devices=64, model=_GPT_1B, batch=512,
        space={
            "data_parallel": "auto", "model_parallel": [1, 2, 4, 8],
            "micro_batch_size": [1, 2, 4, 8], "recompute": _RECOMPUTE,
            "gradient_compression": ["none", "float16", "topk:0.001", "topk:0.01", "topk:0.1"],
            "comm_overlap": "auto", "comm_fusion": [0, 4, 8, 32], **_INPUT,
        },
    ),
    "dense_16384_100000": _Kind(
        devices=16384, model=_LLAMA_405B, batch=16384,
        space=_large(
            pipeline_stage=[1, 2, 4, 8, 16, 32], pp_interleave_num=[1, 2],
            micro_batch_size=[1, 2, 4], recompute=_RECOMPUTE,
        ),
    ),
}  # fmt: skip
"""Name -> model, size of the cluster and space; the name ends with devices and configs."""


def problem(kind: str, seed: int) -> SimulatedProblem:
    """Return a problem on the cluster of a seed."""
    what = KINDS[kind]
    machine = draw_machine(seed, what.devices, node_size=what.node_size)
    facts = StudyFacts(
        cluster=machine.stated(),
        training=Training(global_batch_size=what.batch, precision="bfloat16"),
        model=what.model,
        limits=Limits(memory_utilization=0.9),
    )
    return SimulatedProblem(f"{kind}_seed{seed}", machine, Space.from_spec(what.space, facts))
