"""Reads the knobs back inside a training of MindFormers: from what was built, never from the YAML.

The trainer changes in silence what it was told: degrees outside of parallel mode, accumulation
beside a pipeline. What it made of the batch it tells its own `MFLossMonitor`, which is always in
the list; degrees and types stand in the config of the network that was built; where layers lie and
which are repeated is asked of the network (`LayerSetting` and the flags of cells), the data
pipeline of MindSpore. What cannot be seen is left out: then nothing is judged by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import mindspore.dataset as ds

__all__ = ["TrainerFacts", "effective_knobs", "trainer_facts"]

_MONITOR = "MFLossMonitor"
_REPEATED = {"output_recompute", "output_no_recompute"}
"""Flags that `Cell.recompute` leaves, in MindSpore 2.10 and in 2.7."""
_PARALLEL_MODES = (ms.ParallelMode.SEMI_AUTO_PARALLEL, ms.ParallelMode.AUTO_PARALLEL)
_DEGREES = {
    "data_parallel": "data_parallel_size",
    "model_parallel": "tensor_model_parallel_size",
    "pipeline_stage": "pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "use_seq_parallel": "sequence_parallel",
}
"""Knob, and attribute of an old model's parallel_config -> attribute of a new model's config."""


@dataclass(frozen=True)
class TrainerFacts:
    """What the trainer settled for the training in this process."""

    global_batch_size: int
    num_devices: int
    micro_batch_num: int
    """Of a pipeline."""
    accumulation: int
    """Where there is no pipeline."""
    seq_length: int | None


def trainer_facts(callbacks: Any, network: Any) -> TrainerFacts | None:
    """Return what the trainer told its loss monitor; None: there is none.

    Args:
        callbacks: of the training.
        network: the training step.
    """
    monitor = next((c for c in callbacks or () if type(c).__name__ == _MONITOR), None)
    if monitor is None or not monitor.global_batch_size:
        return None
    length = getattr(_model_config(network), "seq_length", None)
    return TrainerFacts(
        global_batch_size=int(monitor.global_batch_size),
        num_devices=int(monitor.device_num),
        micro_batch_num=int(getattr(monitor, "mirco_size", None) or 1),
        accumulation=int(getattr(monitor, "gradient_accumulation_steps", None) or 1),
        seq_length=length if isinstance(length, int) and length > 0 else None,
    )


def effective_knobs(facts: TrainerFacts, network: Any) -> dict[str, Any]:
    """Return the knobs that act, by their canonical names.

    Args:
        facts: of the trainer.
        network: the training step.
    """
    knobs: dict[str, Any] = {
        "optimizer_sharding": "optimizer"
        if ms.get_auto_parallel_context("enable_parallel_optimizer")
        else "none",
        "data_workers": int(ds.config.get_num_parallel_workers()),
        "prefetch": int(ds.config.get_prefetch_size()),
    }
    model = _model_config(network)
    degrees = _degrees(model)
    splits = ms.get_auto_parallel_context("parallel_mode") in _PARALLEL_MODES
    if degrees and not splits:
        # Every rank has samples of its own, and the whole model.
        degrees["data_parallel"] = facts.num_devices
    knobs |= degrees
    if "data_parallel" in degrees:
        pipelined = splits and degrees["pipeline_stage"] > 1
        rounds = facts.micro_batch_num if pipelined else facts.accumulation
        knobs["micro_batch_num"] = rounds
        samples = facts.global_batch_size // rounds
        knobs["micro_batch_size"] = samples // degrees["data_parallel"]
    placed = _placed(network)
    if placed is not None:
        knobs |= _placement(*placed)
    precision = getattr(model, "compute_dtype", None)
    if precision is not None:
        knobs["precision"] = str(precision).lower()
    return knobs


def _model_config(network: Any) -> Any:
    """Return the config of the model inside the step; None: it has none that is known."""
    configs = (getattr(cell, "config", None) for cell in _cells(network))
    return next((config for config in configs if _degrees(config)), None)


def _degrees(config: Any) -> dict[str, Any]:
    """Return the degrees in a model's config, old or new; empty: it is none."""
    old = getattr(config, "parallel_config", None)
    if all(hasattr(old, name) for name in _DEGREES):
        return {name: getattr(old, name) for name in _DEGREES}
    if all(hasattr(config, name) for name in _DEGREES.values()):
        return {name: getattr(config, theirs) for name, theirs in _DEGREES.items()}
    return {}


def _cells(network: Any) -> Iterator[Any]:
    yield from (cell for _, cell in network.cells_and_names())


def _placed(network: Any) -> tuple[Any, Any] | None:
    """Return MindFormers' `LayerSetting` and the layers that it placed."""
    for cell in _cells(network):
        setting, layers = getattr(cell, "layer_setting", None), getattr(cell, "layers", None)
        if setting is not None and layers is not None:
            return setting, layers
    return None


def _placement(setting: Any, layers: Any) -> dict[str, Any]:
    """Return the knobs that say where layers lie and which are repeated."""
    knobs: dict[str, Any] = {"pp_interleave_num": int(setting.pp_interleave_num)}
    if int(setting.pp) > 1:
        rows = setting.offset.tolist()
        knobs["offset"] = rows if isinstance(rows, list) else 0
    repeated = _recompute(setting, layers)
    if repeated is not None:
        knobs["recompute"] = repeated
    return knobs


def _recompute(setting: Any, layers: Any) -> Any | None:
    """Return `none`, `full`, or the repeated layers per stage; None: not to be told."""
    parts = getattr(setting, "select_recompute", None)
    if isinstance(parts, dict) and any(map(_acts, parts.values())):
        return None
    flags = [bool(_REPEATED & set(layer.get_flags())) for layer in layers]
    if not any(flags):
        return "none"
    if all(flags):
        return "full"
    if int(setting.pp_interleave_num) > 1:
        return None
    counts = [0] * int(setting.pp)
    for repeated, stage in zip(flags, setting.pp_ids, strict=False):
        counts[int(stage)] += repeated
    return counts


def _acts(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_acts, value))
    return bool(value)
