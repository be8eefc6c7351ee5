"""Hard rules about the pipeline: layers over stages and chunks, micro-batches, recompute lists."""

from __future__ import annotations

from mindtune.search import layout
from mindtune.search.cost_model import CostModel
from mindtune.search.knobs import Config
from mindtune.search.rule import Rule
from mindtune.search.stage_list import column_sums, parse_stage_list

__all__ = ["PIPELINE_RULES", "RECOMPUTE_RULES"]


def _layers_per_stage(config: Config, cost: CostModel) -> str | None:
    stages, chunks = layout.pipeline_stage(config), layout.interleave(config)
    offset, model = str(config["offset"]), cost.facts.model
    if offset != "even" and stages == 1:
        return f"offset = {offset} needs pipeline_stage > 1, but it is 1"
    if model is None:
        if offset == "balanced":
            return "offset = balanced needs num_layers, but the study has no model block"
        return None if offset == "even" else _wrong_rows(config, "offset", offset)
    slots = stages * chunks
    where = f"pipeline_stage x pp_interleave_num = {stages} x {chunks} = {slots}"
    # As in MindFormers, the two ends may hold embedding and output layer alone.
    if model.num_layers < max(slots - 2, 1):
        return f"num_layers = {model.num_layers} must be at least {where}, less 2 for both ends"
    rest = model.num_layers % slots
    if offset == "even":
        if rest == 0:
            return None
        return (
            f"num_layers = {model.num_layers} must be a multiple of {where} with offset = even; "
            "offset = balanced would place the remainder"
        )
    if offset == "balanced":
        if rest:
            return None
        return (
            f"offset = balanced has no remainder to place: num_layers = {model.num_layers} is a "
            f"multiple of {where}, so that it is the same as even"
        )
    wrong = _wrong_rows(config, "offset", offset)
    if wrong is not None:
        return wrong
    rows = parse_stage_list(offset)
    total = sum(map(sum, rows))
    if total != rest:
        return (
            f"the sum of offset = {offset} must be the remainder of num_layers = "
            f"{model.num_layers} by {where}, which is {rest}, but it is {total}"
        )
    first, *middle, last = (model.num_layers // slots + extra for row in rows for extra in row)
    if min(first, last) < 0 or min(middle, default=1) < 1:
        return (
            f"offset = {offset} must leave every stage and chunk a layer (none at both ends), but "
            f"they have {[first, *middle, last]}"
        )
    return None


def _wrong_rows(config: Config, name: str, text: str) -> str | None:
    """Return why a list per stage does not fit the pipeline's shape."""
    rows = parse_stage_list(text)
    stages, chunks = layout.pipeline_stage(config), layout.interleave(config)
    if len(rows[0]) != stages:
        return (
            f"{name} = {config[name]} must hold one number per stage, pipeline_stage = {stages}, "
            f"but holds {len(rows[0])}"
        )
    if len(rows) != chunks and (len(rows) > 1 or name == "offset"):
        return (
            f"{name} = {config[name]} must hold one row per chunk, pp_interleave_num = {chunks}, "
            f"but holds {len(rows)}"
        )
    return None


def _interleave_needs_pipeline(config: Config, cost: CostModel) -> str | None:
    stages, chunks = layout.pipeline_stage(config), layout.interleave(config)
    if chunks == 1:
        return None
    if stages == 1:
        return f"pp_interleave_num = {chunks} needs pipeline_stage > 1, but it is 1"
    rounds = layout.micro_batch_num(config, cost.facts)
    if rounds is not None and rounds % stages and cost.facts.limits.framework != "other":
        return (
            f"with pp_interleave_num = {chunks}, micro_batch_num = {rounds} must be a multiple of "
            f"pipeline_stage = {stages}"
        )
    return None


def _micro_batches_fill_pipeline(config: Config, cost: CostModel) -> str | None:
    stages = layout.pipeline_stage(config)
    rounds = layout.micro_batch_num(config, cost.facts)
    # MindSpore's PipelineCell asks for it ("micro_size must be greater or equal to pipeline
    # stages"); a published table of another program has runs with fewer.
    if rounds is None or rounds >= stages or cost.facts.limits.framework == "other":
        return None
    return f"micro_batch_num = {rounds} must be at least pipeline_stage = {stages}"


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


def _recompute_per_stage(config: Config, cost: CostModel) -> str | None:
    kind, _, listed = str(config["recompute"]).partition(":")
    if kind not in ("layers", "selective") or not listed:
        return None
    wrong = _wrong_rows(config, "recompute", listed)
    if wrong is not None or cost.facts.model is None or _layers_per_stage(config, cost):
        return wrong  # layers that are not placed are another rule's matter
    rows = parse_stage_list(listed)
    layers = layout.chunk_layers(config, cost.facts.model.num_layers)
    if len(rows) < len(layers):  # one row for all chunks counts over a whole stage
        layers = (column_sums(layers),)
    for chunk, (asked, held) in enumerate(zip(rows, layers, strict=True)):
        for stage, (some, most) in enumerate(zip(asked, held, strict=True)):
            if some > most:
                place = f"stage {stage}" + (f", chunk {chunk}" if len(rows) > 1 else "")
                return (
                    f"recompute = {config['recompute']} repeats {some} layers on {place}, which "
                    f"has {most}"
                )
    if rows == layers:
        same = "full" if kind == "layers" else "selective"
        return f"recompute = {config['recompute']} is every layer: the same as {same}"
    return None


_PLACEMENT = ("pipeline_stage", "pp_interleave_num", "offset")
_MICRO_BATCHES = ("data_parallel", "micro_batch_size", "pipeline_stage")

PIPELINE_RULES: tuple[Rule, ...] = (
    Rule("layers_per_stage",
         "num_layers divides over stages and chunks, or offset places the remainder",
         _PLACEMENT, _layers_per_stage),
    Rule("micro_batches_fill_pipeline", "micro_batch_num is at least pipeline_stage",
         _MICRO_BATCHES, _micro_batches_fill_pipeline),
    Rule("interleave_needs_pipeline",
         "pp_interleave_num > 1 needs a pipeline and micro-batches in multiples of its stages",
         (*_MICRO_BATCHES, "pp_interleave_num"), _interleave_needs_pipeline),
)  # fmt: skip

RECOMPUTE_RULES: tuple[Rule, ...] = (
    Rule("recompute_interval", "the recompute interval is at most num_layers",
         ("recompute",), _recompute_interval),
    Rule("recompute_per_stage", "a recompute list has a number per stage, of layers it has",
         (*_PLACEMENT, "recompute"), _recompute_per_stage),
)  # fmt: skip
