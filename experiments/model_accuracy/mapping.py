"""From a row of a published table to the model, machine and config that the cost model reads.

What a row does not state and nothing stands for makes it unmapped, with the reason: nothing is
guessed. What the column's text does not say, but the program's documentation does, is written
down here: FSDP and "dist_opt" shard as ZeRO-3 and ZeRO-1, frameworks before October 2022 store
attention scores (FlashAttention, arXiv 2205.14135, was in none of them), Megatron's recipes
use sequence parallelism with tensor parallelism where the cell is empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mindtune.search.errors import SearchError
from mindtune.search.facts import Cluster, StudyFacts, Training
from mindtune.search.knobs import KNOBS, Config
from mindtune.search.model_shape import ModelShape
from mindtune.search.program import Program

__all__ = ["Device", "Row", "UnmappedError", "map_row"]

GIB = 2.0**30


class UnmappedError(ValueError):
    """A row that says too little, or contradicts itself; the message says what."""


@dataclass(frozen=True)
class Device:
    """One line of device_peaks.csv: what the cost model knows of a device."""

    peak: float
    peak_fp8: float | None
    memory: float
    intra: float | None
    """Bytes per second and device inside a node."""
    inter: float | None


@dataclass(frozen=True)
class Row:
    """One published config."""

    file: str
    table: str
    number: int
    """Of its file, from 1."""
    framework: str
    model: ModelShape
    facts: StudyFacts
    config: Config
    stage: int | None
    """Pipeline stage whose memory is told: 0 the first, -1 the last; None: the worst one."""
    status: str
    step_time_s: float | None
    memory_bytes: float | None
    group: tuple[str, ...]
    """Rows of one model, sequence, machine, precision and global batch."""
    doubts: str
    """The table's own flags."""

    @property
    def states_oom(self) -> bool:
        """Whether the table says that memory ran out."""
        return self.status.startswith(("oom", "exceeds"))


def map_row(
    cells: Mapping[str, str], file: str, number: int, devices: Mapping[str, Device]
) -> Row:
    """Return the row as the cost model sees it; raises `UnmappedError`."""
    if cells["status"] == "forward_only":
        raise UnmappedError("only the forward pass was timed")
    if "schedule zb" in cells["framework"]:
        raise UnmappedError("a pipeline schedule that the model does not know")
    if "gbs_label_inconsistent" in cells["flags"]:
        raise UnmappedError("gbs is not dp x mbs x grad_accum")
    shape = _shape(cells)
    config, batch = _config(cells, shape)
    row_facts = StudyFacts(
        cluster=_cluster(cells, devices),
        training=Training(global_batch_size=batch, precision=_precision(cells)),
        model=shape,
        program=_program(cells),
    )
    keys = ("model", "seq", "device", "n_devices", "precision", "gbs")
    return Row(
        file=file,
        table=cells["table"],
        number=number,
        framework=cells["framework"],
        model=shape,
        facts=row_facts,
        config=config,
        stage=_told_stage(cells),
        status=cells["status"],
        step_time_s=_step_time(cells, batch, shape),
        memory_bytes=_memory(cells),
        group=(file, cells["table"], *(cells[key] for key in keys)),
        doubts=cells["flags"],
    )


def _program(cells: Mapping[str, str]) -> Program:
    framework = cells["framework"]
    if "nanotron" in framework:
        return Program(gradient_bytes=6.0)  # bfloat16 gradients beside float32 accumulators
    if "DeepSpeed" in framework and cells["precision"] == "fp16":
        return Program(gradient_bytes=2.0)
    return Program()


def _told_stage(cells: Mapping[str, str]) -> int | None:
    if "last rank" in cells["mem_kind"]:
        return -1
    # nanotron logs the memory of rank 0, which is in the first stage.
    return 0 if "nanotron" in cells["framework"] else None


def _number(cells: Mapping[str, str], name: str) -> float | None:
    try:
        value = float(cells[name])
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _count(cells: Mapping[str, str], name: str) -> int | None:
    value = _number(cells, name)
    return None if value is None or value < 1 else int(value)


