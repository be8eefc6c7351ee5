"""What a user may tell about the training, since no step reports it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindtune.controller.contract import ModelSection, parse
from mindtune.controller.errors import ConfigError
from mindtune.search.model_shape import ModelShape

__all__ = ["Workload"]


class Workload:
    """Facts and functions of the user's.

    Args:
        tokens_per_sample: Tokens of one sample; None: the width of the first integer matrix in
            the batch, if there is one.
        global_batch_size: Samples of an optimizer step over all ranks, where the trainer knows;
            None: counted from the batches.
        model: Shape of the model, by the keys of `model:` in a study file; with it and
            `peak_flops` there is MFU.
        peak_flops: Peak of one device in FLOP/s.
        effective: Returns knobs read back from the running program, by their canonical names.
        eval_fn: Returns the validation loss; called once at the end, on every rank.
        model_signals: Takes a batch as the network does and returns named arrays from inside the
            model, such as `attention_entropy`; called on every rank in sampled steps.

    Raises:
        ConfigError: A number is not positive, or the shape is not valid.
    """

    def __init__(
        self,
        *,
        tokens_per_sample: int | None = None,
        global_batch_size: int | None = None,
        model: Mapping[str, Any] | None = None,
        peak_flops: float | None = None,
        effective: Callable[[], Mapping[str, Any]] | None = None,
        eval_fn: Callable[[], float] | None = None,
        model_signals: Callable[..., Mapping[str, Any]] | None = None,
    ) -> None:
        sizes = {
            "tokens_per_sample": tokens_per_sample,
            "global_batch_size": global_batch_size,
            "peak_flops": peak_flops,
        }
        for name, value in sizes.items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, but got {value}; leave it out.")
        self.tokens_per_sample = tokens_per_sample
        self.global_batch_size = global_batch_size
        self.peak_flops = peak_flops
        self.effective = effective
        self.eval_fn = eval_fn
        self.model_signals = model_signals
        self.model: ModelSection | None = None
        self._flops_per_token: float | None = None
        if model is not None:
            self.model = parse(ModelSection, dict(model), source="model")
            self._flops_per_token = ModelShape(**self.model.model_dump()).model_flops

    def step_flops(self, tokens: int | None) -> float | None:
        """Return the model FLOPs of a step; None where they are unknown."""
        if tokens is None or self._flops_per_token is None:
            return None
        return self._flops_per_token * tokens
