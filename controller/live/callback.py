"""`TuneCallback`: the controller as a callback of `Model.train` and `Model.fit`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from mindspore.train import Callback, ModelCheckpoint
from typing_extensions import Self

from mindtune.controller.errors import ConfigError
from mindtune.controller.live.batch import batch_facts
from mindtune.controller.live.opening import make_engine, open_session
from mindtune.controller.live.plan import EpochPlan
from mindtune.controller.live.session import LiveSession
from mindtune.controller.live.settings import load_settings
from mindtune.controller.live.state import ControllerState, read_state
from mindtune.controller.live.workload import Workload
from mindtune.controller.records import RunFolder

__all__ = ["TuneCallback"]


def _contained(hook: Callable[[TuneCallback, Any], None]) -> Callable[[TuneCallback, Any], None]:
    """Let a training outlive a failure of its watcher, where it can do without it."""

    @functools.wraps(hook)
    def call(self: TuneCallback, run_context: Any) -> None:
        if self.gave_up:
            return
        try:
            hook(self, run_context)
        except MemoryError:
            # It is the run that is out of memory, by itself or by a planted fault.
            raise
        except Exception as error:
            self.gave_up = self._bound().abandon(error)
            if not self.gave_up:
                raise

    return call


class TuneCallback(Callback):
    """Watches a training, lets the policies decide, and turns the knobs of the training step.

        model = Model(TrainStep(net_with_loss, optimizer))
        model.train(epochs, dataset, callbacks=[TuneCallback("best_config.yaml")])

    With `TrainStep` it has all signals and knobs. With another training step it records what the
    step returns, turns the knobs that it can reach (learning rate, loss scale) and names the rest
    once. The network is bound when training begins.

    What it writes (rank 0 only): signals.csv, decisions.jsonl, result.json and state/ in the run's
    folder; in a trial (MINDTUNE_TRIAL_DIR) signals.csv and the trial's result.json, and it ends
    training after the warm-up and measured steps. An exception in training leaves a result as
    well, typed by its kind; a process that is killed leaves none, but readable records.

    Time between two calls of the step is waiting for data, apart from evaluation in `Model.fit`.
    What other callbacks do in their own `step_end` counts into it if they stand behind this one in
    the list; a step whose time holds a `ModelCheckpoint` save has phase `save`. Put a
    `ModelCheckpoint` behind it in the list: then a checkpoint written in the very step in which a
    policy returned to an earlier state holds what was returned to.

    A failure of its own in the middle of training is logged and leaves a result; the training goes
    on without it. Only a trial ends, which is nothing without its records, and a job whose ranks
    do something together, of which none may leave: policies that act, model signals, an `eval_fn`,
    planted faults.

    Args:
        config: Path of a best_config.yaml (or of a MindFormers YAML with a `mindtune` block), a
            dict of such content or of the keys mode, out_dir, policies, learned, watchdog,
            alerts, rewind, model_signals, max_num_microbatches and faults; None: the file named
            by MINDTUNE_CONFIG, or defaults. The default mode is observe: nothing is changed.
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
            model, already reduced: `attention_entropy` (blocks x heads), `token_confidence`,
            `layer_losses`, or others. Called on every rank in the steps that
            `model_signals: {every: k}` of the config samples.

    Raises:
        ConfigError: The config is not valid; unknown keys are named with the allowed ones.
        PolicyError: A policy, limit or threshold is unknown or out of range.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | None = None,
        *,
        tokens_per_sample: int | None = None,
        global_batch_size: int | None = None,
        model: Mapping[str, Any] | None = None,
        peak_flops: float | None = None,
        effective: Callable[[], Mapping[str, Any]] | None = None,
        eval_fn: Callable[[], float] | None = None,
        model_signals: Callable[..., Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self._settings = load_settings(config, os.environ)
        self._workload = Workload(
            tokens_per_sample=tokens_per_sample,
            global_batch_size=global_batch_size,
            model=model,
            peak_flops=peak_flops,
            effective=effective,
            eval_fn=eval_fn,
            model_signals=model_signals,
        )
        # Wrong policy settings are refused here, not when training begins.
        make_engine(self._settings)
        self._session: LiveSession | None = None
        self._folder: RunFolder | None = None
        self._carried: ControllerState | None = None
        self._calls = 0
        self._plan: EpochPlan | None = None
        self._checkpoint = ""
        self.gave_up = False
        """Whether it failed and watches no more."""

    @property
    def stop_reason(self) -> str | None:
        """Why the training was ended, by a policy or at the end of a trial; None if it was not."""
        return None if self._session is None else self._session.stop_reason

    @property
    def out_dir(self) -> Path | None:
        """The run's folder on rank 0, once training has begun; None where nothing is written."""
        return None if self._folder is None else self._folder.path

    @contextmanager
    def paused(self, phase: Literal["eval", "save"]) -> Iterator[None]:
        """Enclose evaluation or saving in a callback of the user's: its time counts for no step.

        Raises:
            ConfigError: Training has not begun.
        """
        session = self._begun()
        session.pause(phase)
        try:
            yield
        finally:
            session.resume()

    def report_eval_loss(self, value: float) -> None:
        """Put a validation loss into the next row and the result.

        Raises:
            ConfigError: Training has not begun.
        """
        self._begun().resume(eval_loss=float(value))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of detectors, policies, arbiter and knobs as JSON-ready data.

        It is saved in state/ beside every `ModelCheckpoint` by itself; this is for checkpoints
        that are written otherwise.

        Raises:
            ConfigError: Training has not begun.
        """
        return self._begun().state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state when training begins next.

        Raises:
            ConfigError: It is not what `state_dict` returned.
        """
        self._carried = read_state(dict(state))

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Leave a result for what ended the training, also where it raised."""
        if self._session is not None and error is not None:
            self._session.end(error)

    def __enter__(self) -> Self:
        """Return the callback itself."""
        return self

    def on_train_begin(self, run_context: Any) -> None:
        """Bind the training step and start watching.

        Raises:
            ConfigError: There is another `TuneCallback` in the list.
        """
        params = run_context.original_args()
        ours = [
            each for each in params.get("list_callback") or () if isinstance(each, TuneCallback)
        ]
        if len(ours) > 1:
            raise ConfigError(
                f"callbacks must hold one TuneCallback, but hold {len(ours)}: two would count "
                "each step twice and turn the same knobs; leave one out."
            )
        self._calls = params.cur_step_num
        self.gave_up = False
        self._session, self._folder = open_session(
            self._settings,
            self._workload,
            params.train_network,
            folder=self._folder,
            resumed=self._carried,
        )
        if self._folder is not None and not self._settings.in_trial:
            # A trial ends after the steps that it was asked for.
            self._plan = EpochPlan(
                self._folder.path,
                epochs=params.get("epoch_num") or 0,
                batches=params.get("batch_num") or 0,
                calls=self._calls,
                step=self._session.step,
            )
        self._checkpoint = _latest_checkpoint(params)

    @_contained
    def on_train_step_begin(self, run_context: Any) -> None:
        """The data of a call is there."""
        params = run_context.original_args()
        self._look_for_checkpoint(params)
        batch = params.get("train_dataset_element")
        facts = batch_facts(batch)
        self._bound().begin_call(
            shapes=facts.shapes,
            samples=facts.samples,
            tokens=facts.tokens,
            saves=_saves_after(params),
            batch=batch,
        )

    @_contained
    def on_train_step_end(self, run_context: Any) -> None:
        """A call has returned: decide, act, record."""
        params = run_context.original_args()
        session = self._bound()
        # One that a callback in front of this one wrote: this step's time holds it, and it has
        # the weights after this step's update, to which the state after its decisions belongs.
        saved = self._finds_checkpoint(params)
        if saved:
            session.note_save()
        # In a loop on the device one call stands for many steps.
        num_steps = max(1, params.cur_step_num - self._calls)
        self._calls = params.cur_step_num
        session.end_call(params.net_outputs, num_steps=num_steps)
        if self._plan is not None:
            self._plan.take(calls=self._calls, step=session.step)
        if saved:
            session.keep_state()
        if session.stop_reason is not None:
            run_context.request_stop()

    @_contained
    def on_eval_begin(self, run_context: Any) -> None:
        """Evaluation within training counts for no step."""
        del run_context
        if self._session is not None:
            self._session.pause("eval")

    @_contained
    def on_eval_end(self, run_context: Any) -> None:
        """Take the validation loss, if the evaluation computed one."""
        if self._session is not None:
            self._session.resume(eval_loss=_validation_loss(run_context.original_args()))

    def on_eval_step_begin(self, run_context: Any) -> None:
        """Nothing happens in the steps of an evaluation."""

    def on_eval_step_end(self, run_context: Any) -> None:
        """Nothing happens in the steps of an evaluation."""

    def on_train_end(self, run_context: Any) -> None:
        """Leave the result."""
        if self.gave_up:
            return
        self._look_for_checkpoint(run_context.original_args())
        session = self._bound()
        session.end()
        # Another `train` with this callback goes on where this one ended.
        self._carried = session.state()

    def _begun(self) -> LiveSession:
        if self._session is None:
            raise ConfigError("TuneCallback must be in training for this, but none has begun.")
        return self._session

    def _bound(self) -> LiveSession:
        assert self._session is not None, "training begins first"  # noqa: S101 - Model's order
        return self._session

    def _look_for_checkpoint(self, params: Any) -> None:
        if self._finds_checkpoint(params):
            self._bound().saved()

    def _finds_checkpoint(self, params: Any) -> bool:
        """Tell whether a checkpoint was written since the last call."""
        latest, before = _latest_checkpoint(params), self._checkpoint
        self._checkpoint = latest
        return latest != before


def _saves_after(params: Any) -> bool:
    """Tell whether a `ModelCheckpoint` writes after the step that begins, or may do so."""
    step, length = params.cur_step_num, params.get("batch_num") or 1
    # The last step of a training is the last one of an epoch, and what is left is written then.
    return any(step % length == 0 or _is_due(saver, step) for saver in _checkpoints(params))


def _is_due(saver: ModelCheckpoint, step: int) -> bool:
    """Decide as `ModelCheckpoint` does; true where that is not known before the step's end."""
    config = getattr(saver, "_config", None)
    interval = getattr(config, "save_checkpoint_steps", None)
    last = getattr(saver, "_last_triggered_step", None)
    return interval is None or last is None or bool(step >= last + interval)


def _checkpoints(params: Any) -> list[ModelCheckpoint]:
    callbacks = params.get("list_callback") or ()
    return [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]


def _latest_checkpoint(params: Any) -> str:
    """Names of the newest checkpoints of all `ModelCheckpoint` callbacks of this training."""
    return ";".join(str(saver.latest_ckpt_file_name) for saver in _checkpoints(params))


def _validation_loss(params: Any) -> float | None:
    for results in (params.get("eval_results"), params.get("metrics")):
        for name in ("eval_loss", "loss", "Loss"):
            value = (results or {}).get(name)
            if isinstance(value, (int, float)):
                return float(value)
    return None
