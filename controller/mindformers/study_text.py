"""The study file of a MindFormers YAML, with comments."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mindtune.controller.errors import ConfigError
from mindtune.controller.mindformers.base_yaml import MindFormersYaml, comment_name
from mindtune.controller.mindformers.keys import KnobKeys
from mindtune.controller.mindformers.knob_keys import knob_keys
from mindtune.controller.mindformers.model_block import model_block

__all__ = ["study_text"]

_START = "run_mindformer.py"
"""Program of MindFormers' repository that starts a training; its wheel does not have it."""
_DEVICES_PER_NODE = 8
"""MindFormers' own default (DEVICE_NUM_PER_NODE)."""
_NO_LIMIT = "1024GB"
"""MindFormers' way to say that memory is not limited."""
_PRECISIONS = {"float32": "float32", "fp32": "float32", "float16": "float16", "fp16": "float16",
               "bfloat16": "bfloat16", "bf16": "bfloat16"}  # fmt: skip
_WIDTH = 96


def study_text(
    base: MindFormersYaml, path: Path, out: Path, *, num_devices: int | None = None
) -> tuple[str, list[str]]:
    """Return the text of a study file, and what it could not take from the YAML.

    Args:
        base: the YAML.
        path: its file.
        out: where the study file will stand.
        num_devices: devices of the job; None: as many as the degrees fill.

    Raises:
        ConfigError: the YAML is not valid, or the number of devices is not known or does not fit.
    """
    devices = _devices(base, num_devices)
    model, notes = model_block(base, path.parent)
    keys = knob_keys(base, model, devices)
    notes = [*_notes(base), *notes, *keys.notes]
    lines = [
        *_head(path, notes),
        *_trial(path, out, devices),
        *_model(model),
        *_cluster(base, devices),
        *_training(base, devices, notes),
        *_space(base, keys),
        *_constraints(base, keys),
        "score: {mfu: 1.0, stability: 1.0}   # exponents of value = mfu^a x stability^b",
        "",
        "# Policies of the production run; all are on by default.",
        "policies: {}",
        "",
        "# Dotted key of the YAML -> knob; `values` where MindFormers spells a value differently.",
        "overrides:",
        *(f"  {_flow(key)}: {_flow(entry)}" for key, entry in keys.overrides.items()),
    ]
    return "\n".join(lines) + "\n", notes


def _devices(base: MindFormersYaml, told: int | None) -> int:
    if base.mode == "stand_alone":
        if told not in (None, 1):
            raise ConfigError(
                f"{base.source} trains on one device, since use_parallel is not True, but got "
                f"--devices {told}; set use_parallel in the YAML."
            )
        return 1
    product = base.degrees_product
    if base.mode == "semi_auto":
        if told not in (None, product):
            raise ConfigError(
                f"--devices must be data_parallel x model_parallel x pipeline_stage x "
                f"context_parallel of {base.source}, which is {product}, but got {told}; "
                "MindFormers starts no other number."
            )
        return product
    if told is None and product == 1:
        raise ConfigError(
            f"the number of devices must be given with --devices, since {base.source} trains data "
            "parallel and does not tell it."
        )
    return told or product


def _notes(base: MindFormersYaml) -> list[str]:
    notes = []
    mode = base.tree.get("run_mode")
    if not base.trains:
        notes.append(
            "The YAML names no trainer or no model: it starts no training as it stands, so that "
            "there is nothing to search yet."
        )
    elif mode not in ("train", "finetune"):
        notes.append(
            f"run_mode is {mode!r}: set it to train or finetune, and add what a training needs "
            "(train_dataset, optimizer, lr_schedule, runner_wrapper)."
        )
    if base.is_pynative:
        notes.append(
            "context.mode is PyNative: trials and the production run train in it, operator by "
            "operator, which is slower by far; set it to 0 to compile a graph."
        )
    notes += _sinks(base)
    notes += _starts(base)
    return notes


