"""Ask, measure, tell; then confirm."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.confirm import (
    BASE,
    Plan,
    Verdict,
    choose,
    exclusion,
    judge_convergence,
)
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
from mindtune.controller.trials.study_state import StudyState
from mindtune.controller.trials.summary import Measurement
from mindtune.search.attributes import CONFIG, MEMORY, OUTCOME, REASON, STEP_TIME, WALL
from mindtune.search.knobs import Config, differences

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from mindtune.search.study import Proposer

__all__ = ["SearchLoop"]

_RESTARTS = 1
"""How often a config is measured again after its launch was interrupted."""
_MAX_RESERVE = 0.5
"""Largest share of the time budget that is kept free for the confirmation."""


@dataclass
class SearchLoop:
    """Drives one study from its proposals to its winner."""

    state: StudyState
    proposer: Proposer
    measurer: Measurer
    emit: Listener
    time_left: TimeLeft
    num_leaders: int
    finished: int = 0
    """Configs that were measured before this start."""
    is_searching: bool = True
    plans: list[Plan] = field(default_factory=list, init=False)
    """Confirmations that have begun."""

    def take_over(self) -> None:
        """Take over what earlier starts have measured.

        Raises:
            ConfigError: if the database knows of trials whose folders are not here.
        """
        missing = []
        for trial in self.proposer.study.get_trials(deepcopy=False):
            outcome = trial.user_attrs.get(OUTCOME)
            measured = trial.state.is_finished() and outcome not in (
                None, "interrupted", "infeasible", "duplicate",
            )  # fmt: skip
            if not measured:
                continue
            config = trial.user_attrs[CONFIG]
            plan = self.measurer.plan(trial.number, 0)
            knobs = self.state.setup.knobs(config)
            found = self.measurer.find(knobs, plan, given_up=True)
            if found is None:
                missing.append(trial.number)
            else:
                self._take("search", config, found)
                self.finished += 1
        if missing:
            raise ConfigError(
                f"the storage knows trials {', '.join(map(str, missing))} of this study, but "
                f"their folders are not in {self.state.folder.root}; give the --out that the "
                "study was started with, or give study.name another name."
            )

    def search(self) -> None:
        """Measure configs until the proposals end."""
        started = time.monotonic()
        spent = sum(
            launch.outcome.record.wall_s
            for launches in self.state.launches.values()
            for launch in launches
        )
        rejection = self.proposer.baseline.rejection
        if rejection is not None:
            self.emit(
                StudyNote(
                    message="the base config itself cannot run, so the nearest feasible config "
                    f"stands for it: {rejection}"
                )
            )
        self._plan_time()
        for trial in self._interrupted():
            self._go_on(trial)
        while True:
            elapsed = spent + time.monotonic() - started + self._reserve()
            proposal = self.proposer.ask(elapsed_s=elapsed)
            if proposal is None:
                break
            self._try(proposal.number, proposal.config)
        self.is_searching = False
        self.state.search_ended = self.proposer.stopped or ""
        self._plan_time()
        self.emit(StudyNote(message=f"the search is over: {self.proposer.stopped}"))

    def _interrupted(self) -> list[FrozenTrial]:
        """Return the trials that an earlier start left running.

        Nobody runs them now, since this process holds the folder.
        """
        from optuna.trial import TrialState  # noqa: PLC0415 - the light commands do without it

        return list(self.proposer.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))

    def _go_on(self, trial: FrozenTrial) -> None:
        """Finish a trial that an earlier start left open, or give it up."""
        number = trial.number
        config = trial.user_attrs.get(CONFIG)
        if config is None and number == BASE:
            config = self.proposer.baseline.config
        if config is None:
            # Killed before the proposal was judged: nothing was started.
            self.proposer.tell(number, "interrupted")
            return
        plan = self.measurer.plan(number, 0)
        knobs = self.state.setup.knobs(config)
        interruptions = len(self.state.folder.unfinished(number))
        if self.measurer.find(knobs, plan) is None:
            if self.state.folder.trial_dir(number).exists():
                interruptions += 1
            if interruptions > _RESTARTS and number != BASE:
                message = f"trial {number} was interrupted {interruptions} times and is given up"
                self.emit(StudyNote(message=message))
                self.proposer.tell(number, "interrupted")
                return
            self.emit(StudyNote(message=f"trial {number} was interrupted and is started again"))
        self._try(number, config)

    def _try(self, number: int, config: Config) -> None:
        """Measure a proposed config and tell what became of it."""
        measurement = self._measure("search", number, 0, config)
        if number == BASE and measurement.outcome == "crash":
            # Everything is compared with the base, so that a mishap is worth a second look.
            why = measurement.message.partition("\n")[0]
            message = f"the base config crashed and is measured once more: {why}"
            self.emit(StudyNote(message=message))
            self.state.folder.set_aside(BASE)
            measurement = self._measure("search", number, 0, config)
        outcome: str = measurement.outcome
        if outcome == "interrupted":
            # Twice ended from outside: a proposal that comes back for ever helps nobody.
            outcome = "crash"
        if outcome == "infeasible":
            # Above the limit is as bad as out of memory, and says the same of larger configs.
            outcome = "oom"
        self.proposer.tell(number, outcome, measurement.value, _attributes(measurement))
        self.state.save()

    def _measure(
        self, phase: Phase, number: int, repeat: int, config: Config, *, steps: int | None = None
    ) -> Measurement:
        """Measure a config, once more if it was ended from outside.

        What an earlier start has measured is taken over without a word: nothing is launched.
        """
        plan = self.measurer.plan(number, repeat, steps=steps)
        found = self.measurer.find(self.state.setup.knobs(config), plan)
        if found is not None:
            return self._take(phase, config, found)
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

        bar = self.state.bar() if compared else None
        for _ in range(1 + _RESTARTS):
            launch = self.measurer.measure(config, plan, bar=bar, on_progress=tell)
            if launch.outcome.record.outcome != "interrupted":
                break
        measurement = self._take(phase, config, launch)
        self.emit(
            TrialEnded(
                phase=phase,
                number=number,
                repeat=repeat,
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
            )
        )
        return measurement

    def _take(self, phase: Phase, config: Config, launch: Launch) -> Measurement:
        """Take a measurement into the study and the estimate of the time left."""
        measurement = self.state.add(config, launch)
        self.time_left.done(phase, measurement.wall_s)
        self._plan_time()
        return measurement

    def confirm(self) -> None:
        """Measure base and leaders again, and choose the winner."""
        state, study = self.state, self.state.setup.study
        if state.best_number() is None:
            state.final = Verdict(None, "no config ended ok")
            state.save()
            return
        leaders = state.ranked()[: self.num_leaders]
        plan = Plan.of(study, leaders)
        self._confirm(plan)
        out = {number: self._why_out(number) for number in leaders}
        others = [number for number in state.candidates() if number not in out]
        if leaders and all(out.values()) and others:
            others = others[: self.num_leaders]
            why = "; ".join(f"trial {number}: {text}" for number, text in out.items())
            takes = "trials" if len(others) > 1 else "trial"
            numbers = ", ".join(map(str, others))
            message = f"no leader can win, so {takes} {numbers} are confirmed instead ({why})"
            self.emit(StudyNote(message=message))
            self._confirm(Plan.of(study, others, after=plan))
        state.final = choose(
            state.confirming(), state.verdicts, device_memory=study.cluster.device_memory
        )
        state.save()

    def _confirm(self, plan: Plan) -> None:
        """Measure base and these leaders in turn, and judge how they converge."""
        state, study = self.state, self.state.setup.study
        state.leaders = (*state.leaders, *plan.leaders)
        self.plans.append(plan)
        self._plan_time()
        for number, repeat in plan.order():
            config = state.configs[number]
            measurement = self._measure("confirm", number, repeat, config, steps=plan.steps)
            self.proposer.add_repeat(
                number, repeat, measurement.value, {"outcome": measurement.outcome}
            )
            state.save()
        if plan.steps is None:
            return
        launches = {
            number: [launch for launch in state.launches[number] if launch.repeat > 0]
            for number in (BASE, *state.leaders)
        }
        found = judge_convergence(launches, samples_per_step=study.training.global_batch_size)
        # Who is out stays out, though more seeds of the base may widen its band.
        state.verdicts = {**found, **state.verdicts}

    def _why_out(self, number: int) -> str:
        measurements = [entry for entry in self.state.measurements(number) if entry.repeat > 0]
        return exclusion(number, measurements, self.state.verdicts.get(number))

    def _plan_time(self) -> None:
        """Correct the estimate of what is still to be measured."""
        trial = self.state.setup.study.trial
        searched = sum(launches[0].repeat == 0 for launches in self.state.launches.values())
        confirmed = sum(
            launch.repeat > 0 for launches in self.state.launches.values() for launch in launches
        )
        leaders = range(1, 1 + min(self.num_leaders, max(self.state.planned - 1, 0)))
        plans = self.plans or [Plan.of(self.state.setup.study, list(leaders))]
        usual = trial.warmup_steps + trial.measure_steps
        left = self.state.planned - searched if self.is_searching else 0
        self.time_left.plan("search", left)
        self.time_left.plan(
            "confirm",
            sum(len(plan.order()) for plan in plans) - confirmed,
            longer_by=1.0 if plans[0].steps is None else plans[0].steps / usual,
        )

    def _reserve(self) -> float:
        """Return the seconds of the time budget that the confirmation will need."""
        budget = self.state.setup.study.study.time_budget
        needed = self.time_left.seconds(phase="confirm")
        return 0.0 if budget is None or needed is None else min(needed, _MAX_RESERVE * budget)


def _attributes(measurement: Measurement) -> dict[str, float | str | None]:
    entries = {
        MEMORY: measurement.peak_memory_bytes if measurement.outcome == "ok" else None,
        STEP_TIME: measurement.step_time_s if measurement.outcome == "ok" else None,
        REASON: measurement.message or None,
        WALL: measurement.wall_s,
        "mfu": measurement.mfu,
        "stability": measurement.stability,
    }
    return {name: value for name, value in entries.items() if value is not None}
