"""One run from its first batch to its result: what callback and loop have in common.

Theory of operation. `begin` starts the watchdog and the probe. Then, per call of the training
step, `begin_call` and `end_call`; a call that completes an optimizer step becomes one observation
for the controller. `pause` and `resume` enclose what is no training, `saved` tells of a
checkpoint. `end` closes everything and leaves result.json, of a run or of a trial, also for an
exception. Every rank runs a session; rank 0 writes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mindtune.controller.alerts.run_alerts import RunAlerts
from mindtune.controller.contract.fault_plan import PLANTED_FAULTS
from mindtune.controller.device import DeferredProbe, DeviceReading, SamplingThread
from mindtune.controller.live.controller import LiveController
from mindtune.controller.live.observing import Machine, SensedStep, Sensors
from mindtune.controller.live.result import ResultWriter
from mindtune.controller.live.run_report import RunReport
from mindtune.controller.live.sensors import HostSignals
from mindtune.controller.live.settings import LiveSettings
from mindtune.controller.live.state import ControllerState, describe_resume, save_state
from mindtune.controller.live.step_adapter import StepAdapter
from mindtune.controller.live.timing import StepTimer
from mindtune.controller.live.trial_report import TrialReport
from mindtune.controller.live.unobserved import (
    hang_finding,
    hidden_steps_finding,
    unreachable_knobs,
)
from mindtune.controller.live.watchdog import Hang, Phase, make_watchdog
from mindtune.controller.live.workload import Workload
from mindtune.controller.records import Recorder
from mindtune.policies.decisions import Advise
from mindtune.policies.engine import Engine
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Finding
from mindtune.policies.signals import Observation

if TYPE_CHECKING:
    from mindtune.controller.live.faults.planted import PlantedFaults
    from mindtune.controller.live.model_signals import ModelSignals
    from mindtune.controller.live.profiler_window import ProfilerWindow

__all__ = ["LiveSession"]

_LOGGER = logging.getLogger(__name__)


class LiveSession:
    """A run or trial that is going on.

    Args:
        settings: What the user asked for.
        workload: What the user told about the training.
        adapter: The training step.
        engine: Detectors, policies and arbiter, in the mode that applies.
        recorder: Where rank 0 writes; None elsewhere.
        machine: This process's place.
        trial: The trial that this process is a part of; None in a run.
        alerts: What tells people; None on all ranks but the first, and where nobody is told.
        faults: Faults that are planted on purpose; None: none are.
        model_signals: What looks inside the model; None: nothing does.
        profiler: What profiles a few steps; None on all ranks but the first, and in a trial.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        settings: LiveSettings,
        workload: Workload,
        adapter: StepAdapter,
        engine: Engine,
        *,
        recorder: Recorder | None = None,
        machine: Machine | None = None,
        trial: TrialReport | None = None,
        alerts: RunAlerts | None = None,
        faults: PlantedFaults | None = None,
        model_signals: ModelSignals | None = None,
        profiler: ProfilerWindow | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._workload = workload
        self._adapter = adapter
        self._recorder = recorder
        self._machine = machine or Machine()
        self._trial = trial
        self._alerts = alerts
        self._faults = faults
        self._model_signals = model_signals
        self._profiler = profiler
        self._timer = StepTimer(clock)
        self._probe = SamplingThread(DeferredProbe(self._machine.device))
        self._sensors = Sensors(
            adapter, workload, self._machine, timer=self._timer, read_device=self._read_device
        )
        self.controller = LiveController(
            engine,
            adapter.actuators,
            recorder=recorder,
            snapshots=adapter.snapshots,
            alerts=alerts,
        )
        together = (faults, model_signals, workload.eval_fn)
        self._meets_ranks = any(seat.mode == "act" for seat in engine.seats) or any(
            part is not None for part in together
        )
        self._report = RunReport(self.controller)
        self._result = ResultWriter(
            self._report, settings, self._machine, recorder=recorder, trial=trial, alerts=alerts
        )
        self._watchdog = make_watchdog(
            settings.watchdog,
            self._hang,
            stacks_path=None if recorder is None else recorder.folder.stacks,
            step_time_s=settings.learned.step_time_s,
        )
        self._resumed: ControllerState | None = None
        self._phase: Phase = "train"
        self._ended = False
        self.step = 0
        """Optimizer steps attempted."""
        self.stop_reason: str | None = None
        """Why training must end now; None while it must not."""

    def begin(self, *, resumed: ControllerState | None = None) -> None:
        """Start watching; the first batch comes next."""
        self._probe.start()
        if self._watchdog is not None:
            self._watchdog.start()
        if resumed is not None:
            self._resumed = resumed
            self.step = resumed.step
            self.controller.restore(resumed)
        # Before the first step: its own rule would move the loss scale in it.
        self.controller.take_over(self._facts())
        if self._adapter.snapshots is not None:
            saved = None if resumed is None else resumed.snapshots
            self._adapter.snapshots.begin(self.step, saved=saved)
        self._adapter.watch_own_time(self._timer)
        if self._model_signals is not None:
            self._model_signals.begin(step=self.step, exclude=self._timer.exclude)
        if self._adapter.unreachable:
            self.advise("unreachable_knobs", unreachable_knobs(self._adapter))
        if self._faults is not None:
            self.advise(PLANTED_FAULTS, self._faults.summary)
        self._timer.start()

    def begin_call(
        self,
        *,
        shapes: Any = None,
        samples: int | None = None,
        tokens: int | None = None,
        waited: bool = True,
        saves: bool = False,
        batch: Any = None,
    ) -> None:
        """The data of the next call is there; see `Sensors.begin_call`.

        Args:
            shapes: As there.
            samples: As there.
            tokens: As there.
            waited: As there.
            saves: Whether a checkpoint is written before the next call: a silence of that length
                is no hang.
            batch: What the call is given, for the model's own function.
        """
        if self._faults is not None:
            self._faults.wait_for_data(self.step + 1)
        if self._profiler is not None and self._profiler.is_open:
            self._sensors.note_phase("profile")
        compiles = self._sensors.begin_call(
            shapes=shapes, samples=samples, tokens=tokens, waited=waited
        )
        sampled = self._model_signals is not None and self._model_signals.samples(self.step + 1)
        self._phase = "save" if saves else "train"
        # The first sample compiles as well, and none can take longer than a compile may.
        self._heartbeat("compile" if compiles or sampled else self._phase)
        if self._faults is not None:
            self._faults.enter_step()
        if self._model_signals is not None:
            self._model_signals.begin_call(self.step + 1, batch)

    def end_call(self, outputs: Any, *, num_steps: int = 1) -> Observation | None:
        """A call has returned.

        Args:
            outputs: What it returned.
            num_steps: Optimizer steps that this call stands for; above 1 where a loop on the
                device hides all but the last.

        Returns:
            The row of the optimizer step that it completed; None while accumulating.
        """
        if self._model_signals is not None:
            self._model_signals.after_call()
        signals = self._sensors.end_call(outputs)
        recorded = None
        if signals is not None:
            self.step += num_steps
            if self._model_signals is not None:
                signals = self._model_signals.complete(
                    self.step, signals, self.controller, self._recorder
                )
            if num_steps > 1:
                self.controller.report_once(hidden_steps_finding(self.step, num_steps))
            sensed = self._sensors.complete(signals, step=self.step, num_steps=num_steps)
            findings = self._decide(sensed)
            recorded = sensed.recorded
        self._heartbeat(self._phase)
        self._timer.leave()
        if recorded is not None:
            self._profile(sensed, findings)
        return recorded

    def pause(self, phase: Phase) -> None:
        """Evaluation or saving begins: its time counts for no step."""
        self._timer.pause()
        self._heartbeat(phase)

    def resume(self, *, eval_loss: float | None = None) -> None:
        """Training goes on, perhaps with a validation loss for the next row."""
        self._timer.resume()
        if eval_loss is not None:
            self._sensors.eval_loss = eval_loss
            self._report.eval_loss = eval_loss
        self._heartbeat("train")

    def saved(self) -> None:
        """A checkpoint was written: keep the controller's state beside it."""
        self.note_save()
        self.keep_state()

    def note_save(self) -> None:
        """The step in progress spent time on writing a checkpoint."""
        self._sensors.note_phase("save")

    def keep_state(self) -> None:
        """Keep the controller's state beside the checkpoint of the weights as they are now."""
        state = self.state()  # on every rank: it also keeps the earlier states that it names
        if self._recorder is not None and self.controller.engine_state is not None:
            with self._recorder.surviving("the controller's state"):
                save_state(self._recorder.folder.state, state)

    def state(self) -> ControllerState:
        """Return what a resumed run goes on with."""
        engine = self.controller.engine_state
        snapshots = self._adapter.snapshots
        return ControllerState(
            step=self.step,
            updates=self._adapter.updates(),
            engine={} if engine is None else engine.to_json(),
            knobs=self._adapter.actuators.values(),
            snapshots=None if snapshots is None else snapshots.state(),
        )

    def advise(self, name: str, message: str) -> None:
        """Tell the user something once, in the log and in the decision log."""
        self.controller.advise(self.step, Advise(name, message), source="sensors")

    def end(self, error: BaseException | None = None) -> None:
        """Close everything, whatever fails to, and leave the result; harmless when called twice.

        Args:
            error: What ended the training before its time.
        """
        if self._ended:
            return
        self._ended = True
        effective: dict[str, Any] = {}
        try:
            with ExitStack() as closing:
                if self._faults is not None:
                    closing.callback(self._faults.remove)
                closing.callback(self._probe.stop)
                if self._watchdog is not None:
                    closing.callback(self._watchdog.stop)
                closing.callback(self._adapter.watch_own_time, None)
                if self._model_signals is not None:
                    closing.callback(self._model_signals.end)
                if self._profiler is not None:
                    closing.callback(self._profiler.end)
                if error is None:
                    # Functions of the user's: what they raise ends the run like other failures.
                    self._evaluate()
                    effective = self._effective()
        except BaseException as failure:
            error = error or failure
            raise
        finally:
            with ExitStack() as leaving:
                if self._alerts is not None:
                    leaving.callback(self._alerts.close)
                if self._recorder is not None:
                    leaving.callback(self._recorder.close)
                leaving.callback(self._result.leave, error, effective, self.step)
                if error is None:
                    self.keep_state()

    def abandon(self, error: Exception) -> bool:
        """Leave a training that can do without it, after a failure of its own; False: it cannot.

        A trial is nothing without its records, and ranks that do something together must all go on
        with it. What policies have managed is managed by the training step again.
        """
        if self._trial is not None or (self._machine.num_ranks > 1 and self._meets_ranks):
            return False
        _LOGGER.error(
            "mindtune failed in step %d and watches no more; the training goes on, with the knobs "
            "as they are but for a skip_threshold, which is opened",
            self.step,
            exc_info=error,
        )
        try:
            self._adapter.actuators.take_over(frozenset())
            self._adapter.send_host_signals(HostSignals().to_row())
            self.end(error)
        except Exception:
            _LOGGER.exception("mindtune could not leave a result")
        return True

    def _decide(self, sensed: SensedStep) -> tuple[Finding, ...]:
        """Let the controller decide on a step, take it into the reports, return what it shows."""
        if self.controller.engine_state is None:
            self._start_controller()
        result = self.controller.step(sensed.observation, recorded=sensed.recorded)
        if self.controller.copied_state:
            # The time it took lies in the next step.
            self.note_save()
        self._report.add(sensed.observation)
        self.stop_reason = self.controller.stop_diagnosis
        if self._trial is not None and self._trial.take(sensed):
            self.stop_reason = self.stop_reason or "the trial has measured its steps"
        return result.findings

    def _profile(self, sensed: SensedStep, findings: tuple[Finding, ...]) -> None:
        """Open or close the profiler, if it is time to; that time counts for no step."""
        if self._profiler is not None and self._profiler.take(
            sensed.own, data_time_s=sensed.own_data_s, findings=findings
        ):
            self.pause("save")
            self._profiler.turn()
            self.resume()

    def _facts(self) -> RunFacts:
        """Return what holds for the whole run, as far as it is known by now."""
        return self._adapter.facts(
            micro_batch_size=self._sensors.micro_batch_size,
            max_num_microbatches=self._settings.max_num_microbatches,
            device=self._machine.device,
        )

    def _start_controller(self) -> None:
        saved = None if self._resumed is None else self._resumed.engine
        whole = self.controller.start(self._facts(), saved=saved or None)
        if self._resumed is not None and self.controller.engine_state is not None:
            told = describe_resume(
                self._resumed,
                knobs=self._adapter.actuators.values(),
                policies=self.controller.engine_state.policies,
                engine_is_whole=whole,
            )
            _LOGGER.info("%s", told)

    def _read_device(self) -> DeviceReading:
        reading = self._probe.reading()
        return reading if self._faults is None else self._faults.reading(reading)

    def _heartbeat(self, phase: Phase) -> None:
        if self._watchdog is not None:
            self._watchdog.heartbeat(self.step, phase)

    def _hang(self, hang: Hang) -> None:
        """Take in a hang; called from the watchdog's thread."""
        self.controller.report(hang_finding(hang))
        if self._settings.watchdog.exit_on_hang:
            self._result.leave(TimeoutError(hang.message()), {}, self.step)
            if self._alerts is not None:
                # No cleanup follows: the process ends when this returns.
                self._alerts.close()

    def _evaluate(self) -> None:
        if self._workload.eval_fn is None or self.step == 0:
            return
        self._heartbeat("eval")
        self._report.eval_loss = float(self._workload.eval_fn())

    def _effective(self) -> dict[str, Any]:
        found = self._adapter.effective(micro_batch_size=self._sensors.micro_batch_size)
        told = {} if self._workload.effective is None else dict(self._workload.effective())
        return {**found, **told}
