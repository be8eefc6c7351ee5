"""The shape of the model in a MindFormers YAML, in the terms of a study file.

A size has several names there: `COMMON_CONFIG_MAPPING` of MindFormers 1.8.0 maps those of its new
models (and of Hugging Face) onto one, the old Llama and ChatGLM2 configs have their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindtune.controller.contract import ModelSection, parse, read_json
from mindtune.controller.errors import ConfigError
from mindtune.controller.mindformers.base_yaml import MindFormersYaml

__all__ = ["EXPERTS", "SIZES", "model_block"]

SIZES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_heads", "num_attention_heads", "n_head"),
    "num_kv_heads": ("n_kv_heads", "num_key_value_heads", "num_query_groups"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
}
_NEEDED = ("num_layers", "hidden_size", "num_heads", "intermediate_size", "vocab_size",
           "seq_length")  # fmt: skip
EXPERTS: dict[str, tuple[str, ...]] = {
    "num_experts": ("expert_num", "n_routed_experts", "num_experts", "num_moe_experts"),
    "experts_per_token": ("num_experts_chosen", "num_experts_per_tok", "moe_router_topk"),
    "moe_intermediate_size": ("moe_intermediate_size", "moe_ffn_hidden_size"),
}
_GATED = ("llama", "glm", "qwen", "deepseek", "telechat", "internlm", "mistral", "yi", "baichuan")
"""Families whose MLP is gated (SwiGLU), by a part of MindFormers' names of model and config."""
_GATED_ACTIVATIONS = ("swiglu", "fusedswiglu")
_UNTOLD = {
    "q_lora_rank": "multi-head latent attention",
    "kv_lora_rank": "multi-head latent attention",
    "n_shared_experts": "shared experts",
    "shared_expert_num": "shared experts",
    "moe_shared_expert_intermediate_size": "shared experts",
    "first_k_dense_replace": "dense layers among those with experts",
    "mtp_depth": "layers for multi-token prediction",
    "num_nextn_predict_layers": "layers for multi-token prediction",
    "mtp_num_layers": "layers for multi-token prediction",
    "window_size": "a sliding window",
}
"""Keys of what the block cannot say -> what it is."""


