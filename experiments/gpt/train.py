"""Runs one training: as a trial of a search, as a production run, or on its own.

This is the program of a user who put mindtune's step and callback into his script; it would train
all the same without a search around it.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from mindspore import Callback, Model

from mindtune.controller import TuneCallback
from mindtune.controller.contract import ENV_CONFIG
from mindtune.experiments.gpt.effective import effective_knobs
from mindtune.experiments.gpt.model_signals import GptSignals
from mindtune.experiments.gpt.shape import model_shape
from mindtune.experiments.gpt.training import Training, build_training

if TYPE_CHECKING:
    from mindtune.controller.trials.worker import TrialContext
    from mindtune.experiments.gpt.config import GptConfig

__all__ = ["train"]

_LOGGER = logging.getLogger(__name__)


def train(config: GptConfig, context: TrialContext | None) -> None:
    """Train to the end of the config's steps, or of the trial's in a trial.

    Raises:
        ConfigError: The ranks launched do not fit the config.
    """
    if context is None:
        seed, num_steps = config.training.seed, config.training.steps
    else:
        seed, num_steps = context.seed, context.warmup_steps + context.measure_steps
    training = build_training(config, seed=seed, num_steps=num_steps)
    tune = _tune_callback(training)
    callbacks: list[Callback] = [tune]
    if config.training.eval_every:
        callbacks.append(_Evaluation(training, tune))
    if training.ranks.layout.rank == 0:
        callbacks.append(_Progress(training))
    Model(training.step).train(1, training.dataset, callbacks=callbacks, dataset_sink_mode=False)


def _tune_callback(training: Training) -> TuneCallback:
    config = training.config
    # A launcher that names a config or a folder in the environment wins over ours.
    own: dict[str, Any] = {"model_signals": {"every": config.output.model_signals_every}}
    if config.output.dir is not None:
        own["out_dir"] = config.output.dir
    return TuneCallback(
        None if os.environ.get(ENV_CONFIG) else own,
        tokens_per_sample=config.model.seq_length,
        model=model_shape(config.model),
        effective=lambda: effective_knobs(
            step=training.step,
            backbone=training.network.backbone,
            dataset=training.dataset,
        ),
        eval_fn=training.evaluate if config.training.eval_at_end else None,
        model_signals=GptSignals(training.network, training.ranks),
    )


class _Evaluation(Callback):
    """Evaluates every few steps and tells `TuneCallback` the loss."""

    def __init__(self, training: Training, tune: TuneCallback) -> None:
        super().__init__()
        self._training = training
        self._tune = tune

    def on_train_step_end(self, run_context: Any) -> None:
        """Evaluate after a completed optimizer step, if it is time; all ranks do."""
        del run_context
        step = self._training.step
        if (
            step.is_accumulating
            or step.optimizer_steps % self._training.config.training.eval_every
        ):
            return
        with self._tune.paused("eval"):
            loss = self._training.evaluate()
        self._tune.report_eval_loss(loss)


class _Progress(Callback):
    """Tells the loss every few steps."""

    _EVERY = 10

    def __init__(self, training: Training) -> None:
        super().__init__()
        self._training = training

    def on_train_step_end(self, run_context: Any) -> None:
        """Report a completed optimizer step."""
        del run_context
        step, report = self._training.step.optimizer_steps, self._training.step.last_report
        if report is not None and (step == 1 or step % self._EVERY == 0):
            _LOGGER.info("step %d of %d: loss %.4f", step, self._training.num_steps, report.loss)