def _needed(cells: Mapping[str, str], name: str) -> int:
    value = _count(cells, name)
    if value is None:
        raise UnmappedError(f"{name} is not stated")
    return value


def _shape(cells: Mapping[str, str]) -> ModelShape:
    names = ("layers", "hidden", "heads", "ffn", "vocab", "seq")
    layers, hidden, heads, ffn, vocab, seq = (_needed(cells, name) for name in names)
    experts = _count(cells, "experts")
    if experts is None and cells["arch"] not in ("", "dense"):
        raise UnmappedError("experts is not stated")
    tensor = _count(cells, "tp") or 1
    padded = math.ceil(vocab / tensor) * tensor
    if "megatron" in cells["framework"].lower():
        padded = math.ceil(vocab / (128 * tensor)) * 128 * tensor
    sizes = {
        "num_layers": layers, "hidden_size": hidden, "num_heads": heads,
        "num_kv_heads": _count(cells, "kv_heads"), "intermediate_size": ffn,
        "gated_mlp": cells["gated_mlp"] == "1", "vocab_size": padded, "seq_length": seq,
        "flash_attention": _fused_attention(cells),
        "num_experts": experts, "experts_per_token": _count(cells, "topk") if experts else None,
        "moe_intermediate_size": _count(cells, "moe_ffn") if experts else None,
    }  # fmt: skip
    try:
        shape = ModelShape(**sizes)  # type: ignore[arg-type]
        tied = ModelShape(**sizes, tie_embeddings=True)  # type: ignore[arg-type]
    except SearchError as error:
        raise UnmappedError(str(error)) from error
    return tied if _is_tied(cells, shape, tied) else shape


def _is_tied(cells: Mapping[str, str], shape: ModelShape, tied: ModelShape) -> bool:
    if "untied_embed=1" in cells["notes"]:
        return False
    stated = _number(cells, "params_b")
    if stated is None:
        return cells["gated_mlp"] != "1"
    with_two, with_one = shape.num_parameters / 1e9, tied.num_parameters / 1e9
    return abs(with_one - stated) < abs(with_two - stated)


def _fused_attention(cells: Mapping[str, str]) -> bool:
    stated = re.search(r"\bFA=(\w+)", cells["notes"])
    if stated:
        return stated[1] != "False"
    if "attention-backend=unfused" in cells["notes"] or "transformer-impl=local" in cells["notes"]:
        return False
    # Megatron-LM fused it by default only with Transformer Engine.
    first = "2024" if "megatron-lm" in cells["framework"].lower() else "2022-10"
    return not cells["date"] or cells["date"] >= first


