"""Which names programs give to the signals, and in which units they print them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from mindtune.controller.records.log_readers.reader import (
    NUMBER,
    flag,
    is_whole,
    number,
    observed,
)
from mindtune.policies.signals import SIGNAL_NAMES, Observation

__all__ = ["COUNTS", "EPOCH_NAMES", "KNOWN", "SIGNALS", "STEP_NAMES", "Names", "collect",
           "is_signal", "is_training", "make", "normal", "read_value"]  # fmt: skip

STEP_NAMES = ("step", "global_step", "current_steps", "num_updates", "iteration", "iter",
              "train_step", "opt_step", "steps", "update_step", "iterations", "train_global_step",
              "trainer_global_step", "global_steps", "optimizer_step", "global_step_max_steps",
              "batch")  # fmt: skip
"""What counts optimizer steps; the first that a line has holds."""
EPOCH_NAMES = ("epoch", "cur_epoch")

SIGNALS: Mapping[str, tuple[str, ...]] = {
    "loss": ("loss", "train_loss", "training_loss", "total_loss", "lm_loss", "avg_loss",
             "mean_loss", "step_loss", "train_loss_step", "loss_step", "gpt_loss",
             "reduced_train_loss", "loss_train", "train_crossentropyloss", "train_ce_loss",
             "actor_loss", "act_loss", "loss_metrics_global_avg_loss", "loss_train_total",
             "lm_loss_training_lm_loss", "ce_loss", "actor_pg_loss", "output", "outputs"),
    "eval_loss": ("eval_loss", "val_loss", "valid_loss", "validation_loss", "loss_val",
                  "test_loss"),
    "grad_norm": ("grad_norm", "global_norm", "gradient_norm", "gnorm", "gradnorm",
                  "global_grad_norm", "train_grad_norm", "optim_total_grad_norm",
                  "total_grad_norm", "grad_norm_grad_norm", "actor_grad_norm", "total_norm",
                  "norm"),
    "learning_rate": ("learning_rate", "lr", "cur_lr", "current_lr", "train_learning_rate",
                      "train_lr", "optim_lr", "optim_learning_rate_group0", "optim_lr_group_0",
                      "learning_rate_learning_rate", "actor_lr", "lr_adamw", "lr_0"),
    "loss_scale": ("loss_scale", "scaling_sens", "scale_sense", "grad_scale", "loss_scaling",
                   "loss_scale_loss_scale", "scale"),
    "overflow": ("overflow", "overflow_cond", "is_overflow", "found_inf"),
    "update_skipped": ("update_skipped", "is_skip", "skipped_update", "optim_step_skipped"),
    "step_time_s": ("step_time", "per_step_time", "step_cost", "time_per_step", "iter_time",
                    "batch_time", "time_per_iteration", "iteration_time",
                    "elapsed_time_per_iteration", "train_step_time", "train_step_timing_in",
                    "time_metrics_end_to_end", "timing_s_step", "dt", "ms_step"),
    "data_time_s": ("data_time", "data_loading_time", "data_wait_time",
                    "time_metrics_data_loading"),
    "tokens_per_s": ("tokens_per_s", "tokens_per_sec", "tokens_per_second", "tok_sec", "tok_s",
                     "tokens_sec", "wps"),
    "mfu": ("mfu",),
    "clip_norm": ("clip_norm",),
    "global_batch_size": ("global_batch_size",),
    "tokens": ("tokens_per_step", "wpb"),
    "update_norm": ("update_norm",),
}  # fmt: skip
"""Signal -> the names that stand for it, the better ones first."""
_SIGNALS = frozenset(SIGNAL_NAMES)

_ALIASES = {name: signal for signal, names in SIGNALS.items() for name in names}
_RANK = {name: rank for names in SIGNALS.values() for rank, name in enumerate(names)}
_MILLISECONDS = frozenset({"ms_step"})
_TIMES = frozenset({"step_time_s", "data_time_s", "wall_time_s"})
_RATIOS = frozenset({"mfu", "device_utilization"})
COUNTS = frozenset({
    "run", "global_batch_size", "micro_batch_size", "num_microbatches", "tokens", "straggler_rank",
    "device_memory_used_bytes", "device_memory_total_bytes", "memory_allocated_bytes",
})  # fmt: skip
"""Signals that are whole numbers."""
_NO_NUMBER = frozenset({"step", "phase"})
_TRAINING = ("loss", "grad_norm", "step_time_s", "overflow", "loss_scale", "learning_rate",
             "update_skipped")  # fmt: skip
_VALUE = re.compile(rf"\s*({NUMBER})\s*(ms|msec|s|sec|us|%)?\s*$")
_GROUPED = re.compile(r"[-+]?(?:[1-9]\d{0,2}(?:,\d{3}){2,}|[1-9]\d{0,2}(?:,\d{3})+\.\d+)")
"""Digits in groups that no decimal comma explains."""
_NOT_NAME = re.compile(r"[^a-z0-9]+")
_PERCENT = "(%)"
_OF_RUN = " - "
"""Weights & Biases heads an exported column `name of the run - name of the metric`."""
_UNITS = {"ms": 1e-3, "msec": 1e-3, "us": 1e-6, "s": 1.0, "sec": 1.0}
_REMEMBERED = 4096


@lru_cache(maxsize=_REMEMBERED)
def normal(name: str) -> str:
    """Return a name as the tables spell it: small letters, one underscore between words."""
    return _NOT_NAME.sub("_", name.strip().lower()).strip("_")


def read_value(value: object) -> tuple[float, str] | None:
    """Return number and unit of what a program printed; None: it is no number.

    A list or tuple stands for its first number: the first parameter group, the only element.
    """
    if isinstance(value, str):
        return _read_text(value)
    if isinstance(value, list | tuple):
        return read_value(value[0]) if value else None
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
    if _GROUPED.fullmatch(value.strip()):
        return float(value.replace(",", "")), ""
    truth = flag(value)
    return None if truth is None else (truth, "")


class _Known(NamedTuple):
    """What a name stands for."""

    signal: str
    rank: int
    """Of several names for one signal the lowest holds."""
    factor: float
    """To our unit, where the value has none of its own."""
    is_told: bool
    """Whether the user gave the unit: then a unit beside the value is not looked at."""


class Names:
    """Which names stand for which signals in one log.

    Args:
        columns: signal -> the name that stands for it, and the factor to our unit; other names
            for that signal do not count. Nothing: those that are known.
    """

    def __init__(self, columns: Mapping[str, tuple[str, float]] | None = None) -> None:
        self._columns = {
            normal(name): (signal, factor) for signal, (name, factor) in (columns or {}).items()
        }
        self.mapped = frozenset(signal for signal, _ in self._columns.values())
        """Signals whose names the user gave."""
        own = [name for name, (signal, _) in self._columns.items() if signal == "step"]
        self.steps: tuple[str, ...] = tuple(own) or STEP_NAMES
        """What counts optimizer steps."""
        self.phrases: dict[str, tuple[str, str]] = {}
        """Words of a line -> the known name in them and the word before it, as found before."""
        self._found: dict[str, _Known | None] = {}

    def collect(self, pairs: Iterable[tuple[str, object]]) -> dict[str, float]:
        """Return signals by our names, in our units, from names and values of another program.

        Names that are ours already are taken as they are; names that nobody knows are passed over.
        Of several names for one signal the better one holds.
        """
        signals: dict[str, float] = {}
        ranks: dict[str, int] = {}
        found = self._found
        for raw, value in pairs:
            known = found[raw] if raw in found else self._known(raw)
            if known is None:
                continue
            signal, rank, factor, _ = known
            if signal in ranks and ranks[signal] <= rank:
                continue
            read = _read_text(value) if isinstance(value, str) else read_value(value)
            if read is None:
                continue
            ranks[signal] = rank
            told, unit = read
            signals[signal] = _converted(known, told, unit) if unit else told * factor
        return signals

    def tells(self, signals: Mapping[str, float]) -> bool:
        """Tell whether signals say something about a step that was asked for."""
        return (
            is_training(signals)
            or "eval_loss" in signals
            or any(name in signals for name in self.mapped)
        )

    def meaning(self, name: str) -> tuple[str, float] | None:
        """Return which signal a name stands for, and the factor of its values to our unit."""
        known = self._known(name)
        return None if known is None else (known.signal, known.factor)

    def is_signal(self, name: str) -> bool:
        """Tell whether a name in the tables' spelling stands for a signal."""
        return self._known(name) is not None

    def _known(self, raw: str) -> _Known | None:
        try:
            return self._found[raw]
        except KeyError:
            pass
        if len(self._found) >= _REMEMBERED:  # a log with a name per line
            self._found.clear()
        found = self._found[raw] = self._find(raw)
        return found

    def _find(self, raw: str) -> _Known | None:
        name = normal(raw.rpartition(_OF_RUN)[2])
        mapped = self._columns.get(normal(raw)) or self._columns.get(name)
        if mapped is not None:
            signal, factor = mapped
            return None if signal in _NO_NUMBER else _Known(signal, -1, factor, is_told=True)
        milliseconds = name.endswith("_ms") or name in _MILLISECONDS
        base = name.removesuffix("_ms") if milliseconds else name
        if base.endswith("_s") and _ALIASES.get(base.removesuffix("_s")) in _TIMES:
            base = base.removesuffix("_s")
        signal = _ALIASES.get(base) or (base if base in _SIGNALS else "")
        if not signal or signal in _NO_NUMBER or signal in self.mapped:
            return None
        factor = 1e-3 if milliseconds and signal in _TIMES else 1.0
        if raw.rstrip().endswith(_PERCENT):
            if signal not in _RATIOS:
                return None  # a share of what it names
            factor = 0.01
        return _Known(signal, _RANK.get(base, 0), factor, is_told=False)


def _converted(known: _Known, value: float, unit: str) -> float:
    factor = known.factor
    if not known.is_told:
        if known.signal in _TIMES:
            factor = _UNITS.get(unit, factor)
        elif known.signal in _RATIOS and unit == "%":
            factor = 0.01
    return value * factor


KNOWN = Names()
"""What the readers know without being told."""
collect = KNOWN.collect
is_signal = KNOWN.is_signal


def is_training(signals: Mapping[str, float]) -> bool:
    """Tell whether signals say something about a training step."""
    return any(name in signals for name in _TRAINING)


def make(step: int, signals: Mapping[str, float], *, phase: str | None = None) -> Observation:
    """Return the observation of a step; a count that is no whole number is not measured."""
    values: dict[str, Any] = dict(signals)
    for name in COUNTS & values.keys():
        value = values.pop(name)
        if is_whole(value):
            values[name] = int(value)
    if math.isnan(values.get("mfu", 0.0)):
        del values["mfu"]
    return observed(step=step, phase=phase, **values)
