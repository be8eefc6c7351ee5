"""Host side of a training step: knobs, accumulation over micro-batches, reports."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from mindtune.controller.errors import ConfigError
from mindtune.controller.live.apply_update import ApplyUpdate
from mindtune.controller.live.compression import parse_compression
from mindtune.controller.live.loss_scale import LossScale
from mindtune.controller.live.packed import NUM_HOST_SIGNALS, StepReport, unpack
from mindtune.controller.live.reduction import layout_from_context

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mindtune.controller.live.hooks import GradientHook
    from mindtune.controller.live.layout import ParallelLayout

__all__ = ["UpdateStep"]


class UpdateStep(nn.Cell):
    """Turns gradients into updates, for loops that compute their own gradients.

    One call of `apply` is one micro-batch; every `num_microbatches` calls the optimizer acts on
    the mean gradient. A knob that is set while micro-batches are being accumulated takes effect
    with the next optimizer step, so that one step never mixes two loss scales or two counts.

    Gradients handed in must be those of the loss times `loss_scale` (1 without loss scaling).

    A skipped update leaves weights, moments and the optimizer's `global_step` as they are, so a
    schedule waits for it, as it does in MindSpore's own step with loss scale. (A return to an
    earlier state keeps `global_step`: see `snapshot_storage`.)

    Args:
        optimizer: From `mindspore.nn`, `mindspore.experimental.optim` or `mindspore.mint.optim`.
        num_microbatches: Micro-batches per optimizer step.
        loss_scale: A fixed scale, a `LossScale`, or None for no loss scaling.
        clip_norm: Bound of the global gradient norm; None, 0 or infinity for no clipping.
        skip_threshold: Global gradient norm above which the update is skipped; None for never.
        skip_non_finite: Whether a non-finite gradient or loss skips the update, as MindSpore's
            step with loss scale does and its plain step does not. Without loss scaling this rests
            where policies only observe.
        compression: Compression of gradients on the wire: none, float16 or topk:R.
        layout: The ranks; None takes what MindSpore's own step would act on.
        num_sharded_parameters: How many weights must be marked `tp_sharded`; None for no check.

    Raises:
        ConfigError: A value is out of range, or the layout cannot do what is asked.
    """

    _can_split = False

    def __init__(
        self,
        optimizer: nn.Cell,
        *,
        num_microbatches: int = 1,
        loss_scale: float | LossScale | None = None,
        clip_norm: float | None = None,
        skip_threshold: float | None = None,
        skip_non_finite: bool = True,
        compression: str = "none",
        layout: ParallelLayout | None = None,
        num_sharded_parameters: int | None = None,
    ) -> None:
        if not isinstance(optimizer, nn.Cell) or not hasattr(optimizer, "parameters"):
            raise ConfigError(
                "optimizer must be an optimizer of MindSpore, such as "
                f"nn.Adam(network.trainable_params()), but got a {type(optimizer).__name__}."
            )
        super().__init__(auto_prefix=False)
        self.layout = layout or layout_from_context()
        self.compression = parse_compression(compression)
        self.optimizer = optimizer
        self.update = ApplyUpdate(
            optimizer,
            layout=self.layout,
            compression=self.compression,
            num_sharded_parameters=num_sharded_parameters,
        )
        self._sum = _Sum()
        self.optimizer_steps = 0
        self.last_report: StepReport | None = None
        self.gradient_hooks: list[GradientHook] = []
        self.fuses_gradients = False
        self.on_launch: Callable[[], None] | None = None
        """Called right before gradients and update are run as one graph."""
        self.loss_scale_managed_by_policy = False
        self._loss_scale_rule = _loss_scale_rule(loss_scale)
        self._uses_loss_scale = loss_scale is not None
        self.skip_non_finite = skip_non_finite
        """As the user wants it; `set_skip_non_finite` says what acts."""
        self._count = 0
        self._accumulated: tuple[Any, ...] | None = None
        self._host_signals = Tensor(np.full(NUM_HOST_SIGNALS, np.nan, np.float32))
        self._num_microbatches = 1
        self._micro_batch_split = 1
        self._unsplit = False
        self._counts: dict[int, Tensor] = {}
        self._pending: dict[str, float] = {}
        if self._loss_scale_rule is not None:
            self.set_loss_scale(self._loss_scale_rule.initial)
        self.set_num_microbatches(num_microbatches)
        self.set_clip_norm(clip_norm)
        self.set_skip_threshold(skip_threshold)
        self.set_skip_non_finite(skip_non_finite)
        self._write_pending()

    # Knobs -----------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the current step, 1 without loss scaling."""
        return float(self.update.loss_scale.asnumpy())

    @property
    def next_loss_scale(self) -> float:
        """The scale that the next optimizer step will use, 1 without loss scaling."""
        return self._pending.get("loss_scale", self.loss_scale)

    @property
    def loss_scale_rule(self) -> LossScale | None:
        """How the loss scale is managed; None without loss scaling."""
        return self._loss_scale_rule

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the optimizer step in progress or, between steps, of the next one."""
        if self._count == 0:
            return int(self._pending.get("num_microbatches", self._num_microbatches))
        return self._num_microbatches

    @property
    def micro_batch_split(self) -> int:
        """Parts of each micro-batch in the step in progress or, between steps, in the next one."""
        if self._count == 0:
            return int(self._pending.get("micro_batch_split", self._micro_batch_split))
        return self._micro_batch_split

    @property
    def micro_batch_rows(self) -> int | None:
        """Samples of the newest micro-batch as it came in; None where it cannot be split."""
        return None

    def set_micro_batch_split(self, parts: int) -> None:
        """Run every micro-batch in `parts` equal parts, so that fewer activations live at once.

        Raises:
            ConfigError: The gradients are computed outside this step.
        """
        _require(parts >= 1 and parts == int(parts), "micro_batch_split", "an integer >= 1", parts)
        if parts > 1 and not self._can_split:
            raise ConfigError(
                f"micro_batch_split must be 1 where a loop computes its own gradients, but got "
                f"{parts}; feed the loop smaller micro-batches and raise num_microbatches."
            )
        self._pending["micro_batch_split"] = int(parts)

    def set_learning_rate_scale(self, scale: float) -> None:
        """Multiply the schedule by `scale` (at least 0); 1 leaves it as it is."""
        _require(math.isfinite(scale) and scale >= 0, "learning_rate_scale", "0 or more", scale)
        self._pending["learning_rate_scale"] = scale

    def set_loss_scale(self, scale: float) -> None:
        """Multiply the loss by `scale` before the backward pass, and take it out again."""
        _require(math.isfinite(scale) and scale > 0, "loss_scale", "finite and above 0", scale)
        self._uses_loss_scale = True
        self._pending["loss_scale"] = scale

    def set_num_microbatches(self, count: int) -> None:
        """Accumulate `count` micro-batches per optimizer step, without a compile."""
        _require(count >= 1 and count == int(count), "num_microbatches", "an integer >= 1", count)
        self._pending["num_microbatches"] = int(count)

    def set_clip_norm(self, norm: float | None) -> None:
        """Clip the mean gradient to global norm `norm`; None, 0 or infinity: do not clip."""
        value = math.inf if norm is None or norm == 0 else norm
        _require(value > 0, "clip_norm", "0 or more", norm)
        self._pending["clip_norm"] = value

    def set_skip_threshold(self, norm: float | None) -> None:
        """Skip updates whose global gradient norm exceeds `norm`; None or infinity: none."""
        value = math.inf if norm is None else norm
        _require(value > 0, "skip_threshold", "above 0", norm)
        self._pending["skip_threshold"] = value

    def set_skip_non_finite(self, skip: bool) -> None:
        """Skip updates with a non-finite gradient or loss, or let them act."""
        self._pending["skip_non_finite"] = float(skip)

    def set_compression_ratio(self, ratio: float) -> None:
        """Send this share of the gradient entries; top-k only, at most the initial ratio."""
        if self.compression.kind != "topk":
            raise ConfigError(
                "compression_ratio acts with topk compression only, but got "
                f"{self.compression}; construct the step with compression='topk:R'."
            )
        _require(
            0 < ratio <= self.compression.ratio,
            "compression_ratio",
            f"in 0..{self.compression.ratio:g}, the ratio that the exchange was built for",
            ratio,
        )
        self._pending["compression_ratio"] = ratio

    def set_host_signals(self, values: Sequence[float]) -> None:
        """Set the row that the next optimizer step brings to all ranks (NaN: not measured)."""
        if len(values) != NUM_HOST_SIGNALS:
            raise ConfigError(
                f"host signals must be {NUM_HOST_SIGNALS} numbers, but got {len(values)}; "
                "fill unused places with NaN."
            )
        self._host_signals = Tensor(np.asarray(values, np.float32))

    # Steps -----------------------------------------------------------------------------------

    @property
    def is_accumulating(self) -> bool:
        """Whether micro-batches wait for the rest of their optimizer step."""
        return self._count > 0

    @property
    def hooks_gradients(self) -> bool:
        """Whether a hook wants the gradients of the step in progress or, between, of the next."""
        return bool(self._hooks())

    def apply(self, loss: Any, gradients: tuple[Any, ...]) -> Any:
        """Take in one micro-batch and, if it completes an optimizer step, update the weights.

        Args:
            loss: Unscaled loss of the micro-batch, a scalar.
            gradients: Of the scaled loss, one per weight in the optimizer's order.

        Returns:
            The loss of the micro-batch, or the mean loss of the optimizer step that it completed.
        """
        self._begin()
        return self._take(loss, gradients)

    def _begin(self) -> None:
        """Let what was set since act, if a new optimizer step starts here."""
        if self._count == 0 and self._pending:
            self._write_pending()

    def _take(self, loss: Any, gradients: tuple[Any, ...]) -> Any:
        """Take in loss and gradients of a micro-batch, summed over its parts."""
        self._count += 1
        if self._accumulated is None:
            summed = (loss, *gradients)
        else:
            summed = self._sum(*self._accumulated, loss, *gradients)
        if self._count < self._num_microbatches:
            self._accumulated = summed
            self.last_report = None
            return loss if self._micro_batch_split == 1 else loss / self._micro_batch_split
        for hook in self._hooks():
            changed, gradients = hook(self.optimizer_steps + 1, summed[0], summed[1:])
            summed = (changed, *gradients)
        mean_loss, packed = self.update(
            summed[0], self._count_tensor(), self._host_signals, *summed[1:]
        )
        self._finish(packed)
        return mean_loss

    def _hooks(self) -> list[GradientHook]:
        """Hooks that want the gradients of the step in progress."""
        return [hook for hook in self.gradient_hooks if hook.wants(self.optimizer_steps + 1)]

    def _finish(self, packed: Any) -> None:
        """Read the packed signals and prepare the next optimizer step."""
        self._count = 0
        self._accumulated = None
        self.optimizer_steps += 1
        report = unpack(
            packed.asnumpy().tolist(),
            world_size=self.layout.world_size,
            uses_loss_scale=self._uses_loss_scale,
            micro_batch_split=self._micro_batch_split,
        )
        if self._unsplit:
            count = report.num_microbatches // self._micro_batch_split
            report = replace(report, num_microbatches=count, micro_batch_split=1)
            self._unsplit = False
        self.last_report = report
        rule = self._loss_scale_rule
        if rule is not None and report.loss_scale is not None:
            if self.loss_scale_managed_by_policy:
                return
            following = rule.following(
                report.loss_scale, overflow=report.overflow, clean_steps=report.clean_steps
            )
            if following != report.loss_scale:
                self._pending["loss_scale"] = following

    def _count_tensor(self) -> Tensor:
        count = self._num_microbatches * self._micro_batch_split
        if count not in self._counts:
            self._counts[count] = Tensor(count, mstype.float32)
        return self._counts[count]

    def _knobs(self) -> dict[str, Parameter]:
        knobs = {
            "learning_rate_scale": self.update.learning_rate.scale,
            "loss_scale": self.update.loss_scale,
            "clip_norm": self.update.clip_norm,
            "skip_threshold": self.update.skip_threshold,
            "skip_non_finite": self.update.skip_non_finite,
        }
        if self.compression.kind == "topk":
            knobs["compression_ratio"] = self.update.compression_ratio
        return knobs

    def _write_pending(self) -> None:
        """Write what was set since the last optimizer step.

        Only `ops.assign` writes: after `set_data` a compiled branch goes on with the old value.
        """
        knobs = self._knobs()
        for name, value in self._pending.items():
            if name == "num_microbatches":
                self._num_microbatches = int(value)
            elif name == "micro_batch_split":
                self._micro_batch_split = int(value)
            else:
                ops.assign(knobs[name], Tensor(value, mstype.float32))
        self._pending.clear()


class _Sum(nn.Cell):
    """Adds the loss and gradients of a micro-batch to the sums before it."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, *tensors: Any) -> Any:
        """Return the first half of the arguments plus the second."""
        half = len(tensors) // 2
        summed: Any = ()
        for index in range(half):
            summed += (tensors[index] + tensors[half + index],)
        return summed


def _loss_scale_rule(loss_scale: float | LossScale | None) -> LossScale | None:
    if loss_scale is None or isinstance(loss_scale, LossScale):
        return loss_scale
    return LossScale(initial=loss_scale, dynamic=False)


def _require(fact: bool, name: str, rule: str, value: Any) -> None:
    if not fact:
        raise ConfigError(f"{name} must be {rule}, but got {value}.")
