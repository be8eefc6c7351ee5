"""Which knobs a MindFormers YAML has, with which values, and under which of its keys.

What acts depends on the mode: outside of semi-automatic parallelism MindFormers sets the degrees
and the accumulation to 1, so that they are no knobs there. What it only documents (enough
micro-batches for the stages, heads over ranks, experts inside their ranks) are rules of the
search; what it resets in silence is read back inside the trial.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mindtune.controller.mindformers.base_yaml import Batch, MindFormersYaml
from mindtune.controller.mindformers.keys import KnobKeys
from mindtune.controller.mindformers.recompute_keys import add_recompute
from mindtune.search.space import divisors
from mindtune.search.stage_list import parse_stage_list

__all__ = ["knob_keys"]

_ZERO_BUBBLE = "zero_bubble_v"
"""Schedule that documents micro_batch_num >= 2 x stages."""
_PLAIN_SCHEDULES = (None, "1f1b", "gpipe")
_LARGEST_TENSOR = 8
"""Largest model_parallel that is proposed: the devices of one node (MindFormers' default)."""
_LARGEST_MICRO_BATCH = 8


def knob_keys(
    base: MindFormersYaml, model: Mapping[str, Any] | None, num_devices: int
) -> KnobKeys:
    """Return the knobs of a YAML.

    Args:
        base: the YAML.
        model: the model section of the study; None: unknown.
        num_devices: devices of the job.
    """
    keys = KnobKeys()
    batch = base.batch(num_devices)
    if base.mode == "semi_auto":
        _degrees(keys, base, model, num_devices)
        _batch(keys, base, batch)
        if base.degree("pipeline_stage") > 1:
            _chunks(keys, base)
        if num_devices > 1:
            _offset(keys, base, model)
    else:
        _fixed_batch(keys, base, batch)
    if num_devices > 1:
        keys.space["optimizer_sharding"] = ["none", "optimizer"]
        spelled = {"none": False, "optimizer": True}
        keys.map(base, "parallel.enable_parallel_optimizer", "optimizer_sharding", spelled)
    add_recompute(keys, base, model)
    if base.mode != "semi_auto":
        _data(keys, base)
    return keys


def _degrees(
    keys: KnobKeys, base: MindFormersYaml, model: Mapping[str, Any] | None, num_devices: int
) -> None:
    keys.space["data_parallel"] = "auto"
    tensor = {n for n in divisors(num_devices) if n <= _LARGEST_TENSOR}
    keys.space["model_parallel"] = sorted(tensor | {base.degree("model_parallel")})
    keys.space["pipeline_stage"] = "auto"
    names = ["data_parallel", "model_parallel", "pipeline_stage"]
    if base.degree("context_parallel") > 1:
        _context(keys, base, model, num_devices)
        names.append("context_parallel")
    experts = (model or {}).get("num_experts")
    if experts or base.degree("expert_parallel") > 1:
        keys.space["expert_parallel"] = "auto"
        names.append("expert_parallel")
    keys.space["use_seq_parallel"] = [False, True]
    if base.count("model.model_config.fine_grain_interleave") > 1:
        keys.space["use_seq_parallel"] = True
        keys.notes.append(
            "fine_grain_interleave needs use_seq_parallel or context parallelism: the first stays "
            "on."
        )
    for name in (*names, "use_seq_parallel"):
        keys.map(base, f"parallel_config.{name}", name)
    _dataset_strategy(keys, base)


def _context(
    keys: KnobKeys, base: MindFormersYaml, model: Mapping[str, Any] | None, num_devices: int
) -> None:
    """Context parallelism within what its algorithm allows (`check_rules`)."""
    algorithm = base.section("parallel_config").get("context_parallel_algo", "colossalai_cp")
    degree = base.degree("context_parallel")
    if algorithm == "colossalai_cp":
        keys.space["context_parallel"] = "auto"
        return
    if algorithm == "hybrid_cp":
        group = base.count("parallel_config.ulysses_degree_in_cp")
        fitting = {n for n in divisors(num_devices) if n == 1 or n % group == 0}
        keys.space["context_parallel"] = sorted(fitting | {degree})
        return
    # Ulysses splits heads: context_parallel x model_parallel must not be more than there are.
    keys.space["context_parallel"] = degree
    heads = (model or {}).get("num_kv_heads") or (model or {}).get("num_heads")
    if heads is not None:
        fitting = {n for n in keys.space["model_parallel"] if n * degree <= heads}
        keys.space["model_parallel"] = sorted(fitting) or [base.degree("model_parallel")]
    keys.notes.append(
        f"context_parallel_algo = {algorithm} splits heads: context_parallel stays {degree}, and "
        "model_parallel within the heads that are left."
    )


def _dataset_strategy(keys: KnobKeys, base: MindFormersYaml) -> None:
    """Where ranks read their own share, its first numbers must be data_parallel."""
    if base.flag("parallel.full_batch", default=True):
        return
    rows = base.section("parallel").get("dataset_strategy")
    degree = base.degree("data_parallel")
    if not isinstance(rows, list) or not rows or not all(isinstance(r, list) and r for r in rows):
        keys.notes.append(
            "parallel.full_batch is False, for which MindFormers asks for a dataset_strategy with "
            f"data_parallel first in each row, but the YAML has {rows!r}."
        )
        return
    for index, row in enumerate(rows):
        if row[0] == degree:
            keys.map(base, f"parallel.dataset_strategy.{index}.0", "data_parallel")
        else:
            keys.notes.append(
                f"parallel.dataset_strategy.{index} begins with {row[0]!r}, which is not "
                f"data_parallel = {degree}: it stays as it is."
            )


def _batch(keys: KnobKeys, base: MindFormersYaml, batch: Batch) -> None:
    """Samples per rank and micro-batch; how many there are follows."""
    parts = base.interleave
    sizes = {parts * 2**n for n in range(_LARGEST_MICRO_BATCH) if 2**n <= _LARGEST_MICRO_BATCH}
    most = batch.global_batch_size
    keys.space["micro_batch_size"] = sorted(
        {size for size in sizes if most % size == 0} | {batch.micro_batch_size}
    )
    values = None
    if parts > 1:
        values = {str(size): size // parts for size in keys.space["micro_batch_size"]}
        keys.notes.append(
            f"micro_batch_interleave_num = {parts}: micro_batch_size counts all {parts} parts, of "
            "which runner_config.batch_size is one. It is not searched, since the printed and "
            "clipped gradient norm grows with it."
        )
        if not base.is_legacy:
            keys.notes.append("MindFormers refuses micro_batch_interleave_num > 1 for this model.")
    keys.map(base, "runner_config.batch_size", "micro_batch_size", values)
    # One of the two acts: micro_batch_num in a pipeline, accumulation without; MindFormers ignores
    # the other.
    keys.map(base, "parallel_config.micro_batch_num", "micro_batch_num")
    keys.map(base, "runner_config.gradient_accumulation_steps", "micro_batch_num")


def _fixed_batch(keys: KnobKeys, base: MindFormersYaml, batch: Batch) -> None:
    keys.space["data_parallel"] = batch.data_parallel
    keys.space["micro_batch_size"] = batch.micro_batch_size
    keys.map(base, "runner_config.batch_size", "micro_batch_size")
    ignored = [
        key
        for key in (
            "parallel_config.data_parallel", "parallel_config.model_parallel",
            "parallel_config.pipeline_stage", "parallel_config.context_parallel",
            "parallel_config.expert_parallel", "parallel_config.micro_batch_num",
            "runner_config.gradient_accumulation_steps",
        )
        if base.count(key) > 1
    ]  # fmt: skip
    if ignored:
        keys.notes.append(
            f"{', '.join(ignored)} have no effect here: MindFormers sets them to 1 outside of "
            "semi-automatic parallelism (use_parallel: True, parallel_mode: 1)."
        )


def _chunks(keys: KnobKeys, base: MindFormersYaml) -> None:
    pipeline = base.section("parallel.pipeline_config")
    schedule = pipeline.get("pipeline_scheduler")
    chunks = base.count("model.model_config.pp_interleave_num")
    acts = bool(pipeline.get("pipeline_interleave"))
    if schedule == _ZERO_BUBBLE:
        keys.constraints["min_micro_batches_per_stage"] = 2
        keys.notes.append(
            f"The schedule {_ZERO_BUBBLE} asks for two micro-batches per stage; pp_interleave_num "
            f"= {chunks} is not searched."
        )
    if schedule not in _PLAIN_SCHEDULES:
        if schedule != _ZERO_BUBBLE:
            keys.notes.append(f"Nothing is known of the schedule {schedule!r}; it stays.")
        if acts and chunks > 1:
            keys.space["pp_interleave_num"] = chunks
            keys.map(base, "model.model_config.pp_interleave_num", "pp_interleave_num")
        return
    if chunks > 1 and not acts:
        keys.notes.append(
            f"model.model_config.pp_interleave_num = {chunks} does not count, since "
            "parallel.pipeline_config.pipeline_interleave is not True; it is no knob here."
        )
        return
    keys.space["pp_interleave_num"] = sorted({1, 2, chunks})
    keys.map(base, "model.model_config.pp_interleave_num", "pp_interleave_num")
    if not acts:
        switch = {str(n): n > 1 for n in keys.space["pp_interleave_num"]}
        keys.map(base, "parallel.pipeline_config.pipeline_interleave", "pp_interleave_num", switch)
        if schedule is None:
            named = dict.fromkeys(switch, "1f1b")
            keys.map(
                base, "parallel.pipeline_config.pipeline_scheduler", "pp_interleave_num", named
            )


def _offset(keys: KnobKeys, base: MindFormersYaml, model: Mapping[str, Any] | None) -> None:
    told = base.section("model.model_config").get("offset", 0)
    if told and not _is_stage_list(told):
        keys.notes.append(
            f"model.model_config.offset = {told!r} is neither 0 nor a list per stage: it stays."
        )
        return
    if model is None and not told:
        return
    own = [] if not told else [told]
    keys.space["offset"] = ["even", *(["balanced"] if model else []), *own]
    keys.map(base, "model.model_config.offset", "offset")


def _is_stage_list(value: Any) -> bool:
    try:
        parse_stage_list(value if isinstance(value, list) else None)
    except ValueError:
        return False
    return True


def _data(keys: KnobKeys, base: MindFormersYaml) -> None:
    """Where nothing is to be split, the data pipeline is left."""
    workers = base.count("train_dataset.num_parallel_workers")
    ahead = base.count("train_dataset.prefetch_size")
    # MindSpore refuses more workers than the host has cores.
    cores = os.cpu_count() or 1
    more = {number for number in (2 * workers, 4 * workers) if number <= cores}
    keys.space["data_workers"] = sorted({workers} | more)
    keys.space["prefetch"] = sorted({ahead, 8 * ahead})
    keys.map(base, "train_dataset.num_parallel_workers", "data_workers")
    keys.map(base, "train_dataset.prefetch_size", "prefetch")
