"""Which names programs give to the signals, and in which units they print them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from mindtune.controller.records.log_readers.reader import NUMBER, flag, is_whole, number
from mindtune.policies.signals import SIGNAL_NAMES, Observation

__all__ = ["EPOCH_NAMES", "SIGNALS", "STEP_NAMES", "collect", "is_signal", "is_training", "make",
           "normal", "read_value"]  # fmt: skip

STEP_NAMES = ("step", "global_step", "current_steps", "num_updates", "iteration", "iter",
              "train_step", "opt_step", "steps", "update_step", "iterations", "batch")  # fmt: skip
"""What counts optimizer steps; the first that a line has holds."""
EPOCH_NAMES = ("epoch", "cur_epoch")

SIGNALS: Mapping[str, tuple[str, ...]] = {
    "loss": ("loss", "train_loss", "training_loss", "total_loss", "lm_loss", "avg_loss",
             "mean_loss", "step_loss", "train_loss_step", "loss_step", "gpt_loss",
             "reduced_train_loss", "loss_train", "train_crossentropyloss", "train_ce_loss",
             "actor_loss", "act_loss", "loss_metrics_global_avg_loss", "output", "outputs"),
    "eval_loss": ("eval_loss", "val_loss", "valid_loss", "validation_loss", "loss_val",
                  "test_loss"),
    "grad_norm": ("grad_norm", "global_norm", "gradient_norm", "gnorm", "gradnorm",
                  "global_grad_norm", "train_grad_norm", "optim_total_grad_norm",
                  "total_grad_norm", "total_norm", "norm"),
    "learning_rate": ("learning_rate", "lr", "cur_lr", "current_lr", "train_learning_rate",
                      "train_lr", "optim_lr", "optim_learning_rate_group0", "lr_0"),
    "loss_scale": ("loss_scale", "scaling_sens", "scale_sense", "grad_scale", "loss_scaling",
                   "scale"),
    "overflow": ("overflow", "overflow_cond", "is_overflow", "found_inf"),
    "update_skipped": ("update_skipped", "is_skip", "skipped_update"),
    "step_time_s": ("step_time", "per_step_time", "step_cost", "time_per_step", "iter_time",
                    "batch_time", "time_per_iteration", "iteration_time",
                    "elapsed_time_per_iteration", "train_step_time", "dt", "ms_step"),
    "data_time_s": ("data_time", "data_loading_time", "data_wait_time"),
    "tokens_per_s": ("tokens_per_s", "tokens_per_sec", "tokens_per_second", "tok_sec", "tok_s",
                     "tokens_sec", "wps"),
    "mfu": ("mfu",),
    "clip_norm": ("clip_norm",),
    "global_batch_size": ("global_batch_size",),
    "tokens": ("tokens_per_step", "wpb"),
    "update_norm": ("update_norm",),
}  # fmt: skip
"""Signal -> the names that stand for it, the better ones first."""

_MILLISECONDS = frozenset({"ms_step"})
_ALIASES = {name: signal for signal, names in SIGNALS.items() for name in names}
_RANK = {name: rank for names in SIGNALS.values() for rank, name in enumerate(names)}
_TIMES = frozenset({"step_time_s", "data_time_s", "wall_time_s"})
_RATIOS = frozenset({"mfu", "device_utilization"})
_INTEGERS = frozenset({
    "run", "global_batch_size", "micro_batch_size", "num_microbatches", "tokens", "straggler_rank",
    "device_memory_used_bytes", "device_memory_total_bytes", "memory_allocated_bytes",
})  # fmt: skip
_TRAINING = ("loss", "grad_norm", "step_time_s", "overflow", "loss_scale", "learning_rate",
             "update_skipped")  # fmt: skip
_VALUE = re.compile(rf"\s*({NUMBER})\s*(ms|msec|s|sec|us|%)?\s*$")
_NOT_NAME = re.compile(r"[^a-z0-9]+")
_UNITS = {"ms": 1e-3, "msec": 1e-3, "us": 1e-6, "s": 1.0, "sec": 1.0}


@lru_cache(maxsize=4096)
def normal(name: str) -> str:
    """Return a name as the tables spell it: small letters, one underscore between words."""
    return _NOT_NAME.sub("_", name.strip().lower()).strip("_")


def read_value(value: object) -> tuple[float, str] | None:
    """Return number and unit of what a program printed; None: it is no number.

    A list or tuple stands for its first number: the first parameter group, the only element.
    """
    if isinstance(value, list | tuple):
        return read_value(value[0]) if value else None
    if isinstance(value, str):
        return _read_text(value)
    if isinstance(value, int | float):
        try:
            return float(value), ""
        except OverflowError:
            return None
    return None


def _read_text(value: str) -> tuple[float, str] | None:
    if value.isascii() and "_" not in value:  # what Python reads besides is not how programs print
        try:
            return float(value), ""
        except ValueError:
            pass
    found = _VALUE.match(value)
    if found is not None:
        return number(found[1]), found[2] or ""
    truth = flag(value)
    return None if truth is None else (truth, "")


def collect(pairs: Iterable[tuple[str, object]]) -> dict[str, float]:
    """Return signals by our names, in our units, from names and values of another program.

    Names that are ours already are taken as they are; names that nobody knows are passed over.
    Of several names for one signal the better one holds.
    """
    signals: dict[str, float] = {}
    ranks: dict[str, int] = {}
    for raw, value in pairs:
        name = normal(raw)
        milliseconds = name.endswith("_ms") or name in _MILLISECONDS
        base = name.removesuffix("_ms") if milliseconds else name
        if base.endswith("_s") and _ALIASES.get(base.removesuffix("_s")) in _TIMES:
            base = base.removesuffix("_s")
        known = _ALIASES.get(base) or (base if base in SIGNAL_NAMES else None)
        if known is None or known in ("step", "phase"):
            continue
        read = read_value(value)
        rank = _RANK.get(base, 0)
        if read is None or ranks.get(known, rank + 1) <= rank:
            continue
        ranks[known] = rank
        signals[known] = _converted(known, *read, milliseconds=milliseconds)
    return signals


def _converted(signal: str, value: float, unit: str, *, milliseconds: bool) -> float:
    if signal in _TIMES:
        return value * _UNITS.get(unit, 1e-3 if milliseconds else 1.0)
    if signal in _RATIOS and unit == "%":
        return value / 100
    return value


def is_signal(name: str) -> bool:
    """Tell whether a name in the tables' spelling stands for a signal."""
    return name in _ALIASES or name.removesuffix("_ms") in _ALIASES


def is_training(signals: Mapping[str, float]) -> bool:
    """Tell whether signals say something about a training step."""
    return any(name in signals for name in _TRAINING)


def make(step: int, signals: Mapping[str, float], *, phase: str | None = None) -> Observation:
    """Return the observation of a step; a count that is no whole number is not measured."""
    values: dict[str, Any] = {}
    for name, value in signals.items():
        if name not in _INTEGERS:
            values[name] = value
        elif is_whole(value):
            values[name] = int(value)
    if math.isnan(values.get("mfu", 0.0)):
        del values["mfu"]
    return Observation(step=step, phase=phase, **values)
