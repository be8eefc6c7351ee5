"""The hard rules, in the order in which they are asked: a config counts under the first failure.

Each rule is a function from a complete config to its reason, in words and numbers, or None. To
add one, write the function and one line in `RULES`; `reads` names every knob it looks at.
"""

from __future__ import annotations

import math

from mindtune.search import layout
from mindtune.search.advice import ADVICE
from mindtune.search.cost_model import COST_KNOBS, FAR, CostModel
from mindtune.search.facts import size_text
from mindtune.search.knobs import Config, knob_text
from mindtune.search.pipeline_rules import PIPELINE_RULES, RECOMPUTE_RULES
from mindtune.search.rule import Check, Rule

__all__ = ["RULES"]


def _degrees_fill_cluster(config: Config, cost: CostModel) -> str | None:
    cluster = cost.facts.cluster
    ranks = layout.num_ranks(config)
    if ranks == cluster.num_devices or (cluster.allow_idle and ranks < cluster.num_devices):
        return None
    product = " x ".join(str(config[name]) for name in layout.DEGREES)
    relation = "be at most" if cluster.allow_idle else "be"
    return (
        f"{' x '.join(layout.DEGREES)} must {relation} num_devices = {cluster.num_devices}, but "
        f"{product} = {ranks}"
    )


def _ranks_fill_nodes(config: Config, cost: CostModel) -> str | None:
    cluster = cost.facts.cluster
    ranks, per_node = layout.num_ranks(config), cluster.node_size
    if not cluster.whole_nodes or ranks <= per_node or ranks % per_node == 0:
        return None
    return (
        f"more ranks than one node has must be a multiple of devices_per_node = {per_node}, but "
        f"{' x '.join(layout.DEGREES)} = {ranks}"
    )


def _micro_batch_identity(config: Config, cost: CostModel) -> str | None:
    if layout.micro_batch_num(config, cost.facts) is not None:
        return None
    per_round = layout.data_parallel(config) * layout.micro_batch_size(config)
    batch = cost.facts.training.global_batch_size
    return (
        f"global_batch_size = {batch} must be a multiple of data_parallel x micro_batch_size = "
        f"{config['data_parallel']} x {config['micro_batch_size']} = {per_round}, so that "
        "micro_batch_num is whole"
    )


def _not_divisible(what: str, size: int, by: str, degree: int) -> str | None:
    if size % degree == 0:
        return None
    return f"{what} = {size} must be a multiple of {by} = {degree}"


def _divided_by_model_parallel(what: str) -> Check:
    def check(config: Config, cost: CostModel) -> str | None:
        model = cost.facts.model
        if model is None:
            return None
        size, tensor = getattr(model, _FIELDS.get(what, what)), layout.model_parallel(config)
        # Other programs repeat keys and values where ranks outnumber their heads (PaLM's one).
        is_repeated = what == "num_kv_heads" and tensor % size == 0
        if is_repeated and cost.facts.limits.framework == "other":
            return None
        name = what
        if what == "intermediate_size" and model.num_experts:
            size, tensor = model.mlp_width, layout.expert_tensor(config, cost.facts)
            name = "moe_intermediate_size" if model.moe_intermediate_size else what
        return _not_divisible(name, size, "model_parallel", tensor)

    return check


_FIELDS = {"num_kv_heads": "kv_heads"}
"""Size in the study file -> field of the model's shape, where they differ."""


def _sequence_per_context_rank(config: Config, cost: CostModel) -> str | None:
    if cost.facts.model is None:
        return None
    length, degree = cost.facts.model.seq_length, layout.context_parallel(config)
    return _not_divisible("seq_length", length, "context_parallel", degree)


def _sequence_parallel_needs_tensor_parallel(config: Config, cost: CostModel) -> str | None:
    if not config["use_seq_parallel"]:
        return None
    tensor, context = layout.model_parallel(config), layout.context_parallel(config)
    if tensor == 1:
        return "use_seq_parallel = true needs model_parallel > 1, but it is 1"
    if cost.facts.model is None:
        return None
    return _not_divisible(
        "seq_length", cost.facts.model.seq_length, "model_parallel x context_parallel",
        tensor * context,
    )  # fmt: skip


def _experts_inside_data_parallel(config: Config, cost: CostModel) -> str | None:
    experts = layout.expert_parallel(config)
    if experts == 1:
        return None
    model = cost.facts.model
    if model is not None and not model.num_experts:
        return f"expert_parallel = {experts} needs a model with experts, but num_experts is null"
    if layout.expert_ranks(config, cost.facts) % experts:
        replicas = layout.data_parallel(config)
        if not _is_mindformers(cost):
            return (
                f"expert_parallel = {experts} lies inside data parallelism and must divide "
                f"data_parallel = {replicas}"
            )
        return (
            f"expert_parallel = {experts} must divide data_parallel x model_parallel = {replicas} "
            f"x {config['model_parallel']} in MindFormers"
        )
    if model is None or model.num_experts is None:
        return None
    return _not_divisible("num_experts", model.num_experts, "expert_parallel", experts)


