"""The training step that stands in for MindSpore's `nn.TrainOneStepCell`."""

from __future__ import annotations

from typing import Any

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from mindtune.controller.live.layout import ParallelLayout
from mindtune.controller.live.loss_scale import LossScale
from mindtune.controller.live.micro_batch import batch_rows, cut, fitting_parts
from mindtune.controller.live.update_step import UpdateStep

__all__ = ["LossScale", "ParallelLayout", "TrainStep"]


class TrainStep(UpdateStep):
    """One call is one micro-batch; every `num_microbatches` calls the optimizer acts.

    Use it wherever `nn.TrainOneStepCell` stands: `Model(TrainStep(net_with_loss, optimizer))`, or
    by hand, `loss = step(*batch)`. With neutral knobs the losses are bit-identical to that cell's.
    `last_report` then holds what the step measured and which knob values acted; it is None while
    micro-batches are being accumulated.

    With `set_micro_batch_split` a call runs its micro-batch in equal parts, one after the other:
    fewer activations live at once, while loss, gradient and global batch stay those of the whole.
    That holds for a loss that is the mean over the samples of its batch; what depends on other
    samples of the batch (batch normalization, a mean weighted over it) changes with the split.

    The call is dispatched on the host, so data sinking (`dataset_sink_mode=True`), in which
    MindSpore compiles the loop around the step, is refused.

    Args:
        network: Returns the scalar loss, or a tuple whose first element it is.
        optimizer: Holds the weights to train.
        num_microbatches: Micro-batches per optimizer step.
        loss_scale: A fixed scale, a `LossScale`, or None for no loss scaling.
        clip_norm: Bound of the global gradient norm; None, 0 or infinity for no clipping.
        skip_threshold: Global gradient norm above which the update is skipped; None for never.
        skip_non_finite: Whether a non-finite gradient or loss skips the update; rests without loss
            scaling where policies only observe.
        compression: Compression of gradients on the wire: none, float16 or topk:R.
        layout: The ranks; None takes what MindSpore's own step would act on.
        num_sharded_parameters: How many weights must be marked `tp_sharded`; None for no check.
    """

    _can_split = True

    def __init__(
        self,
        network: nn.Cell,
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
        super().__init__(
            optimizer,
            num_microbatches=num_microbatches,
            loss_scale=loss_scale,
            clip_norm=clip_norm,
            skip_threshold=skip_threshold,
            skip_non_finite=skip_non_finite,
            compression=compression,
            layout=layout,
            num_sharded_parameters=num_sharded_parameters,
        )
        self.network = network
        self.network.set_grad()
        self.fuses_gradients = True
        self._gradients = _Gradients(network, tuple(optimizer.parameters), self.update.loss_scale)
        self._fused = _FusedStep(self._gradients, self.update)
        self._weigh = _Weigh()
        self._rows: int | None = None

    @property
    def micro_batch_rows(self) -> int | None:
        """Samples of the newest micro-batch as it came in; None where it cannot be split."""
        return self._rows

    def __call__(self, *batch: Any) -> Any:
        """Train on one micro-batch; return its loss, or the mean loss of a completed step."""
        self._begin()
        self._rows = batch_rows(batch)
        if self._micro_batch_split > 1:
            return self._take(*self._in_parts(batch))
        if self._num_microbatches == 1 and self._count == 0 and not self._hooks():
            count = self._count_tensor()
            if self.on_launch is not None:
                self.on_launch()
            loss, packed = self._fused(count, self._host_signals, *batch)
            self._finish(packed)
            return loss
        loss, gradients = self._gradients(*batch)
        return self._take(loss, gradients)

    def _in_parts(self, batch: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Return loss and gradients of a micro-batch, summed over `_micro_batch_split` parts.

        A ragged micro-batch may be cut into another number of parts, and one that cannot be cut is
        one part; their sums are weighed as if there had been `_micro_batch_split`.
        """
        usual = self._micro_batch_split
        rows = self._rows
        if rows is None:
            parts, pieces = 1, iter((batch,))
            self._unsplit = True
        else:
            parts = fitting_parts(rows, usual)
            pieces = cut(batch, rows, parts)
        summed: tuple[Any, ...] = ()
        for piece in pieces:
            loss, gradients = self._gradients(*piece)
            summed = self._sum(*summed, loss, *gradients) if summed else (loss, *gradients)
        if parts != usual:
            summed = self._weigh(Tensor(usual / parts, mstype.float32), *summed)
        return summed[0], summed[1:]

    def construct(self, *_batch: Any) -> Any:
        """Refuse to be compiled into a loop or a step of MindSpore's."""
        raise RuntimeError(
            "TrainStep dispatches every micro-batch on the host and cannot be compiled into a "
            "graph of MindSpore's: give it to Model alone, without loss_fn and optimizer, and "
            "train with dataset_sink_mode=False."
        )


class _Gradients(nn.Cell):
    """Loss and gradients of one micro-batch, in float32, the gradients scaled."""

    def __init__(
        self, network: nn.Cell, weights: tuple[Parameter, ...], loss_scale: Parameter
    ) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.loss_scale = loss_scale
        self._value_and_grad = ops.value_and_grad(self._scaled_loss, None, weights, has_aux=True)

    def construct(self, *batch: Any) -> Any:
        """Return (unscaled loss, gradients of the scaled loss)."""
        (_, loss), gradients = self._value_and_grad(*batch)
        converted: Any = ()
        for gradient in gradients:
            converted += (gradient.astype(mstype.float32),)
        return loss, converted

    def _scaled_loss(self, *batch: Any) -> Any:
        outputs = self.network(*batch)
        loss = outputs[0] if isinstance(outputs, tuple) else outputs
        loss = loss.astype(mstype.float32).reshape(())
        return loss * self.loss_scale, loss


class _Weigh(nn.Cell):
    """Multiplies a loss and gradients by one factor."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, factor: Any, *tensors: Any) -> Any:
        """Return the products."""
        weighed: Any = ()
        for tensor in tensors:
            weighed += (tensor * factor,)
        return weighed


class _FusedStep(nn.Cell):
    """A whole optimizer step of one micro-batch in one graph."""

    def __init__(self, gradients: nn.Cell, update: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self._gradients = gradients
        self._update = update

    def construct(self, count: Any, host_signals: Any, *batch: Any) -> Any:
        """Return (loss, packed signals)."""
        loss, gradients = self._gradients(*batch)
        return self._update(loss, count, host_signals, *gradients)
