"""`tune_loop`: the controller around a hand-written training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from mindspore import nn
from typing_extensions import Self

from mindtune.controller.errors import ConfigError
from mindtune.controller.live.batch import batch_facts
from mindtune.controller.live.layout import ParallelLayout
from mindtune.controller.live.loss_scale import LossScale
from mindtune.controller.live.opening import make_engine, open_session
from mindtune.controller.live.packed import StepReport
from mindtune.controller.live.plan import PlanWriter
from mindtune.controller.live.session import LiveSession
from mindtune.controller.live.settings import load_settings
from mindtune.controller.live.state import ControllerState, read_state
from mindtune.controller.live.update_step import UpdateStep
from mindtune.controller.live.workload import Workload
from mindtune.controller.records import RunFolder

__all__ = ["tune_loop"]

_Batch = TypeVar("_Batch")


class tune_loop:  # noqa: N801 - read as a statement: `with tune_loop(...) as loop`
    """Reduces, checks, clips and applies the gradients of a hand-written loop, and tunes it.

        with tune_loop("best_config.yaml", optimizer) as loop:
            for batch in loop.batches(dataset):
                loss, grads = grad_fn(*batch)   # of the loss times loop.loss_scale
                loop.apply(loss, grads)
                if loop.stop_requested:
                    break

    `apply` takes the place of `optimizer(grads)`; the loop needs no gradient reduction of its own.
    Signals, knobs and records are those of `TuneCallback` with `TrainStep`.

    Args:
        config: As for `TuneCallback`.
        optimizer: Holds the weights to train.
        num_microbatches: Micro-batches per optimizer step: calls of `apply`.
        loss_scale: A fixed scale, a `LossScale`, or None for no loss scaling.
        clip_norm: Bound of the global gradient norm; None for no clipping.
        skip_threshold: Global gradient norm above which the update is skipped; None for never.
        skip_non_finite: Whether a non-finite gradient or loss skips the update; rests without loss
            scaling where policies only observe.
        compression: Compression of gradients on the wire: none, float16 or topk:R.
        layout: The ranks; None takes what MindSpore's own step would act on.
        tokens_per_sample: As for `TuneCallback`.
        model: As for `TuneCallback`.
        peak_flops: As for `TuneCallback`.
        effective: As for `TuneCallback`.
        eval_fn: As for `TuneCallback`.
        model_signals: As for `TuneCallback`; it needs `batches` to get one.
        planned_steps: Number of the last optimizer step that the loop is to make, for `mindtune
            watch`; None: not known.

    Raises:
        ConfigError: The config or a value is not valid.
        PolicyError: A policy, limit or threshold is unknown or out of range.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | None,
        optimizer: nn.Cell,
        *,
        num_microbatches: int = 1,
        loss_scale: float | LossScale | None = None,
        clip_norm: float | None = None,
        skip_threshold: float | None = None,
        skip_non_finite: bool = True,
        compression: str = "none",
        layout: ParallelLayout | None = None,
        tokens_per_sample: int | None = None,
        model: Mapping[str, Any] | None = None,
        peak_flops: float | None = None,
        effective: Callable[[], Mapping[str, Any]] | None = None,
        eval_fn: Callable[[], float] | None = None,
        model_signals: Callable[..., Mapping[str, Any]] | None = None,
        planned_steps: int | None = None,
    ) -> None:
        if planned_steps is not None and planned_steps < 1:
            raise ConfigError(f"planned_steps must be at least 1, but got {planned_steps}.")
        self._planned_steps = planned_steps
        self._settings = load_settings(config, os.environ)
        self._workload = Workload(
            tokens_per_sample=tokens_per_sample,
            model=model,
            peak_flops=peak_flops,
            effective=effective,
            eval_fn=eval_fn,
            model_signals=model_signals,
        )
        # Wrong policy settings are refused here, not when training begins.
        make_engine(self._settings)
        self.step = UpdateStep(
            optimizer,
            num_microbatches=num_microbatches,
            loss_scale=loss_scale,
            clip_norm=clip_norm,
            skip_threshold=skip_threshold,
            skip_non_finite=skip_non_finite,
            compression=compression,
            layout=layout,
        )
        """The step that applies the gradients; a cell, for checkpoints."""
        self._session: LiveSession | None = None
        self._folder: RunFolder | None = None
        self._carried: ControllerState | None = None
        self._begun = False

    @property
    def loss_scale(self) -> float:
        """Factor on the loss, of which `apply` expects the gradients; 1 without loss scaling."""
        return self.step.loss_scale

    @property
    def report(self) -> StepReport | None:
        """What the newest `apply` measured; None while micro-batches are accumulated."""
        return self.step.last_report

    @property
    def stop_requested(self) -> bool:
        """Whether the loop must end now, for a policy or since the trial is over."""
        return self.stop_reason is not None

    @property
    def stop_reason(self) -> str | None:
        """Why the loop must end; None while it must not."""
        return None if self._session is None else self._session.stop_reason

    @property
    def out_dir(self) -> Path | None:
        """The run's folder on rank 0, inside the `with` block; None where nothing is written."""
        return None if self._folder is None else self._folder.path

    def __enter__(self) -> Self:
        """Start watching."""
        self._session, self._folder = open_session(
            self._settings, self._workload, self.step, resumed=self._carried
        )
        if self._folder is not None and not self._settings.in_trial:
            PlanWriter(self._folder.path, basis="the program says so").tell(self._planned_steps)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the result, also for an exception."""
        self._bound().end(error)

    def batches(self, source: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield what `source` yields, measuring the wait for data and the size of the batches."""
        session = self._bound()
        for batch in source:
            facts = batch_facts(batch)
            session.begin_call(
                shapes=facts.shapes, samples=facts.samples, tokens=facts.tokens, batch=batch
            )
            self._begun = True
            yield batch

    def apply(self, loss: Any, gradients: tuple[Any, ...]) -> Any:
        """Take in one micro-batch; update the weights if it completes an optimizer step.

        Args:
            loss: Unscaled loss of the micro-batch, a scalar Tensor.
            gradients: Of the loss times `loss_scale`, one per weight in the optimizer's order.

        Returns:
            The loss of the micro-batch, or the mean loss of the optimizer step it completed.
        """
        session = self._bound()
        if not self._begun:
            # Without `batches` nobody sees when the data was there.
            session.begin_call(waited=False)
        self._begun = False
        outputs = self.step.apply(loss, gradients)
        session.end_call(outputs)
        return outputs

    @contextmanager
    def paused(self, phase: Literal["eval", "save"]) -> Iterator[None]:
        """Enclose evaluation or saving: its time counts for no step."""
        session = self._bound()
        session.pause(phase)
        try:
            yield
        finally:
            session.resume()

    def report_eval_loss(self, value: float) -> None:
        """Put a validation loss into the next row and the result."""
        self._bound().resume(eval_loss=float(value))

    def saved(self) -> None:
        """Keep the controller's state beside a checkpoint that was just written."""
        self._bound().saved()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of detectors, policies, arbiter and knobs as JSON-ready data."""
        return self._bound().state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; before the `with` block.

        Raises:
            ConfigError: It is not what `state_dict` returned.
        """
        self._carried = read_state(dict(state))

    def _bound(self) -> LiveSession:
        if self._session is None:
            raise ConfigError("a tune_loop acts inside its `with` block; enter it first.")
        return self._session
