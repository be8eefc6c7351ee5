"""The hard rules, in the order in which they are asked: a config counts under the first failure.

Each rule is a function from a complete config to its reason, in words and numbers, or None. To
add one, write the function and one line in `RULES`; `reads` names every knob it looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mindtune.search import layout
from mindtune.search.cost_model import COST_KNOBS, CostModel
from mindtune.search.knobs import Config, knob_text

__all__ = ["RULES", "Rule"]


@dataclass(frozen=True)
class Rule:
    """One hard rule."""

    name: str
    summary: str
    """The rule in words, for a report in which it never fired."""
    reads: tuple[str, ...]
    """Knobs that decide it; the rule is asked as soon as they are known."""
    check: Callable[[Config, CostModel], str | None]
    """Complete config, cost model -> why the config cannot work; None: it can."""


_BATCH = ("data_parallel", "micro_batch_size")
_PIPELINE = (*_BATCH, "pipeline_stage")


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


def _divided_by_model_parallel(what: str) -> Callable[[Config, CostModel], str | None]:
    def check(config: Config, cost: CostModel) -> str | None:
        model = cost.facts.model
        if model is None:
            return None
        size = getattr(model, "kv_heads" if what == "num_kv_heads" else what)
        if what == "intermediate_size" and model.num_experts:
            size = model.mlp_width
        return _not_divisible(what, size, "model_parallel", layout.model_parallel(config))

    return check


def _layers_per_stage(config: Config, cost: CostModel) -> str | None:
    model = cost.facts.model
    if model is None:
        return None
    stages, chunks = layout.pipeline_stage(config), layout.interleave(config)
    if model.num_layers >= stages * chunks and model.num_layers % (stages * chunks) == 0:
        return None
    return (
        f"num_layers = {model.num_layers} must be a multiple of pipeline_stage x "
        f"pp_interleave_num = {stages} x {chunks} = {stages * chunks}"
    )


def _interleave_needs_pipeline(config: Config, cost: CostModel) -> str | None:
    stages, chunks = layout.pipeline_stage(config), layout.interleave(config)
    if chunks == 1:
        return None
    if stages == 1:
        return f"pp_interleave_num = {chunks} needs pipeline_stage > 1, but it is 1"
    rounds = layout.micro_batch_num(config, cost.facts)
    if rounds is not None and rounds % stages:
        return (
            f"with pp_interleave_num = {chunks}, micro_batch_num = {rounds} must be a multiple of "
            f"pipeline_stage = {stages}"
        )
    return None


def _micro_batches_fill_pipeline(config: Config, cost: CostModel) -> str | None:
    stages = layout.pipeline_stage(config)
    rounds = layout.micro_batch_num(config, cost.facts)
    if rounds is None or rounds >= stages:
        return None
    return f"micro_batch_num = {rounds} must be at least pipeline_stage = {stages}"


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
    replicas = layout.data_parallel(config)
    if replicas % experts:
        return (
            f"expert_parallel = {experts} lies inside data parallelism and must divide "
            f"data_parallel = {replicas}"
        )
    if model is None or model.num_experts is None:
        return None
    return _not_divisible("num_experts", model.num_experts, "expert_parallel", experts)


def _recompute_interval(config: Config, cost: CostModel) -> str | None:
    kind, _, interval = str(config["recompute"]).partition(":")
    if kind != "interval" or cost.facts.model is None:
        return None
    if int(interval) <= cost.facts.model.num_layers:
        return None
    return (
        f"recompute = interval:{interval} repeats every {interval}th layer, but num_layers = "
        f"{cost.facts.model.num_layers}: it would repeat none"
    )


def _sharding_needs_data_parallel(config: Config, _cost: CostModel) -> str | None:
    sharding = str(config["optimizer_sharding"])
    if sharding == "none" or layout.data_parallel(config) > 1:
        return None
    return (
        f"optimizer_sharding = {sharding} spreads state over the data-parallel ranks, but "
        "data_parallel = 1"
    )


_UNAVAILABLE_COMPRESSION = {
    "int8": "summing int8 overflows, and AllReduce of integers has no CPU kernel",
    "powersgd": "its two low-rank exchanges per matrix are not built into the reducer",
}


def _compression_method(config: Config, _cost: CostModel) -> str | None:
    method = str(config["gradient_compression"])
    why = _UNAVAILABLE_COMPRESSION.get(method.partition(":")[0])
    if why is None:
        return None
    return f"gradient_compression = {method} cannot be run: {why}; use none, float16 or topk:R"


def _compression_needs_replicas(config: Config, _cost: CostModel) -> str | None:
    method = str(config["gradient_compression"])
    if method == "none":
        return None
    if layout.data_parallel(config) == 1:
        return (
            f"gradient_compression = {method} needs gradients to exchange, but data_parallel = 1"
        )
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
    if layout.data_parallel(config) > 1:
        return None
    for name in ("comm_overlap", "comm_fusion"):
        if config[name]:
            return (
                f"{name} = {knob_text(config[name])} has no effect: there is no gradient "
                "exchange with data_parallel = 1"
            )
    return None


def _offload_needs_device(config: Config, cost: CostModel) -> str | None:
    if not config["optimizer_offload"] or cost.facts.cluster.device.lower() != "cpu":
        return None
    return "optimizer_offload = true has no effect on device cpu: its memory is the host's"


def _tensor_parallel_inside_node(config: Config, cost: CostModel) -> str | None:
    tensor, node = layout.model_parallel(config), cost.facts.cluster.node_size
    if not cost.facts.limits.tensor_parallel_inside_node or node % tensor == 0:
        return None
    return (
        f"model_parallel = {tensor} must divide devices_per_node = {node}, since "
        "tensor_parallel_inside_node is set"
    )


def _micro_batches_per_stage(config: Config, cost: CostModel) -> str | None:
    least, stages = cost.facts.limits.min_micro_batches_per_stage, layout.pipeline_stage(config)
    rounds = layout.micro_batch_num(config, cost.facts)
    if least is None or stages == 1 or rounds is None or rounds >= least * stages:
        return None
    return (
        f"micro_batch_num = {rounds} must be at least min_micro_batches_per_stage x "
        f"pipeline_stage = {least} x {stages} = {least * stages}"
    )


def _max_pipeline_bubble(config: Config, cost: CostModel) -> str | None:
    most = cost.facts.limits.max_pipeline_bubble
    bubble = layout.pipeline_bubble(config, cost.facts)
    if most is None or bubble <= most:
        return None
    return f"pipeline bubble = {bubble:.3f} of the step must be at most {most:g}"


def _max_recompute_share(config: Config, cost: CostModel) -> str | None:
    most, share = cost.facts.limits.max_recompute_share, layout.recompute_share(config, cost.facts)
    if most is None or share is None or share <= most:
        return None
    return f"recompute share = {share:.3f} of the step's FLOPs must be at most {most:g}"


def _memory(config: Config, cost: CostModel) -> str | None:
    limit = cost.memory_limit
    predicted = cost.memory_bytes(config) if limit is not None else None
    if limit is None or predicted is None or predicted <= limit:
        return None
    share = cost.facts.limits.memory_utilization or 1.0
    return (
        f"predicted memory = {_size(predicted)} must be at most memory_utilization x "
        f"device_memory = {share:g} x {_size(cost.facts.cluster.device_memory or 0)}"
    )


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f}GB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f}MB"


_BY_TENSOR = ("model_parallel",)

RULES: tuple[Rule, ...] = (
    Rule("degrees_fill_cluster", "the degrees' product is the number of devices",
         layout.DEGREES, _degrees_fill_cluster),
    Rule("micro_batch_identity",
         "global_batch_size = data_parallel x micro_batch_size x micro_batch_num, all whole",
         _BATCH, _micro_batch_identity),
    Rule("heads_divisible", "model_parallel divides num_heads",
         _BY_TENSOR, _divided_by_model_parallel("num_heads")),
    Rule("kv_heads_divisible", "model_parallel divides num_kv_heads",
         _BY_TENSOR, _divided_by_model_parallel("num_kv_heads")),
    Rule("hidden_divisible", "model_parallel divides hidden_size",
         _BY_TENSOR, _divided_by_model_parallel("hidden_size")),
    Rule("intermediate_divisible", "model_parallel divides the MLP's width",
         _BY_TENSOR, _divided_by_model_parallel("intermediate_size")),
    Rule("vocab_divisible", "model_parallel divides vocab_size (pad the vocabulary)",
         _BY_TENSOR, _divided_by_model_parallel("vocab_size")),
    Rule("tensor_parallel_inside_node",
         "tensor parallel groups lie inside a node, if constraints say so",
         _BY_TENSOR, _tensor_parallel_inside_node),
    Rule("layers_per_stage", "every stage and chunk has the same whole number of layers",
         ("pipeline_stage", "pp_interleave_num"), _layers_per_stage),
    Rule("micro_batches_fill_pipeline", "micro_batch_num is at least pipeline_stage",
         _PIPELINE, _micro_batches_fill_pipeline),
    Rule("interleave_needs_pipeline",
         "pp_interleave_num > 1 needs a pipeline and micro-batches in multiples of its stages",
         (*_PIPELINE, "pp_interleave_num"), _interleave_needs_pipeline),
    Rule("micro_batches_per_stage",
         "micro_batch_num is min_micro_batches_per_stage x pipeline_stage or more, if set",
         _PIPELINE, _micro_batches_per_stage),
    Rule("max_pipeline_bubble", "the pipeline's bubble is small enough, if constraints say so",
         (*_PIPELINE, "pp_interleave_num"), _max_pipeline_bubble),
    Rule("sequence_per_context_rank", "context_parallel divides seq_length",
         ("context_parallel",), _sequence_per_context_rank),
    Rule("sequence_parallel_needs_tensor_parallel",
         "use_seq_parallel needs model_parallel > 1 and a divisible sequence",
         ("use_seq_parallel", "model_parallel", "context_parallel"),
         _sequence_parallel_needs_tensor_parallel),
    Rule("experts_inside_data_parallel",
         "expert_parallel needs experts, and divides data_parallel and num_experts",
         ("expert_parallel", "data_parallel"), _experts_inside_data_parallel),
    Rule("recompute_interval", "the recompute interval is at most num_layers",
         ("recompute",), _recompute_interval),
    Rule("max_recompute_share", "recomputation is cheap enough, if constraints say so",
         ("recompute",), _max_recompute_share),
    Rule("sharding_needs_data_parallel", "optimizer_sharding needs data_parallel > 1",
         ("optimizer_sharding", "data_parallel"), _sharding_needs_data_parallel),
    Rule("compression_method", "gradient_compression is one that the reducer can run",
         ("gradient_compression",), _compression_method),
    Rule("compression_needs_replicas",
         "gradient_compression needs plain data parallelism with data_parallel > 1",
         ("gradient_compression", "data_parallel", "pipeline_stage", "context_parallel",
          "expert_parallel", "optimizer_sharding"), _compression_needs_replicas),
    Rule("exchange_needs_data_parallel", "comm_overlap and comm_fusion need data_parallel > 1",
         ("data_parallel", "comm_overlap", "comm_fusion"), _exchange_needs_data_parallel),
    Rule("offload_needs_device", "optimizer_offload needs a device with memory of its own",
         ("optimizer_offload",), _offload_needs_device),
    Rule("memory", "the predicted memory fits; an unknown one rejects nothing",
         COST_KNOBS, _memory),
)  # fmt: skip
"""The documented order."""