def _sharding_needs_data_parallel(config: Config, _cost: CostModel) -> str | None:
    sharding = str(config["optimizer_sharding"])
    if sharding == "none" or layout.replicas(config) > 1:
        return None
    return (
        f"optimizer_sharding = {sharding} spreads state over the ranks with the same weights, but "
        "data_parallel = 1 and context_parallel = 1"
    )


_UNAVAILABLE_COMPRESSION = {
    "int8": "summing int8 overflows, and AllReduce of integers has no CPU kernel",
    "powersgd": "its two low-rank exchanges per matrix are not built into the reducer",
}


def _compression_method(config: Config, cost: CostModel) -> str | None:
    method = str(config["gradient_compression"])
    why = _UNAVAILABLE_COMPRESSION.get(method.partition(":")[0])
    if why is None or cost.facts.limits.framework == "other":
        return None
    return f"gradient_compression = {method} cannot be run: {why}; use none, float16 or topk:R"


def _compression_needs_replicas(config: Config, cost: CostModel) -> str | None:
    method = str(config["gradient_compression"])
    if method == "none":
        return None
    if layout.data_parallel(config) == 1:
        return (
            f"gradient_compression = {method} needs gradients to exchange, but data_parallel = 1"
        )
    if cost.facts.limits.framework == "other":
        return None
    for name in ("pipeline_stage", "context_parallel", "expert_parallel"):
        if config[name] != 1:
            return (
                f"gradient_compression = {method} needs {name} = 1, but it is {config[name]}: the "
                "compressing reducer exchanges whole gradients between data-parallel replicas"
            )
    if config["optimizer_sharding"] != "none":
        return (
            f"gradient_compression = {method} needs optimizer_sharding = none, but it is "
            f"{config['optimizer_sharding']}: sharded states take part of each gradient only"
        )
    return None


def _exchange_needs_data_parallel(config: Config, _cost: CostModel) -> str | None:
    if layout.replicas(config) > 1:
        return None
    for name in ("comm_overlap", "comm_fusion"):
        if config[name]:
            return (
                f"{name} = {knob_text(config[name])} has no effect: there is no gradient "
                "exchange with data_parallel = 1 and context_parallel = 1"
            )
    return None


def _offload_needs_device(config: Config, cost: CostModel) -> str | None:
    if not config["optimizer_offload"] or not cost.facts.cluster.is_host:
        return None
    return "optimizer_offload = true has no effect on device cpu: its memory is the host's"


def _context_needs_flash_attention(config: Config, cost: CostModel) -> str | None:
    degree, model = layout.context_parallel(config), cost.facts.model
    if not _is_mindformers(cost) or degree == 1 or model is None or model.flash_attention:
        return None
    return (
        f"context_parallel = {degree} needs flash attention in MindFormers, but "
        "model.flash_attention is false"
    )


def _experts_need_sequence_parallel(config: Config, cost: CostModel) -> str | None:
    tensor, model = layout.model_parallel(config), cost.facts.model
    if not _is_mindformers(cost) or tensor == 1 or model is None or not model.num_experts:
        return None
    if config["use_seq_parallel"]:
        return None
    return (
        f"model_parallel = {tensor} with num_experts = {model.num_experts} needs use_seq_parallel "
        "= true in MindFormers, but it is false"
    )


def _is_mindformers(cost: CostModel) -> bool:
    return cost.facts.limits.framework == "mindformers"


def _memory(config: Config, cost: CostModel) -> str | None:
    limit = cost.facts.memory_limit
    predicted = cost.memory_bytes(config) if limit is not None else None
    if limit is None or predicted is None or predicted <= limit[0]:
        return None
    reason = f"predicted memory = {size_text(predicted)} must be at most {limit[1]}"
    # Trials have shown how far predictions are off: what is near the limit is for the sampler to
    # weigh by its chance. A limit that the user chose rejects all that it rejected before, too.
    spread = None if cost.memory_doubt is None else cost.memory_spread(config)
    if spread is None:
        return reason
    if predicted > limit[0] * math.exp(FAR * spread):
        return f"{reason}, even if predictions are off by {FAR * spread:.0%}"
    is_chosen = cost.facts.has_chosen_memory_limit
    first = cost.uncorrected.memory_bytes(config) if is_chosen else None
    return None if first is None or first <= limit[0] else reason


