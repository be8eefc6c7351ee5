"""Ask, measure, tell: what every process that works on a study does.

Theory of operation. All processes are equal here: each takes over what others have measured, asks
for a config, measures it and tells. Whoever notices that another one is gone closes its trial and
queues the config again. Values are relative to the base config's where the peak is unknown, so
until a first measurement is there to compare with, one trial runs at a time. An Optuna trial that
repeats the base config after an interruption stands for config 0, as the first one would have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.budget import UNMEASURED, span_s
from mindtune.controller.trials.confirm import BASE
from mindtune.controller.trials.crew import Crew
from mindtune.controller.trials.identity import measurement_hash
from mindtune.controller.trials.measure import Launch, Measurer
from mindtune.controller.trials.progress import (
    Listener,
    Phase,
    StudyNote,
    TimeLeft,
    TrialEnded,
    TrialProgress,
    TrialStarted,
)
from mindtune.controller.trials.shared_launch import (
    LAUNCH,
    keep_files,
    launch_of,
    trial_attributes,
)
from mindtune.controller.trials.study_state import StudyState
from mindtune.controller.trials.summary import Measurement
from mindtune.search.attributes import CONFIG, OUTCOME, RETRY_OF
from mindtune.search.knobs import Config, differences

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from mindtune.search.study import Proposer

__all__ = ["OVER", "TrialLoop"]

OVER = "search_over"
"""User attribute of the study: why the search has ended; empty or missing while it goes on."""
_RESTARTS = 1
"""How often a config is measured again by the same process after its launch was interrupted."""


@dataclass
class TrialLoop:
    """Measures configs of a study until there are none."""

    state: StudyState
    proposer: Proposer
    measurer: Measurer
    emit: Listener
    time_left: TimeLeft
    crew: Crew
    deadline: Callable[[], float | None] = lambda: None
    """Returns the end of the time budget in seconds since 1970, None: there is none. A worker
    heeds it, as its search may be gone."""
    on_turn: Callable[[], None] = lambda: None
    """Called before each proposal."""
    finished: int = field(default=0, init=False)
    """Configs that were measured before this start."""
    measured: int = field(default=0, init=False)
    """Configs that this process has measured in the search."""
    missing: list[int] = field(default_factory=list, init=False)
    """Finished trials whose measurements are nowhere to be found."""
    _began: float = field(default_factory=time.monotonic, init=False)
    _spent_s: float = field(default=0.0, init=False)
    """Of the time budget, before this start."""
    _settled: set[int] = field(default_factory=set, init=False)
    """Optuna trials that have been taken over, or are none to take over."""

    @property
    def is_worker(self) -> bool:
        """Whether this process only joined: another one plans, keeps the folder and confirms."""
        return self.crew.me.role == "worker"

    def take_over(self) -> None:
        """Take over what was measured before this start."""
        self._sync(is_start=True)
        self.finished = len(self.state.launches)

    def run(self) -> None:
        """Measure configs until the proposals end, those of others included.

        A Ctrl-C gives the running trial back to the others, and so does a host that is away, a
        full disk, or a progress that nobody reads any more.

        Raises:
            ConfigError: if nothing can be measured here any more.
        """
        try:
            self._run()
        except (KeyboardInterrupt, ConfigError, OSError) as error:
            # A trial can bring about a ConfigError itself, at each of its starts.
            self._requeue(mine=True, on_request=not isinstance(error, ConfigError))
            raise

    def _run(self) -> None:
        self._began = time.monotonic()
        self._spent_s = span_s(self.proposer.study.get_trials(deepcopy=False))
        self._plan_time()
        study = self.proposer.study
        while True:
            self.on_turn()
            self.crew.look()
            self._sync()
            self._requeue()
            if self.is_worker and (reason := study.user_attrs.get(OVER)):
                self.proposer.stopped = reason
                return
            if self.is_worker and self._time_left_s() <= 0:
                # The search, which would have said so, is gone.
                self.proposer.stopped = "the time budget is used up"
                return
            elapsed = self._elapsed_s() + self._reserve()
            # Asked before and after: a trial that ends in between may have come back to the queue,
            # one that waited there may have begun.
            is_alone = not self._runs_elsewhere()
            proposal = self.proposer.ask(elapsed_s=elapsed, alone=self._needs_reference())
            if proposal is not None:
                # Whatever this one is compared with is known before it is measured.
                self._sync()
                self._try(proposal.number, proposal.config)
                continue
            budget = self.state.setup.study.study.time_budget
            is_late = not self.is_worker and budget is not None and elapsed >= budget
            if is_late and not study.user_attrs.get(OVER):
                # For those that would go on; one of them may have begun a trial just now.
                study.set_user_attr(OVER, self.proposer.stopped)
            elif is_alone and not self.proposer.must_wait and not self._runs_elsewhere():
                self._sync()
                return
            self.crew.wait()

    def _elapsed_s(self) -> float:
        return self._spent_s + time.monotonic() - self._began

    def _time_left_s(self) -> float:
        """Return the seconds of the time budget that are left; inf: there is none."""
        if self.is_worker:
            deadline = self.deadline()
            return math.inf if deadline is None else deadline - time.time()
        budget = self.state.setup.study.study.time_budget
        return math.inf if budget is None else budget - self._elapsed_s()

    def _needs_reference(self) -> bool:
        """Tell whether values are relative to a measurement that is still to come."""
        facts = self.state.scorer.facts
        absolute = facts.model is not None and facts.cluster.peak_flops is not None
        return not absolute and self.state.scorer.reference is None

    def _runs_elsewhere(self) -> bool:
        """Tell whether a trial runs: it may fail its worker and come back."""
        from optuna.trial import TrialState  # noqa: PLC0415 - the light commands do without it

        running = self.proposer.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return bool(running)

    def _config_number(self, number: int, config: Config) -> int:
        """Return the number under which a trial's config is known."""
        key = self.state.setup.space.key
        return BASE if key(config) == key(self.proposer.baseline.config) else number

    def _sync(self, *, is_start: bool = False) -> None:
        """Take over what others have measured."""
        for trial in self.proposer.study.get_trials(deepcopy=False):
            if trial.number in self._settled or not trial.state.is_finished():
                continue
            self._settled.add(trial.number)
            if trial.user_attrs.get(OUTCOME) in UNMEASURED:
                if not is_start and trial.user_attrs.get(OUTCOME) == "interrupted":
                    self._say_interrupted(trial.number)  # whoever closed it may have no reader
                continue
            config = trial.user_attrs[CONFIG]
            launch = self._shared(trial, config)
            if launch is None:
                self.missing.append(trial.number)
                continue
            measurement = self._take("search", config, launch)
            if not is_start:
                self._say_ended("search", launch, measurement, by=self.crew.name_of(trial))
                self._told()

    def _shared(self, trial: FrozenTrial, config: Config) -> Launch | None:
        """Return what a finished trial has measured, from the folder or else the storage."""
        plan = self.measurer.plan(self._config_number(trial.number, config), 0)
        knobs = self.state.setup.knobs(config)
        on_disk = self.measurer.find(knobs, plan, given_up=True)
        attribute = trial.user_attrs.get(LAUNCH)
        is_whole = on_disk is not None and on_disk.measured is not None
        if is_whole or attribute is None:
            return on_disk
        folder = self.state.folder.trial_dir(plan.number)
        expected = measurement_hash(self.measurer.identity, knobs, plan)
        launch = launch_of(attribute, plan, folder, config_hash=expected)
        if on_disk is not None:
            # What was copied from a worker lacks the steps of a trial that was stopped early.
            return on_disk if launch is None else replace(on_disk, measured=launch.measured)
        if launch is not None and not self.is_worker:
            self.state.folder.set_aside(plan.number)
            self.state.setup.config.write(folder, knobs, plan)
            keep_files(launch)
        return launch

    def _requeue(self, *, mine: bool = False, on_request: bool = False) -> None:
        """Close the trials whose processes are gone, and queue their configs again.

        Args:
            mine: those of this process instead, which is about to end.
            on_request: it ends for a reason that no trial has part in.
        """
        self._tell_measured()

        def is_alive(trial: FrozenTrial) -> bool:
            return trial.number not in self.proposer.open if mine else self.crew.is_alive(trial)

        for number in self.proposer.requeue_stale(is_alive, on_request=on_request):
            self._settled.add(number)
            self._say_interrupted(number)

    def _say_interrupted(self, number: int) -> None:
        trials = self.proposer.study.get_trials(deepcopy=False)
        is_queued = any(trial.user_attrs.get(RETRY_OF) == number for trial in trials)
        then = "started again" if is_queued else "given up"
        self.emit(StudyNote(message=f"trial {number} was interrupted and is {then}"))

    def _tell_measured(self) -> None:
        """Tell what an earlier start in this folder had measured when it was killed."""
        from optuna.trial import TrialState  # noqa: PLC0415 - the light commands do without it

        for trial in self.proposer.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            config = trial.user_attrs.get(CONFIG)
            if config is None or trial.number in self.proposer.open or self.crew.is_alive(trial):
                continue
            number = self._config_number(trial.number, config)
            found = self.measurer.find(
                self.state.setup.knobs(config), self.measurer.plan(number, 0)
            )
            if found is not None:
                self._tell(trial.number, found, self._take("search", config, found))

    def _try(self, trial: int, config: Config) -> None:
        """Measure a proposed config and tell what became of it."""
        number = self._config_number(trial, config)
        launch, measurement = self._measure("search", number, 0, config)
        if number == BASE and measurement.outcome == "crash":
            # Everything is compared with the base, so that a mishap is worth a second look.
            why = measurement.message.partition("\n")[0]
            message = f"the base config crashed and is measured once more: {why}"
            self.emit(StudyNote(message=message))
            self.state.folder.set_aside(BASE)
            launch, measurement = self._measure("search", number, 0, config)
        if measurement.outcome == "interrupted" and self._time_left_s() <= 0:
            # It only waited in a queue: whoever goes on with the study measures it.
            self.state.drop(number)
            self._requeue(mine=True, on_request=True)
            return
        self._tell(trial, launch, measurement)

    def _tell(self, trial: int, launch: Launch, measurement: Measurement) -> None:
        """Tell what a trial measured, and drop it where others have given the trial up."""
        outcome: str = measurement.outcome
        if outcome == "interrupted":
            # Twice ended from outside: a proposal that comes back for ever helps nobody.
            outcome = "crash"
        if outcome == "infeasible":
            # Above the limit is as bad as out of memory, and says the same of larger configs.
            outcome = "oom"
        attributes = trial_attributes(launch, measurement)
        pareto = self.state.setup.study.score.pareto
        objectives = measurement.speed_and_stability() if pareto else None
        value = measurement.value
        if outcome == "pruned":
            value = self.state.scorer.bound(launch)  # what its first steps came to may yet rise
        if self.proposer.tell(trial, outcome, value, attributes, objectives=objectives):
            self._settled.add(trial)
            self.measured += 1
        else:
            self.state.drop(launch.number)
            message = (
                f"trial {trial} was given up by others, for want of a sign of life; what it "
                "measured is dropped"
            )
            self.emit(StudyNote(message=message))
        self._told()

    def _measure(
        self, phase: Phase, number: int, repeat: int, config: Config, *, steps: int | None = None
    ) -> tuple[Launch, Measurement]:
        """Measure a config, once more if it was ended from outside.

        What an earlier start has measured is taken over without a word: nothing is launched.
        """
        plan = self.measurer.plan(number, repeat, steps=steps)
        found = self.measurer.find(self.state.setup.knobs(config), plan)
        if found is not None:
            return found, self._take(phase, config, found)
        base = self.state.configs.get(BASE)
        total = plan.warmup_steps + plan.measure_steps
        self.emit(
            TrialStarted(
                phase=phase,
                number=number,
                repeat=repeat,
                config=config,
                differs=differences(config, base),
                time_left_s=self.time_left.seconds(),
            )
        )
        compared = phase == "search" and number != BASE

        def tell(done: int, elapsed_s: float) -> None:
            self.emit(
                TrialProgress(
                    number=number,
                    repeat=repeat,
                    steps=done,
                    of_steps=total,
                    elapsed_s=elapsed_s,
                    time_left_s=self.time_left.seconds(elapsed_s=elapsed_s),
                )
            )

        def tell_queue() -> None:
            message = f"trial {number} waits in Slurm's queue"
            self.emit(StudyNote(message=message))

        bar = self.state.bar() if compared else None
        for _ in range(1 + _RESTARTS):
            limit_s = max(0.0, self._time_left_s()) if phase == "search" else math.inf
            launch = self.measurer.measure(
                config, plan,
                bar=bar, on_progress=tell, on_queue=tell_queue, queue_limit_s=limit_s,
            )  # fmt: skip
            if launch.outcome.record.outcome != "interrupted":
                break
            if phase == "search" and self._time_left_s() <= 0:
                break
        measurement = self._take(phase, config, launch)
        self._say_ended(phase, launch, measurement)
        return launch, measurement

    def _say_ended(
        self, phase: Phase, launch: Launch, measurement: Measurement, *, by: str = ""
    ) -> None:
        self.emit(
            TrialEnded(
                phase=phase,
                number=launch.number,
                repeat=launch.repeat,
                outcome=measurement.outcome,
                message=measurement.message,
                value=measurement.value,
                mfu=measurement.mfu,
                stability=measurement.stability,
                step_time_s=measurement.step_time_s,
                peak_memory_bytes=measurement.peak_memory_bytes,
                wall_s=measurement.wall_s,
                best_number=self.state.best_number(),
                time_left_s=self.time_left.seconds(),
                worker=by,
            )
        )

    def _take(self, phase: Phase, config: Config, launch: Launch) -> Measurement:
        """Take a measurement into the study and the estimate of the time left."""
        measurement = self.state.add(config, launch)
        self.time_left.done(phase, measurement.wall_s)
        self._plan_time()
        return measurement

    def _told(self) -> None:
        """Keep what is known now; a worker keeps nothing but its own trials."""

    def _plan_time(self) -> None:
        """Correct the estimate of what is still to be measured."""
        searched = sum(launches[0].repeat == 0 for launches in self.state.launches.values())
        left = self.state.planned - searched
        self.time_left.plan("search", math.ceil(left / self.crew.size))

    def _reserve(self) -> float:
        """Return the seconds of the time budget that are kept free."""
        return 0.0
