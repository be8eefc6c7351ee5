"""Measure one config once, in a fresh process tree, or find what is on disk already."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mindtune.controller.contract import (
    ENV_TRIAL_DIR,
    TrialPlan,
    TrialRecord,
    TrialResult,
    read_document,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.early_stop import ProgressReader, possible_trial, stop_reason
from mindtune.controller.trials.identity import Identity, measurement_hash
from mindtune.controller.trials.launcher import launch, launch_logs, starts_ranks
from mindtune.controller.trials.log_result import LogWatch, telling_logs
from mindtune.controller.trials.measured import measured_trial
from mindtune.controller.trials.outcome import TrialOutcome, record_outcome
from mindtune.controller.trials.process_tree import end_processes, marked
from mindtune.controller.trials.study_folder import StudyFolder
from mindtune.controller.trials.study_setup import StudySetup
from mindtune.search.halving import Bar
from mindtune.search.knobs import Config, KnobValue
from mindtune.search.layout import num_ranks
from mindtune.search.scoring import MeasuredTrial

__all__ = ["Launch", "Measurer"]

_TELL_EVERY_S = 1.0
_LEFTOVER_GRACE_S = 2.0
_TELL_QUEUE_S = 5.0
"""Longer than a job takes to start where devices are free (1 to 3 s in the tests' cluster)."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One measurement of a config."""

    number: int
    repeat: int
    plan: TrialPlan
    folder: Path
    outcome: TrialOutcome
    measured: MeasuredTrial | None
    """None unless it ended ok, or was stopped early with something measured."""
    possible: MeasuredTrial | None = None
    """The best that could still have come of it, if it was stopped early; None: not known here."""


@dataclass(frozen=True)
class Measurer:
    """Measures the configs of one study."""

    setup: StudySetup
    folder: StudyFolder
    identity: Identity
    slot: Mapping[str, str] = field(default_factory=dict)
    """Environment that says which devices the trials get; empty: those of this process."""
    hidden: Collection[str] = ()
    """Variables of this process that trials do not get."""

    def plan(self, number: int, repeat: int, *, steps: int | None = None) -> TrialPlan:
        """Return what is asked of a measurement.

        Repeats have seeds of their own, the same for every config, so that configs are compared
        from equal samples. The search itself is repeat 0.

        Args:
            number: of the config.
            repeat: of the measurement.
            steps: steps in all, where they are more than the study's usual number.
        """
        trial = self.setup.study.trial
        usual = trial.warmup_steps + trial.measure_steps
        steps = usual if steps is None else max(usual, steps)
        return TrialPlan(
            number=number,
            repeat=repeat,
            seed=self.setup.study.study.seed + repeat,
            warmup_steps=trial.warmup_steps,
            measure_steps=steps - trial.warmup_steps,
            deadline_s=trial.deadline * steps / usual,
        )

    def find(
        self, knobs: Mapping[str, KnobValue], plan: TrialPlan, *, given_up: bool = False
    ) -> Launch | None:
        """Return a measurement that is on disk; None: it is to be made.

        Args:
            knobs: of the config.
            plan: what is asked of the measurement.
            given_up: take one that was interrupted as well: it is not going to be made again.
        """
        folder = self.folder.trial_dir(plan.number, plan.repeat)
        path = folder / TrialRecord.FILE
        if not path.exists():
            return None
        try:
            record = read_document(TrialRecord, path)
        except ConfigError:
            return None
        expected = measurement_hash(self.identity, knobs, plan)
        interrupted = record.outcome == "interrupted" and not given_up
        if record.config_hash != expected or interrupted:
            return None
        return _launch(plan, folder, TrialOutcome(record=record, result=_result(folder)))

    def measure(
        self,
        config: Config,
        plan: TrialPlan,
        *,
        bar: Bar | None = None,
        on_progress: Callable[[int, float], None] | None = None,
        on_queue: Callable[[], None] = lambda: None,
        queue_limit_s: float = math.inf,
    ) -> Launch:
        """Measure a config, whatever is on disk already.

        Args:
            config: a config of the space.
            plan: what is asked of the measurement.
            bar: the best so far; None: the trial is not stopped early.
            on_progress: called with the steps done and the seconds since the start.
            on_queue: called once if the trial has to wait in Slurm's queue.
            queue_limit_s: longest wait there; then it is interrupted.

        Raises:
            ConfigError: if the folder cannot be written or the launcher cannot be used, or a host
                is away that the trial was interrupted without.
        """
        knobs = self.setup.knobs(config)
        folder = self.folder.trial_dir(plan.number, plan.repeat)
        # What a killed search left half written is no measurement, and may help to find out why.
        # Its processes may be about to end only now; nothing of theirs is to come in here.
        end_processes(
            lambda: marked(f"{ENV_TRIAL_DIR}={folder.resolve()}"), grace_s=_LEFTOVER_GRACE_S
        )
        self.folder.set_aside(plan.number, plan.repeat)
        trial = self.setup.study.trial
        config_file = self.setup.config.write(folder, knobs, plan)
        queue = _Queue(folder, on_queue, queue_limit_s) if trial.launcher == "slurm" else None
        report = launch(
            self.setup.trial_command(config_file),
            trial_dir=folder,
            startup_deadline_s=trial.startup_deadline,
            deadline_s=plan.deadline_s,
            num_ranks=num_ranks(knobs),
            launcher=trial.launcher,
            ranks_per_node=self.setup.study.cluster.devices_per_node,
            hosts=self.setup.hosts,
            device=self.setup.study.cluster.device,
            env={**self.slot, **self.setup.config.environment(knobs, folder=folder)},
            hidden=self.hidden,
            should_stop=_watch(
                folder,
                plan,
                bar,
                on_progress,
                queue=queue,
                log_watch=self._log_watch(folder, knobs, plan),
            ),
            interrupt=None if queue is None else queue.is_given_up,
        )
        if queue is not None and queue.is_given_up.is_set():
            why = f"it had not left Slurm's queue after {queue_limit_s:.0f} s"
            report = replace(report, supervised=replace(report.supervised, error=why))
        outcome = record_outcome(
            report, knobs=knobs, config_hash=measurement_hash(self.identity, knobs, plan)
        )
        if outcome.record.outcome == "interrupted":
            self.setup.check_hosts(self.folder.root)  # one that is away spoils every trial
        return _launch(plan, folder, outcome)

    def _log_watch(
        self, folder: Path, knobs: Mapping[str, KnobValue], plan: TrialPlan
    ) -> LogWatch | None:
        """Return the watch over a program that is known to end only with its own training.

        Another one may still write a result.json after its last step.
        """
        study = self.setup.study
        if study.trial.callback is not None or study.constraints.framework != "mindformers":
            return None
        ranks = num_ranks(knobs)
        started = ranks if starts_ranks(study.trial.launcher, ranks) else 0
        return LogWatch(telling_logs(launch_logs(folder, started), knobs), plan)


class _Queue:
    """A trial's wait in Slurm's queue, which costs none of its deadlines."""

    def __init__(self, folder: Path, tell: Callable[[], None], limit_s: float) -> None:
        self.is_given_up = threading.Event()
        self._ranks = folder / "ranks"
        self._tell = tell
        self._limit_s = limit_s
        self._since = time.monotonic()
        self._has_begun = self._has_told = False

    def look(self) -> None:
        """Tell of a wait, and give up one that is too long."""
        self._has_begun = self._has_begun or any(self._ranks.glob("begun.*"))
        if self._has_begun:
            return
        waited_s = time.monotonic() - self._since
        if waited_s >= _TELL_QUEUE_S and not self._has_told:
            self._has_told = True
            self._tell()
        if waited_s >= self._limit_s:
            self.is_given_up.set()


def _launch(plan: TrialPlan, folder: Path, outcome: TrialOutcome) -> Launch:
    measured, possible = measured_trial(outcome), None
    if outcome.record.outcome == "pruned":
        measured, possible = _stopped(plan, folder)
    return Launch(
        number=plan.number,
        repeat=plan.repeat,
        plan=plan,
        folder=folder,
        outcome=outcome,
        measured=measured,
        possible=possible,
    )


def _stopped(plan: TrialPlan, folder: Path) -> tuple[MeasuredTrial | None, MeasuredTrial | None]:
    """Return what a stopped trial had measured until then, and what could have come of it."""
    progress = ProgressReader(folder / "signals.csv", warmup_steps=plan.warmup_steps).read()
    if not progress.step_time_s:
        return None, None
    return (
        MeasuredTrial(step_time_s=progress.step_time_s, bad_steps=sum(progress.is_bad)),
        possible_trial(progress, measure_steps=plan.measure_steps),
    )


def _result(folder: Path) -> TrialResult | None:
    path = folder / TrialResult.FILE
    try:
        return read_document(TrialResult, path) if path.is_file() else None
    except ConfigError:
        return None


def _watch(
    folder: Path,
    plan: TrialPlan,
    bar: Bar | None,
    on_progress: Callable[[int, float], None] | None,
    *,
    queue: _Queue | None,
    log_watch: LogWatch | None,
) -> Callable[[], str | None]:
    """Return what the launcher asks while the trial runs."""
    reader = ProgressReader(folder / "signals.csv", warmup_steps=plan.warmup_steps)
    started = time.monotonic()
    told_at = started - _TELL_EVERY_S

    def should_stop() -> str | None:
        nonlocal told_at
        if queue is not None:
            queue.look()
        progress, now = reader.read(), time.monotonic()
        if on_progress is not None and now - told_at >= _TELL_EVERY_S:
            told_at = now
            on_progress(progress.steps, now - started)
        if log_watch is not None and not reader.has_begun and log_watch.is_complete():
            return "its log holds the planned steps"
        if bar is None:
            return None
        return stop_reason(progress, bar, measure_steps=plan.measure_steps)

    return should_stop