def _starts(base: MindFormersYaml) -> Iterator[str]:
    if base.tree.get("load_checkpoint"):
        yield (
            "load_checkpoint is left out in trials, which begin from fresh weights; name a "
            "checkpoint in trial.load_checkpoint to have all of them begin from it. The "
            "production run loads it as before."
        )
    if base.tree.get("resume_training"):
        yield (
            "resume_training is off in trials: each begins at step 0. The production run resumes "
            "as before."
        )


def _sinks(base: MindFormersYaml) -> Iterator[str]:
    if not base.flag("runner_config.sink_mode", default=True):
        return
    size = base.count("runner_config.sink_size")
    if size > 1:
        yield (
            f"runner_config.sink_mode is on: a callback sees one step in sink_size = {size}. Set "
            "it to False to have every step measured and guarded."
        )
    elif _target(base).upper() == "CPU":
        yield (
            "runner_config.sink_mode is on, which a CPU drops after MindFormers has multiplied "
            "the epochs for it: a run gets that many times too long. Set it to False."
        )


def _target(base: MindFormersYaml) -> str:
    return str(base.section("context").get("device_target", "Ascend"))


def _head(path: Path, notes: list[str]) -> Iterator[str]:
    yield f"# A study of {comment_name(path)} in MindFormers' trainer. Unknown keys are errors."
    yield "# Check it with `mindtune space`, run it with `mindtune search`."
    for note in notes:
        yield from _comment(f"NOTE: {note}")
    yield "schema: 1"
    yield ""
    name = re.sub(r"[^\w.\-]", "-", path.stem)[:100] or "study"
    yield "study:"
    yield f"  name: {_flow(name)}"
    yield "  trials: 15              # configs to measure, the YAML's own included (it is trial 0)"
    yield "  seed: 0"
    yield "  time_budget: null       # e.g. 2h: start no further trial after that"
    yield "  storage: null           # null: SQLite in the study's folder; or a URL, or env:NAME"
    yield ""


def _trial(path: Path, out: Path, devices: int) -> Iterator[str]:
    own = (out.parent / _START).is_file()
    command = ["python", _START, "--config", "{config}"] if own else [
        "python", "-m", "mindtune.controller.mindformers.train", "--config", "{config}"
    ]  # fmt: skip
    here = os.path.relpath(path.resolve(), out.parent.resolve())
    yield "trial:"
    yield f"  # Starts MindFormers' Trainer. {_START} or a program of yours will do as well, but"
    yield "  # for --register_path: the variable REGISTER_PATH names the folder of your modules."
    yield f"  command: {_flow(command)}"
    if devices > 1:
        yield "  launcher: msrun         # puts msrun in front; none: the command starts the ranks"
    else:
        yield "  launcher: none"
    if devices > _DEVICES_PER_NODE:
        yield "  # hosts: [node0, node1] # all of them, the machine that searches first; with"
        yield "                          # launcher: slurm they are found"
    yield "  callback: mindformers   # ours joins `callbacks` in the YAML of each trial; null: the"
    yield "                          # log is read, and a trial ended once it holds its steps"
    yield f"  base_config: {_flow(here)}"
    yield "  warmup_steps: 5         # not measured"
    yield "  measure_steps: 20       # measured after the warm-up; then the trial ends"
    yield "  confirm_steps: 100      # the leaders' losses are compared over this many steps"
    yield "  repeats: 3              # measurements of each leader"
    yield "  startup_deadline: 30min # until the first step is done, compilation included"
    yield "  deadline: 30min         # after that, until the trial has ended"
    yield ""


def _model(model: Mapping[str, Any] | None) -> Iterator[str]:
    if model is None:
        yield "# model: is left out, see the note above. It has the keys num_layers, hidden_size,"
        yield "# num_heads, num_kv_heads, intermediate_size, gated_mlp, vocab_size, seq_length,"
        yield "# tie_embeddings, flash_attention, num_experts, experts_per_token,"
        yield "# moe_intermediate_size."
    else:
        yield "model:"
        yield from (f"  {name}: {_flow(value)}" for name, value in model.items())
    yield ""