def _config(cells: Mapping[str, str], shape: ModelShape) -> tuple[Config, int]:
    devices = _needed(cells, "n_devices")
    tensor, stages, context = (_count(cells, name) or 1 for name in ("tp", "pp", "cp"))
    replicas = _count(cells, "dp") or max(devices // (tensor * stages * context), 1)
    if replicas * tensor * stages * context != devices:
        raise UnmappedError("the degrees' product is not the number of devices")
    size, batch, rounds = (_count(cells, name) for name in ("mbs", "gbs", "grad_accum"))
    if size is None and batch and rounds and batch % (rounds * replicas) == 0:
        size = batch // (rounds * replicas)
    if size is None and cells["source"] == "galvatron_profile" and batch and batch >= replicas:
        size = batch // replicas  # its profiler runs the whole batch at once
    if size is None:
        raise UnmappedError("mbs is not stated")
    if rounds is None and batch is not None and batch % (size * replicas) == 0:
        rounds = batch // (size * replicas)
    if rounds is None:
        raise UnmappedError("neither gbs nor grad_accum says how many micro-batches there are")
    experts = _count(cells, "ep") or 1
    if experts > 1 and (replicas * context * tensor) % experts:
        raise UnmappedError("ep does not divide the ranks of a stage")
    chunks = _count(cells, "vpp") or 1
    config = {knob.name: knob.default for knob in KNOBS.values() if knob.default is not None}
    config |= {
        "data_parallel": replicas, "model_parallel": tensor, "pipeline_stage": stages,
        "context_parallel": context, "expert_parallel": experts,
        "pp_interleave_num": chunks if stages > 1 else 1, "micro_batch_size": size,
        "use_seq_parallel": tensor > 1 and cells["sp"] != "0",
        "optimizer_sharding": _sharding(cells["zero"], replicas * context),
        "precision": _precision(cells), "recompute": _recompute(cells["recompute"], shape),
        "comm_overlap": True, "offset": _offset(cells, shape, stages, chunks),
    }  # fmt: skip
    return config, replicas * size * rounds


def _offset(cells: Mapping[str, str], shape: ModelShape, stages: int, chunks: int) -> str:
    """Return where the layers lie: nanotron gives every stage the same FLOPs.

    The output layer counts as the layers that take as long; a stage ends with the layer whose sum
    is over the stage's share (its `build_and_set_rank` loop).
    """
    if stages == 1:
        return "even"
    if chunks > 1 or "nanotron" not in cells["framework"]:
        return "even" if shape.num_layers % (stages * chunks) == 0 else "balanced"
    layers, head = shape.num_layers, shape.head_flops / shape.layer_flops.total
    share = (layers + head) / stages
    counts = [0] * stages
    stage = 0
    for number in range(1, layers + 1):
        counts[stage] += 1
        if number > share * (stage + 1) and stage < stages - 1:
            stage += 1
    even = layers // stages
    offset = [count - even for count in counts]
    return "/".join(map(str, offset)) if any(offset) else "even"


def _sharding(text: str, ranks: int) -> str:
    if ranks == 1:
        return "none"
    text = text.lower()
    if text == "3" or text.startswith("fsdp"):
        return "parameter"
    if text == "2":
        return "gradient"
    # BigScience's scripts for Megatron-DeepSpeed set ZeRO stage 1.
    return "optimizer" if text in ("1", "unstated") or text.startswith("dist_opt") else "none"


def _recompute(text: str, shape: ModelShape) -> str:
    text = text.lower()
    if text in ("", "none", "na"):
        return "none"
    if "not stated" in text or text == "unstated":
        raise UnmappedError("recompute is not stated")
    lists = re.search(r"full_layers_per_stage:\[([0-9, .]+)\]", text)
    if lists:
        share = sum(float(part) for part in lists[1].split(",")) / shape.num_layers
        return "none" if share == 0 else f"interval:{max(round(1 / share), 1)}"
    if text.startswith("full"):
        return "full"
    # torchtitan's keeps every second matrix product.
    return "interval:2" if "sac)" in text else "selective"


def _precision(cells: Mapping[str, str]) -> str:
    name = cells["precision"]
    if not name:
        raise UnmappedError("precision is not stated")
    return {"fp16": "float16", "fp32": "float32"}.get(name, "bfloat16")


def _cluster(cells: Mapping[str, str], devices: Mapping[str, Device]) -> Cluster:
    known = devices.get(cells["device"])
    stated = _number(cells, "mem_gb")
    if known is None:
        return Cluster(
            num_devices=_needed(cells, "n_devices"),
            device_memory=stated * GIB if stated else None,
            device="unknown",
        )
    low_precision = cells["precision"] not in ("bf16", "fp16", "fp32")
    peak = known.peak_fp8 if low_precision else known.peak
    return Cluster(
        num_devices=_needed(cells, "n_devices"),
        devices_per_node=_count(cells, "devices_per_node"),
        device=cells["device"],
        device_memory=(stated * GIB) if stated else known.memory,
        peak_flops=peak,
        intra_node_bandwidth=known.intra,
        inter_node_bandwidth=known.inter,
    )


def _step_time(cells: Mapping[str, str], batch: int, shape: ModelShape) -> float | None:
    rate = _number(cells, "tokens_per_s_dev")
    if cells["status"] != "ok":
        return None
    if rate:
        return batch * shape.seq_length / (rate * _needed(cells, "n_devices"))
    return _number(cells, "step_time_s")


def _memory(cells: Mapping[str, str]) -> float | None:
    stated = _number(cells, "peak_mem_gib")
    return stated * GIB if stated and cells["status"] == "ok" else None