def model_block(base: MindFormersYaml, folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the model section of a study file, and what could not be said.

    Args:
        base: the YAML.
        folder: its folder, which a relative `pretrained_model_dir` is looked for in.

    Returns:
        The section, None where a size is missing; and notes, one sentence each.
    """
    notes: list[str] = []
    config = _config(base, folder, notes)
    block: dict[str, Any] = {}
    for name, aliases in SIZES.items():
        value = _first(config, aliases)
        if value is not None:
            block[name] = value
    _chatglm(config, block)
    _old_llama_mlp(base, config, block, notes)
    length = _sequence_length(base, config)
    if length is not None:
        block["seq_length"] = length
    missing = [name for name in _NEEDED if name not in block]
    if missing:
        where = base.tree.get("pretrained_model_dir") or ""
        hint = f"; {where!r} holds no config.json here" if where else ""
        notes.append(
            f"The model block is left out, since the YAML does not tell {', '.join(missing)}"
            f"{hint}: without it there is no cost model and no MFU."
        )
        return None, notes
    _gated(base, config, block, notes)
    block["tie_embeddings"] = _ties(config)
    block["flash_attention"] = bool(config.get("use_flash_attention", not base.is_legacy))
    _experts(base, config, block)
    _name_untold(config, block, notes)
    try:
        parse(ModelSection, block, source="the model block")
    except ConfigError as error:
        notes.append(f"The model block is left out: {error}")
        return None, notes
    return block, notes


def _config(base: MindFormersYaml, folder: Path, notes: list[str]) -> dict[str, Any]:
    """Return the model's keys: those of the YAML over those of a Hugging Face config.json."""
    own = {key: v for key, v in base.section("model.model_config").items() if v is not None}
    where = base.tree.get("pretrained_model_dir")
    path = folder / str(where) / "config.json"
    if not where or not path.is_file():
        return own
    notes.append(f"Sizes that the YAML leaves open are those of {where}/config.json.")
    # One size under two names must not be read twice: what the YAML says, by any name, holds.
    told = {a for aliases in SIZES.values() if set(aliases) & set(own) for a in aliases}
    loaded = read_json(path)
    theirs = loaded if isinstance(loaded, dict) else {}
    return {k: v for k, v in theirs.items() if k not in told and v is not None} | own


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _chatglm(config: Mapping[str, Any], block: dict[str, Any]) -> None:
    """ChatGLM2 tells its groups of keys only where they count."""
    groups = _first(config, ("multi_query_group_num",))
    if config.get("multi_query_attention") and groups is not None:
        block["num_kv_heads"] = groups


def _old_llama_mlp(
    base: MindFormersYaml, config: Mapping[str, Any], block: dict[str, Any], notes: list[str]
) -> None:
    """The old Llama derives the width of its MLP (`LlamaFeedForward`) where none is given."""
    if "intermediate_size" in block or "hidden_size" not in block:
        return
    if not base.is_legacy or config.get("type") != "LlamaConfig":
        return
    width = 4 * block["hidden_size"]
    multiplier, multiple = config.get("ffn_dim_multiplier"), config.get("multiple_of", 256)
    if (
        not isinstance(multiple, int)
        or multiple < 1
        or not isinstance(multiplier, (int, float, type(None)))
    ):
        return
    if multiplier is not None:
        width = int((multiplier + 0.01) * width)
    block["intermediate_size"] = multiple * -(-int(2 * width / 3) // multiple)
    notes.append(
        f"intermediate_size = {block['intermediate_size']} is what LlamaConfig makes of "
        "hidden_size, multiple_of and ffn_dim_multiplier."
    )


def _sequence_length(base: MindFormersYaml, config: Mapping[str, Any]) -> int | None:
    own = _first(config, ("seq_length",))
    loader = base.section("train_dataset.data_loader")
    inner = loader.get("config")
    told = _first(inner if isinstance(inner, dict) else {}, ("seq_length",))
    handlers = loader.get("handler")
    for handler in handlers if isinstance(handlers, list) else []:
        told = told or _first(handler if isinstance(handler, dict) else {}, ("seq_length",))
    return own or told


def _gated(
    base: MindFormersYaml, config: Mapping[str, Any], block: dict[str, Any], notes: list[str]
) -> None:
    names = [
        config.get("type"), config.get("model_type"), config.get("architectures"),
        base.section("model.arch").get("type"), base.section("trainer").get("model_name"),
    ]  # fmt: skip
    text = " ".join(map(str, names)).lower()
    told = config.get("gated_linear_unit")
    if told is not None:
        block["gated_mlp"] = bool(told)
    elif str(config.get("hidden_act")).lower() in _GATED_ACTIVATIONS or any(
        family in text for family in _GATED
    ):
        block["gated_mlp"] = True
    else:
        block["gated_mlp"] = False
        notes.append("Whether the MLP is gated does not show; gated_mlp: true if it is.")


def _ties(config: Mapping[str, Any]) -> bool:
    untied = config.get("untie_embeddings_and_output_weights")
    return bool(config.get("tie_word_embeddings", False) if untied is None else not untied)


def _experts(base: MindFormersYaml, config: Mapping[str, Any], block: dict[str, Any]) -> None:
    # The old models take them from a section of its own, where one expert is none.
    sources = [config, base.section("moe_config")] if base.is_legacy else [config]
    for name, aliases in EXPERTS.items():
        value = next((v for s in sources if (v := _first(s, aliases)) is not None), None)
        if name == "num_experts" and (value is None or value == 1):
            return
        if value is not None:
            block[name] = value


def _name_untold(config: Mapping[str, Any], block: dict[str, Any], notes: list[str]) -> None:
    found = [what for key, what in _UNTOLD.items() if config.get(key)]
    own_width = _first(config, ("head_dim", "kv_channels"))
    usual = block["hidden_size"] // block["num_heads"]
    if own_width is not None and own_width != usual:
        found.append(f"a head width of {own_width} instead of hidden_size / num_heads = {usual}")
    if found:
        notes.append(
            f"The model block cannot say {', '.join(dict.fromkeys(found))}: predictions of memory "
            "and time are off by that, until trials have calibrated them."
        )
