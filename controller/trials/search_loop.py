"""The one process that plans a search, confirms its leaders and keeps the study's folder."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.confirm import (
    BASE,
    Plan,
    Verdict,
    choose,
    exclusion,
    judge_convergence,
)
from mindtune.controller.trials.progress import StudyNote
from mindtune.controller.trials.trial_loop import OVER, TrialLoop

__all__ = ["SearchLoop"]

_MAX_RESERVE = 0.5
"""Largest share of the time budget that is kept free for the confirmation."""


@dataclass(kw_only=True)
class SearchLoop(TrialLoop):
    """Drives one study from its proposals to its winner."""

    num_leaders: int
    is_searching: bool = True
    plans: list[Plan] = field(default_factory=list, init=False)
    """Confirmations that have begun."""
    _told_kinds: int = field(default=1, init=False)
    """Kinds of nodes that have been spoken of; one kind is as it should be."""

    def take_over(self) -> None:
        """Take over what earlier starts have measured.

        Raises:
            ConfigError: if the storage knows of trials whose measurements are neither there nor
                here.
        """
        super().take_over()
        if self.missing:
            raise ConfigError(
                f"the storage knows trials {', '.join(map(str, self.missing))} of this study, but "
                f"their folders are not in {self.state.folder.root}; give the --out that the "
                "study was started with, or give study.name another name."
            )

    def search(self) -> None:
        """Measure configs until the proposals end."""
        rejection = self.proposer.baseline.rejection
        if rejection is not None:
            self.emit(
                StudyNote(
                    message="the base config itself cannot run, so the nearest feasible config "
                    f"stands for it: {rejection}"
                )
            )
        study = self.proposer.study
        if study.user_attrs.get(OVER):
            study.set_user_attr(OVER, "")  # an earlier start's; there may be more to do now
        self.run()
        study.set_user_attr(OVER, self.proposer.stopped)
        self.is_searching = False
        self.state.search_ended = self.proposer.stopped or ""
        self._plan_time()
        self.emit(StudyNote(message=f"the search is over: {self.proposer.stopped}"))

    def confirm(self) -> None:
        """Measure base and leaders again, and choose the winner."""
        state, study = self.state, self.state.setup.study
        if state.best_number() is None:
            state.final = Verdict(None, "no config ended ok")
            state.save()
            return
        # Where the budget ended before the base: it is measured here at last.
        state.configs.setdefault(BASE, self.proposer.baseline.config)
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
            _, measurement = self._measure("confirm", number, repeat, config, steps=plan.steps)
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

    def _told(self) -> None:
        self.state.save()
        told = self.state.told_hardware()
        if len(told) > self._told_kinds:
            self._told_kinds = len(told)
            message = (
                f"Slurm gave nodes of several kinds, {'; '.join(sorted(told))}: step times may "
                "not be comparable; choose one by SLURM_PARTITION or SLURM_CONSTRAINT"
            )
            self.emit(StudyNote(message=message))

    def _plan_time(self) -> None:
        """Correct the estimate of what is still to be measured."""
        trial = self.state.setup.study.trial
        confirmed = sum(
            launch.repeat > 0 for launches in self.state.launches.values() for launch in launches
        )
        leaders = range(1, 1 + min(self.num_leaders, max(self.state.planned - 1, 0)))
        plans = self.plans or [Plan.of(self.state.setup.study, list(leaders))]
        usual = trial.warmup_steps + trial.measure_steps
        super()._plan_time()
        if not self.is_searching:
            self.time_left.plan("search", 0)
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
