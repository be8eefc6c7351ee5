"""Why a name is no knob that can be searched, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["DERIVED", "refusal"]

DERIVED = {
    "micro_batch_num": "global_batch_size / (data_parallel * micro_batch_size)",
    "global_batch_size": "training.global_batch_size",
}
"""Names that follow from others and are never searched, with where they come from."""

_LEARNING = (
    "it changes what is learnt, so that configs could not be compared by speed; policies turn it "
    "inside a run"
)
_MODEL = "all configs train one model, whose sizes stand under `model`"
_MACHINE = "it is the machine's, and stands under `cluster`"
_REASONS = {
    **dict.fromkeys(
        ("learning_rate", "loss_scale", "clip_norm", "max_grad_norm", "weight_decay", "optimizer",
         "warmup_steps", "seed"), _LEARNING,
    ),
    **dict.fromkeys(
        ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size",
         "vocab_size", "seq_length", "num_experts", "flash_attention"), _MODEL,
    ),
    **dict.fromkeys(("num_devices", "devices_per_node", "device", "device_memory"), _MACHINE),
    "gradient_accumulation_steps": "it is micro_batch_num here, which follows from "
    + DERIVED["micro_batch_num"],
    "micro_batch_interleave_num": "MindFormers' gradient norm, which is clipped, grows with it, "
    "so that configs would not train alike; it stays as the base config has it",
}  # fmt: skip
"""Names of other things in a training that one might want to search -> why they are not."""

_ALIASES = {
    "dp": "data_parallel", "data_parallel_size": "data_parallel",
    "tp": "model_parallel", "mp": "model_parallel", "tensor_parallel": "model_parallel",
    "tensor_model_parallel_size": "model_parallel",
    "pp": "pipeline_stage", "pipeline_parallel": "pipeline_stage",
    "pipeline_model_parallel_size": "pipeline_stage",
    "vpp": "pp_interleave_num", "virtual_pipeline_stages": "pp_interleave_num",
    "cp": "context_parallel", "context_parallel_size": "context_parallel",
    "ep": "expert_parallel", "expert_model_parallel_size": "expert_parallel",
    "sp": "use_seq_parallel", "sequence_parallel": "use_seq_parallel",
    "mbs": "micro_batch_size", "batch_size": "micro_batch_size",
    "zero": "optimizer_sharding", "zero_stage": "optimizer_sharding",
    "enable_parallel_optimizer": "optimizer_sharding", "dtype": "precision",
    "compute_dtype": "precision", "select_recompute": "recompute",
    "num_parallel_workers": "data_workers",
    "activation_checkpointing": "recompute", "offload": "optimizer_offload",
    "num_workers": "data_workers", "prefetch_size": "prefetch",
}  # fmt: skip
"""Names that other programs have for our knobs."""


def refusal(name: str, knobs: Iterable[str]) -> str:
    """Return why `name`, which is no knob, cannot be searched."""
    if name in DERIVED:
        return f"knob {name!r} cannot be searched: it follows from {DERIVED[name]}; remove it."
    if name in _REASONS:
        return f"knob {name!r} cannot be searched: {_REASONS[name]}; remove it."
    known = list(knobs)
    close = difflib.get_close_matches(name, known, n=1)
    meant = _ALIASES.get(name.lower()) or (close[0] if close else None)
    hint = f"; did you mean {meant}?" if meant else "."
    return f"knob names must be one of {', '.join(known)} or env.NAME, but got {name!r}{hint}"
