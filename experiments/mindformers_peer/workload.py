"""The training itself: data, YAML, and the one thing that a CPU cannot do.

The path is MindFormers' own: YAML, `MindFormerConfig`, `build_context`, `Trainer(config).train()`
with MindRecord data, `CausalLanguageModelDataset`, `LlamaForCausalLM`, `AdamW`,
`CosineWithWarmUpLR` and `MFTrainOneStepCell`. Only configuration makes it run on a CPU (no fused
kernels, the sliced form of the rotary embedding, no sink mode), but for the overflow status: its
register exists on Ascend and GPU alone, so an overflow is "a gradient is not finite" here, as in
Ascend's INFNAN mode. What follows from it is the unchanged step of MindFormers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mindtune.experiments.gpt.corpus import Corpus
from mindtune.experiments.mindformers_peer.case import PeerCase, Scale

__all__ = ["SEQ_LENGTH", "VOCAB_SIZE", "patch_overflow_status", "training_yaml", "write_data"]

SEQ_LENGTH = 64
VOCAB_SIZE = 256


def write_data(path: Path, samples: int, *, seed: int) -> None:
    """Write windows of the reference corpus as MindRecord.

    MindFormers' Llama shifts the tokens itself, so that a window has one more than `SEQ_LENGTH`.
    The corpus separates its files by zeros, which this model takes for padding: they become line
    feeds.
    """
    from mindspore.mindrecord import FileWriter  # noqa: PLC0415 - in the peer's environment

    corpus = Corpus.load("train", cache=True)
    starts = np.random.default_rng(seed).integers(0, len(corpus) - SEQ_LENGTH - 1, size=samples)
    rows = []
    for start in starts:
        tokens = corpus.window(int(start), SEQ_LENGTH + 1).astype(np.int32)
        rows.append({"input_ids": np.where(tokens == 0, ord("\n"), tokens)})
    writer = FileWriter(str(path), shard_num=1, overwrite=True)
    writer.add_schema({"input_ids": {"type": "int32", "shape": [-1]}}, "bytes of Python source")
    writer.write_raw_data(rows)
    writer.commit()


def patch_overflow_status() -> None:
    """Let MindFormers' step find overflows on a CPU."""
    from mindformers.wrapper import MFTrainOneStepCell  # noqa: PLC0415
    from mindspore import ops  # noqa: PLC0415

    # MindSpore's compiler takes the first argument for the cell only if it is called `self`.
    def get_overflow_status(self: Any, status: Any, compute_output: Any) -> Any:  # noqa: ARG001
        finite = ops.isfinite(compute_output[0]).all()
        for gradient in compute_output[1:]:
            finite = ops.logical_and(finite, ops.isfinite(gradient).all())
        return ops.logical_not(finite)

    MFTrainOneStepCell.get_overflow_status = get_overflow_status


def training_yaml(case: PeerCase, data: Path, *, own_path: Path) -> dict[str, Any]:
    """Return the YAML that a user of MindFormers would write.

    Args:
        case: What to train.
        data: Folder of the MindRecord file.
        own_path: Where this YAML will stand: the callback reads its block from there.
    """
    callbacks: list[dict[str, Any]] = [
        {"type": "MFLossMonitor"},
        {"type": "Witness", "sees_steps": case.turns is None},
    ]
    if case.plugged in ("registry", "yaml"):
        ours: dict[str, Any] = {"type": "TuneCallback", "config": str(own_path)}
        if case.plugged == "yaml":
            ours["auto_register"] = "tune.TuneCallback"
        callbacks.append(ours)
    if case.saves:
        callbacks.append(
            {"type": "CheckpointMonitor", "save_checkpoint_steps": case.steps,
             "integrated_save": True, "async_save": False}
        )  # fmt: skip
    checkpoints = ""
    if case.resume_from is not None:
        checkpoints = str(case.resume_from / "output" / "checkpoint")
    schedule = {
        "type": "CosineWithWarmUpLR",
        "learning_rate": case.learning_rate,
        "lr_end": case.learning_rate / 10 if case.lr_end is None else case.lr_end,
        "warmup_ratio": case.warmup_ratio,
        "total_steps": -1,
    }
    optimizer = {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}
    if case.constant_rate:
        optimizer["learning_rate"] = case.learning_rate
    return {
        "seed": case.seed,
        "run_mode": "train",
        "output_dir": "./output",
        "load_checkpoint": checkpoints,
        "load_ckpt_format": "ckpt",
        "resume_training": bool(checkpoints),
        "use_parallel": False,
        "print_separate_loss": False,
        "use_legacy": True,
        "context": {
            "mode": int(case.pynative),
            "device_target": "CPU",
            "max_call_depth": 10000,
        },
        "runner_config": {
            "epochs": 2 if checkpoints else 1,
            "batch_size": case.batch,
            "sink_mode": case.sink_mode,
            "sink_size": 1,
        },
        "runner_wrapper": {
            "type": "MFTrainOneStepCell",
            "scale_sense": _scale_sense(case.scale),
            "use_clip_grad": True,
            "max_grad_norm": case.max_grad_norm,
            "local_norm": case.local_norm,
        },
        "micro_batch_interleave_num": case.interleave,
        "check_for_nan_in_loss_and_grad": case.check_for_nan,
        "parallel": {
            "parallel_mode": 0,
            "gradients_mean": True,
            "full_batch": False,
            "enable_parallel_optimizer": False,
        },
        "parallel_config": {
            "data_parallel": 1,
            "model_parallel": 1,
            "pipeline_stage": 1,
            "micro_batch_num": 1,
        },
        "recompute_config": {"recompute": False, "select_recompute": False},
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "tiny_llama"},
        "train_dataset": {
            "data_loader": {"type": "MindDataset", "dataset_dir": str(data), "shuffle": True},
            "input_columns": ["input_ids"],
            "num_parallel_workers": 1,
            "drop_remainder": True,
            "batch_size": case.batch,
            "prefetch_size": 1,
            "python_multiprocessing": False,
            "numa_enable": False,
        },
        "train_dataset_task": {"type": "CausalLanguageModelDataset"},
        "model": {"arch": {"type": "LlamaForCausalLM"}, "model_config": _model(case)},
        "optimizer": optimizer,
        **({} if case.constant_rate else {"lr_schedule": schedule}),
        "metric": {"type": "PerplexityMetric"},
        "callbacks": callbacks,
        "mindtune": case.mindtune,
    }


def _scale_sense(scale: float | Scale) -> Any:
    if not isinstance(scale, Scale):
        return scale
    return {
        "type": "DynamicLossScaleUpdateCell",
        "loss_scale_value": scale.initial,
        "scale_factor": scale.factor,
        "scale_window": scale.window,
    }


def _model(case: PeerCase) -> dict[str, Any]:
    return {
        "type": "LlamaConfig",
        "batch_size": case.batch,
        "seq_length": SEQ_LENGTH,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": VOCAB_SIZE,
        "intermediate_size": 176,
        "multiple_of": 16,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "ignore_token_id": -100,
        "compute_dtype": case.dtype,
        "layernorm_compute_type": "float32",
        "softmax_compute_type": "float32",
        "rotary_dtype": "float32",
        "param_init_type": "float32",
        "use_past": False,
        "init_method_std": 0.02,
        "checkpoint_name_or_path": "",
        # The unsliced form needs a BatchMatMul that broadcasts, which has no CPU kernel.
        "use_rope_slice": True,
        "use_flash_attention": False,
        "fused_rms_norm": False,
    }