def _cluster(base: MindFormersYaml, devices: int) -> Iterator[str]:
    target = _target(base)
    yield "cluster:"
    yield f"  num_devices: {devices}"
    if devices > _DEVICES_PER_NODE and devices % _DEVICES_PER_NODE == 0:
        yield f"  devices_per_node: {_DEVICES_PER_NODE}     # MindFormers' default; correct it"
    if target.upper() == "CPU":
        yield "  device: cpu"
        yield "  peak_flops: null        # measure: find this host's peak, for MFU (10 to 20 s)"
    else:
        yield f"  device: {_flow(target)}          # write the model, such as Ascend910B-A2: MFU"
        yield "  # needs its peak, predicted times the bandwidths, the memory rule its memory:"
        yield "  # device_memory: 64GB, intra_node_bandwidth: 196GB/s,"
        yield "  # inter_node_bandwidth: 25GB/s"
    yield ""


def _training(base: MindFormersYaml, devices: int, notes: list[str]) -> Iterator[str]:
    batch = base.batch(devices)
    told = base.section("model.model_config").get("compute_dtype")
    # Defaults of LlamaConfig and ChatGLM2Config, and of MFModelConfig.
    usual = "float16" if base.is_legacy else "bfloat16"
    precision = _PRECISIONS.get(str(told), usual)
    optimizer = str(base.section("optimizer").get("type", "AdamW")).lower()
    yield "training:"
    yield f"  global_batch_size: {batch.global_batch_size}    # " + _identity(base, devices)
    if told is not None and str(told) not in _PRECISIONS:
        notes.append(f"compute_dtype = {told!r} is taken for {usual}.")
    default = "" if told is not None else "    # the default of compute_dtype"
    yield f"  precision: {precision}{default}"
    yield f"  optimizer: {_flow(optimizer)}"
    yield ""


def _identity(base: MindFormersYaml, devices: int) -> str:
    batch = base.batch(devices)
    if base.mode != "semi_auto":
        return f"batch_size x devices = {batch.micro_batch_size} x {batch.data_parallel}"
    rounds = "micro_batch_num" if base.degree("pipeline_stage") > 1 else "accumulation"
    size = base.count("runner_config.batch_size")
    return (
        f"batch_size x data_parallel x {rounds} x micro_batch_interleave_num = "
        f"{size} x {batch.data_parallel} x {batch.micro_batch_num} x {base.interleave}"
    )


def _space(base: MindFormersYaml, keys: KnobKeys) -> Iterator[str]:
    yield "# A value fixes a knob, a list searches it, `auto` takes the divisors of num_devices."
    yield "# micro_batch_num follows from the others. A list among the values of `recompute` or"
    yield "# `offset` is MindFormers' own: a number per pipeline stage."
    yield "space:"
    yield from (f"  {name}: {_flow(values)}" for name, values in keys.space.items())
    if base.mode == "semi_auto":
        yield "  # data_workers: [8, 16]  with train_dataset.num_parallel_workers: data_workers"
    yield "  # precision: [float16, bfloat16]  with model.model_config.compute_dtype: precision"
    yield ""


def _constraints(base: MindFormersYaml, keys: KnobKeys) -> Iterator[str]:
    yield "constraints:"
    yield "  framework: mindformers  # its own rules hold, also those that it only documents"
    memory = base.section("context").get("max_device_memory")
    # What a YAML leaves for predicting says nothing about training.
    if base.tree.get("run_mode") == "predict":
        memory = None
    if isinstance(memory, str) and re.fullmatch(r"\d+(\.\d+)?GB", memory) and memory != _NO_LIMIT:
        yield f"  max_memory: {memory}        # context.max_device_memory"
    yield from (f"  {name}: {_flow(value)}" for name, value in keys.constraints.items())
    yield ""


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("...").removesuffix("\n")


def _comment(text: str) -> Iterator[str]:
    line = "#"
    for word in text.split():
        if len(line) + 1 + len(word) > _WIDTH:
            yield line
            line = "#  "
        line += f" {word}"
    yield line