def _memory_used(config: Config, cost: CostModel) -> str | None:
    least, device_memory = (
        cost.facts.limits.min_memory_utilization,
        cost.facts.cluster.device_memory,
    )
    if least is None or device_memory is None:
        return None
    predicted = cost.memory_bytes(config)
    if predicted is None or predicted >= least * device_memory:
        return None
    return (
        f"predicted memory = {size_text(predicted)} must be at least min_memory_utilization x "
        f"device_memory = {least:g} x {size_text(device_memory)}"
    )


_BY_TENSOR = ("model_parallel",)
_HARD = {soft.name: soft.hard for soft in ADVICE}
"""Advice as the rules that they are where `constraints` set their limit."""

RULES: tuple[Rule, ...] = (
    Rule("degrees_fill_cluster", "the degrees' product is the number of devices",
         layout.DEGREES, _degrees_fill_cluster),
    Rule("ranks_fill_nodes",
         "ranks of several nodes are a multiple of devices_per_node, with Slurm or trial.hosts",
         layout.DEGREES, _ranks_fill_nodes),
    Rule("micro_batch_identity",
         "global_batch_size = data_parallel x micro_batch_size x micro_batch_num, all whole",
         ("data_parallel", "micro_batch_size"), _micro_batch_identity),
    Rule("heads_divisible", "model_parallel divides num_heads",
         _BY_TENSOR, _divided_by_model_parallel("num_heads")),
    Rule("kv_heads_divisible", "model_parallel divides num_kv_heads",
         _BY_TENSOR, _divided_by_model_parallel("num_kv_heads")),
    Rule("hidden_divisible", "model_parallel divides hidden_size",
         _BY_TENSOR, _divided_by_model_parallel("hidden_size")),
    Rule("intermediate_divisible",
         "model_parallel divides the MLP's width (MindFormers leaves experts whole)",
         _BY_TENSOR, _divided_by_model_parallel("intermediate_size")),
    _HARD["vocab_divisible"],
    _HARD["tensor_parallel_inside_node"],
    *PIPELINE_RULES,
    _HARD["micro_batches_per_stage"],
    _HARD["max_micro_batches_per_stage"],
    _HARD["max_pipeline_bubble"],
    Rule("sequence_per_context_rank", "context_parallel divides seq_length",
         ("context_parallel",), _sequence_per_context_rank),
    Rule("sequence_parallel_needs_tensor_parallel",
         "use_seq_parallel needs model_parallel > 1 and a divisible sequence",
         ("use_seq_parallel", "model_parallel", "context_parallel"),
         _sequence_parallel_needs_tensor_parallel),
    Rule("experts_inside_data_parallel",
         "expert_parallel needs experts, and divides num_experts and data_parallel (MindFormers: "
         "x model_parallel)",
         ("expert_parallel", "data_parallel", "model_parallel"), _experts_inside_data_parallel),
    # MindFormers checks these two under semi_auto_parallel (`check_rules`).
    Rule("context_needs_flash_attention",
         "context_parallel > 1 needs flash attention, with constraints.framework = mindformers",
         ("context_parallel",), _context_needs_flash_attention),
    Rule("experts_need_sequence_parallel",
         "experts with model_parallel > 1 need use_seq_parallel, with constraints.framework = "
         "mindformers", ("model_parallel", "use_seq_parallel"), _experts_need_sequence_parallel),
    *RECOMPUTE_RULES,
    _HARD["max_recompute_share"],
    Rule("sharding_needs_data_parallel",
         "optimizer_sharding needs ranks with the same weights: data or context parallel ones",
         ("optimizer_sharding", "data_parallel", "context_parallel"),
         _sharding_needs_data_parallel),
    Rule("compression_method", "gradient_compression is one that the reducer can run",
         ("gradient_compression",), _compression_method),
    _HARD["compression_pays"],
    Rule("compression_needs_replicas",
         "gradient_compression needs plain data parallelism with data_parallel > 1",
         ("gradient_compression", "data_parallel", "pipeline_stage", "context_parallel",
          "expert_parallel", "optimizer_sharding"), _compression_needs_replicas),
    Rule("exchange_needs_data_parallel",
         "comm_overlap and comm_fusion need gradients to exchange over ranks",
         ("data_parallel", "context_parallel", "comm_overlap", "comm_fusion"),
         _exchange_needs_data_parallel),
    Rule("offload_needs_device", "optimizer_offload needs a device with memory of its own",
         ("optimizer_offload",), _offload_needs_device),
    Rule("memory", "the predicted memory fits; an unknown one rejects nothing",
         COST_KNOBS, _memory),
    Rule("memory_used", "the device memory is used, if constraints.min_memory_utilization is set",
         COST_KNOBS, _memory_used),
    _HARD["overlap_headroom"],
)  # fmt: skip
"""The documented order."""
