"""The learning rate in its three forms, and the optimizer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

if TYPE_CHECKING:
    from mindtune.experiments.gpt.config import GptConfig

__all__ = ["WarmupCosine", "build_optimizer", "learning_rate", "rate_at"]

# The cosine ends at a tenth of the peak (Hoffmann et al., arXiv:2203.15556, section 3).
_FINAL_SHARE = 0.1


def rate_at(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Return the rate of a step (from 0): warm-up, cosine to a tenth of the peak, constant."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (_FINAL_SHARE + (1 - _FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))


class WarmupCosine(LearningRateSchedule):
    """The rates of `rate_at` as a schedule cell, evaluated on the device."""

    def __init__(self, *, peak: float, warmup: int, steps: int) -> None:
        super().__init__()
        self.peak = peak
        self.warmup = float(warmup)
        self.rise = 1.0 / max(1, warmup)
        self.fall = 1.0 / max(1, steps - warmup)
        self.final = peak * _FINAL_SHARE
        self.swing = peak * (1 - _FINAL_SHARE) * 0.5
        self.one = Tensor(1.0, ms.float32)

    def construct(self, global_step: Any) -> Any:
        """Return the rate of a step."""
        step = ops.cast(global_step, ms.float32)
        rising = self.peak * self.rise * (step + 1.0)
        progress = ops.minimum((step - self.warmup) * self.fall, self.one)
        falling = self.final + self.swing * (1.0 + ops.cos(math.pi * progress))
        return ops.select(step < self.warmup, rising, falling)


def learning_rate(config: GptConfig, *, num_updates: int) -> Any:
    """Return what the optimizer is given: a float, a schedule cell, or a list of rates.

    Args:
        config: The workload's config.
        num_updates: Most updates that can happen; a table must have that many entries, since
            MindSpore reads beyond
            its end.
    """
    training = config.training
    peak = training.learning_rate
    if training.lr_schedule == "float":
        return peak
    if training.lr_schedule == "cosine":
        return WarmupCosine(peak=peak, warmup=training.warmup, steps=training.steps)
    return [
        rate_at(step, peak=peak, warmup=training.warmup, steps=training.steps)
        for step in range(num_updates)
    ]


def build_optimizer(network: Any, config: GptConfig, *, num_updates: int) -> Any:
    """Build the optimizer: matrices and embeddings decay, biases and norms do not."""
    parameters = network.trainable_params()
    groups = [
        {
            "params": [p for p in parameters if not _is_vector(p.name)],
            "weight_decay": config.training.weight_decay,
        },
        {"params": [p for p in parameters if _is_vector(p.name)], "weight_decay": 0.0},
        {"order_params": parameters},
    ]
    rate = learning_rate(config, num_updates=num_updates)
    return nn.AdamWeightDecay(groups, learning_rate=rate)


def _is_vector(name: str) -> bool:
    return name.endswith(("bias", "gamma", "beta"))
