"""MindFormers' `recompute_config` as the knob `recompute`, its list forms included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindtune.controller.mindformers.base_yaml import MindFormersYaml
from mindtune.controller.mindformers.keys import KnobKeys
from mindtune.search.layout import balanced_offset
from mindtune.search.stage_list import StageList, column_sums, parse_stage_list, stage_list_text

__all__ = ["add_recompute"]


def add_recompute(keys: KnobKeys, base: MindFormersYaml, model: Mapping[str, Any] | None) -> None:
    """Add recomputation: none, full, and lists with a number of layers per pipeline stage.

    Args:
        keys: what it is added to.
        base: the YAML.
        model: the model section of the study; None: unknown.
    """
    section = base.section("recompute_config")
    whole, parts = section.get("recompute", False), section.get("select_recompute", False)
    stages = base.degree("pipeline_stage") if base.mode == "semi_auto" else 1
    reason = _untellable(base, whole, parts, stages)
    if reason is not None:
        keys.notes.append(f"recompute_config stays as it is: {reason}.")
        return
    choices: list[Any] = ["none", "full"]
    if isinstance(whole, list) and whole:
        choices.append(whole)
    elif model is not None:
        choices += _layers_per_stage(base, model, stages)
    selects = bool(parts)
    if selects:
        own = (
            f"selective:{stage_list_text(parse_stage_list(parts))}"
            if isinstance(parts, list)
            else "selective"
        )
        choices += ["selective", *([own] if own != "selective" else [])]
    keys.space["recompute"] = choices
    spelled = {"none": False, "full": True, "layers:*": "{list}"}
    if selects:
        keys.map(
            base, "recompute_config.select_recompute", "recompute",
            {"none": False, "full": False, "layers:*": False, "selective": True,
             "selective:*": "{list}"},
        )  # fmt: skip
        spelled["selective*"] = False
    keys.map(base, "recompute_config.recompute", "recompute", spelled)


def _untellable(base: MindFormersYaml, whole: Any, parts: Any, stages: int) -> str | None:
    """Return why the YAML's recomputation is no value of the knob; None: it is one."""
    if base.flag("swap_config.swap"):
        return "with swap_config.swap a list names layers, not their number per stage"
    for name, value in (("recompute", whole), ("select_recompute", parts)):
        if isinstance(value, bool) or value is None:
            continue
        try:
            rows = parse_stage_list(value if isinstance(value, list) else None)
        except ValueError:
            return f"{name} = {value!r} is neither True, False nor numbers of layers per stage"
        if len(rows[0]) != stages:
            return (
                f"{name} = {value!r} has {len(rows[0])} numbers for {stages} stages, of which "
                "MindFormers takes missing ones for 0; write one per stage"
            )
    if whole and parts:
        return "recompute and select_recompute are both on, which is no value of one knob"
    return None


def _layers_per_stage(
    base: MindFormersYaml, model: Mapping[str, Any], stages: int
) -> list[list[int]]:
    """Return two lists for the YAML's own stages: half of each, and fewer towards the end.

    In 1F1B stage s keeps (stages - s) micro-batches alive, so that the first one is short of
    memory first; the last one has the output layer besides.
    """
    layers = _stage_layers(base, model["num_layers"], stages)
    if layers is None:
        return []
    half = [count // 2 for count in layers]
    falling = [count * (stages - 1 - s) // stages for s, count in enumerate(layers)]
    lists = [half] if stages == 1 else [half, falling]
    return [entry for n, entry in enumerate(lists) if any(entry) and entry not in lists[:n]]


def _stage_layers(base: MindFormersYaml, num_layers: int, stages: int) -> tuple[int, ...] | None:
    share, rest = divmod(num_layers, stages)
    told = base.section("model.model_config").get("offset", 0)
    rows: StageList = ((0,) * stages,)
    if isinstance(told, list):
        try:
            rows = parse_stage_list(told)
        except ValueError:
            return None
    elif rest:
        rows = balanced_offset(num_layers, stages, 1)
    if len(rows) > 1 or len(rows[0]) != stages:
        return None
    return tuple(share + extra for extra in column_sums(rows))
