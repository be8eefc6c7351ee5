"""Ask and tell around a ready Optuna study: which config next, and what became of it.

Theory of operation of a trial: WAITING (queued) -> RUNNING (asked) -> COMPLETE (a value),
PRUNED (stopped, or its config cannot work: then with a positive constraint) or FAIL (crashed,
interrupted, or no value). One Optuna trial is one config; repeats of it are attributes of the
study, since a finished trial takes none. A proposal that a rule rejects, or that repeats a known
config, is closed on the spot and costs no budget. A trial whose process died is closed as
interrupted and its config queued again, once per such trial. Several workers may ask at the same
time: each looks at its own proposal again once all earlier ones are stored, and the later of two
equal ones gives way (`peers.earlier_trials`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from mindtune.search.attributes import (
    CONFIG,
    ENDED_ON_REQUEST,
    GAIN,
    KEY,
    OUTCOME,
    REASON,
    RETRY_OF,
    VALUE,
    WORKER,
)
from mindtune.search.baseline import Baseline, choose_baseline
from mindtune.search.choices import keep_choices
from mindtune.search.constraints import NOT_LISTED, SpaceReport, first_failure
from mindtune.search.ending import Ending
from mindtune.search.errors import SearchError, SpaceExhaustedError
from mindtune.search.history import MAX_STARTS, Attempt, infer
from mindtune.search.knobs import Config
from mindtune.search.parameters import parameters
from mindtune.search.peers import (
    NO_PEERS,
    Peers,
    chosen_config,
    earlier_trials,
    is_kept,
    others_run,
    queued_configs,
)  # fmt: skip
from mindtune.search.proposal import Proposal
from mindtune.search.ranking import Ranking
from mindtune.search.repeats import Repeat, add_repeat, repeats
from mindtune.search.sampler import GuidedSampler
from mindtune.search.stopping import StopRule
from mindtune.search.trial_history import attempts, measurements

__all__ = ["Proposal", "Proposer"]

_CONFIGS_FAULT = frozenset({"oom", "bad_config", "non_finite", "timeout", "infeasible"})
"""Outcomes that the config itself causes: samplers learn them as violated constraints."""
_ALONE = "another trial has to end first"
_MAX_REJECTIONS = 100
"""Rejected proposals in a row after which an untried feasible config is drawn instead."""


class Proposer:
    """Proposes configs until a budget ends or the space is exhausted."""

    def __init__(
        self,
        study: optuna.Study,
        report: SpaceReport,
        *,
        trials: int,
        time_budget_s: float | None = None,
        stop: StopRule | None = None,
        seed: int = 0,
        peers: Peers = NO_PEERS,
        worker: str | None = None,
    ) -> None:
        """Take over a study, new or resumed.

        Args:
            study: Opened by the caller, with any sampler (`sampler.make_sampler`). A guided one is
                of the same report; what it knows is shared.
            report: The space under the rules.
            trials: Configs to try, the baseline included.
            time_budget_s: Propose nothing after this much time; None: no limit.
            stop: When a further trial no longer pays; None: never.
            seed: Of the draw that replaces a sampler which proposes rejected configs only.
            peers: The other workers on the study.
            worker: Name of this one, kept with its trials; None: they carry none.

        Raises:
            SearchError: if nothing is feasible, or the study was started with other choices.
        """
        self.study = study
        self.report = report
        self.baseline: Baseline = choose_baseline(report)
        self.stopped: str | None = None
        """Why the last `ask` returned None."""
        self.must_wait = False
        """Whether the last `ask` came too early: another worker's trial has to end first."""
        self._parameters = parameters(report)
        self._space = report.space
        own = study.sampler
        is_guided = isinstance(own, GuidedSampler)
        self.ranking: Ranking = own.ranking if is_guided else Ranking(report)
        """What may be tried, as far as is known now."""
        # Whoever proposes, the stop rule asks our model; where that proposes, the same answer.
        self._ending = Ending(
            study=study,
            outlook=own if is_guided else GuidedSampler(report, seed=seed, ranking=self.ranking),
            baseline=self.baseline.config,
            trials=trials,
            time_budget_s=time_budget_s,
            stop=stop,
        )
        self._trials = trials
        self._seed = seed
        self._peers = peers
        self._worker = worker
        self._open: dict[int, Trial] = {}
        keep_choices(study, self._parameters)
        self._keep_baseline()

    @property
    def open(self) -> AbstractSet[int]:
        """Numbers of the own proposals that have not been told."""
        return self._open.keys()

    def ask(self, *, elapsed_s: float = 0.0, alone: bool = False) -> Proposal | None:
        """Return the next config to try; None: there is none now, see `stopped`.

        The search is over once there is none and no other worker's trial runs, which may come
        back.

        Args:
            elapsed_s: Seconds that the search has taken so far.
            alone: Propose nothing while another worker's trial runs.
        """
        self._ending.news = None
        for rejections in range(2 * _MAX_REJECTIONS):
            trials = self.study.get_trials(deepcopy=False)
            if not rejections:
                self.ranking.learn_from(measurements(trials, self._space))
            self.stopped = self._ending.reason(
                trials, attempts(trials, self._space.knobs),
                elapsed_s=elapsed_s, has_news=not rejections,
            )  # fmt: skip
            self.must_wait = alone and others_run(self.study, self._open, self._peers)
            if self.stopped is None and self.must_wait:
                self.stopped = _ALONE
            if self.stopped is not None:
                return None
            if rejections >= _MAX_REJECTIONS:
                self._queue_random()
            try:
                trial = self.study.ask(self._parameters)
                if self._worker is not None:
                    trial.set_user_attr(WORKER, self._worker)
                config = {name: trial.params[name] for name in self._space.knobs}
                if self._turned_down(trial, config, alone=alone):
                    continue
                return self._accepted(trial, config)
            except SpaceExhaustedError as end:
                self.study.tell(end.number, state=TrialState.FAIL, skip_if_finished=True)
            except optuna.exceptions.UpdateFinishedTrialError:
                # Others took this worker for dead and closed the trial; nothing was started.
                continue
        self.stopped = f"{2 * _MAX_REJECTIONS} proposals in a row were rejected"
        return None

    def tell(
        self,
        number: int,
        outcome: str,
        value: float | None = None,
        attrs: Mapping[str, Any] | None = None,
        *,
        objectives: Sequence[float] | None = None,
    ) -> bool:
        """Record what became of a proposal.

        Args:
            number: Of the proposal.
            outcome: Typed outcome: ok, pruned, oom, timeout, ...
            value: Measured value; None: none. Of a pruned trial the best that it could still have
                come to, not what its first steps came to: it counts as a bound.
            attrs: JSON values to keep with the trial (see `attributes`).
            objectives: Of a study with several: what was measured of each. The value stays what
                configs are ranked by.

        Returns:
            Whether it was recorded: a late report about a trial that was closed meanwhile is not.
        """
        state = self._frozen(number).state
        if state.is_finished():
            return False
        trial = self._open.pop(number, None)
        usable = value is not None and math.isfinite(value)
        ranked = {VALUE: value} if objectives is not None and usable else {}
        try:
            for name, entry in {**(attrs or {}), **ranked, OUTCOME: outcome}.items():
                self._attribute(number, trial, name, entry)
            if trial is not None and outcome in _CONFIGS_FAULT:
                trial.set_constraint(outcome, 1.0)
            if trial is not None and outcome == "pruned" and usable and objectives is None:
                trial.report(float(value or 0.0), step=1)
            target: Trial | int = number if trial is None else trial
            if outcome == "ok" and usable:
                values = value if objectives is None else objectives
                self.study.tell(target, values, skip_if_finished=True)
            else:
                stopped = outcome == "pruned" or outcome in _CONFIGS_FAULT
                final = TrialState.PRUNED if stopped else TrialState.FAIL
                self.study.tell(target, state=final, skip_if_finished=True)
        except optuna.exceptions.UpdateFinishedTrialError:
            return False
        return True

    def requeue_stale(
        self, is_alive: Callable[[FrozenTrial], bool], *, on_request: bool = False
    ) -> tuple[int, ...]:
        """Close the running trials whose process is gone and queue their configs again.

        A config that was interrupted `MAX_STARTS` times, or has been finished by another trial,
        is not queued again; the baseline, which everything is compared with, is started until it
        ends by itself. Safe to call any number of times.

        Args:
            is_alive: Whether somebody still works on a running trial.
            on_request: They end because the search was asked to: that is no start that failed, and
                their configs are always queued again.

        Returns:
            Numbers of the trials that were closed.
        """
        closed = []
        trials = self.study.get_trials(deepcopy=False)
        queued = {trial.user_attrs.get(RETRY_OF) for trial in trials}
        attrs: dict[str, object] = {REASON: "its process was gone"}
        if on_request:
            attrs = {REASON: "the search was asked to end", ENDED_ON_REQUEST: True}
        free = int(on_request)
        for trial in trials:
            if trial.state != TrialState.RUNNING or is_alive(trial):
                continue
            config = chosen_config(trial, self._space.knobs)
            # Queue before closing: a second kill in between must not lose the config.
            if config and trial.number not in queued and self._may_retry(config, trials, free):
                self._queue(config, {RETRY_OF: trial.number})
            self.tell(trial.number, "interrupted", attrs=attrs)
            closed.append(trial.number)
        self._keep_baseline()
        return tuple(closed)

    def plan_trials(self, trials: int) -> None:
        """Go on to another number of configs: a search that was taken up again may plan more."""
        self._trials = trials
        self._ending.trials = trials

    def attempts(self) -> list[Attempt]:
        """Return every config that was really started, in order."""
        return attempts(self.study.get_trials(deepcopy=False), self._space.knobs)

    def leaders(self, count: int) -> tuple[Attempt, ...]:
        """Return the best completed trials, best first; the baseline is not favoured."""
        finished = [a for a in self.attempts() if a.outcome == "ok" and a.value is not None]
        return tuple(sorted(finished, key=lambda a: (-(a.value or 0.0), a.number))[:count])

    def add_repeat(
        self, number: int, repeat: int, value: float | None, attrs: Mapping[str, Any] | None = None
    ) -> None:
        """Record a further measurement of a finished trial's config."""
        add_repeat(self.study, number, repeat, value, attrs or {})

    def repeats(self, number: int | None = None) -> tuple[Repeat, ...]:
        """Return the repeats of one trial or of all, in order."""
        return repeats(self.study, number)

    def _turned_down(self, trial: Trial, config: Config, *, alone: bool) -> bool:
        """Close a proposal that may not be run; return whether it was one."""
        earlier = earlier_trials(self.study, trial.number, self._space.knobs, self._peers)
        others = attempts(earlier, self._space.knobs)
        started = {a.number: a.config for a in others if a.outcome != "interrupted"}
        claimed = {**started, **queued_configs(earlier, self._space.knobs)}
        known = [number for number, other in claimed.items() if other == config]
        if known:
            self._close(trial, config, "duplicate", f"same config as trial {known[0]}")
            return True
        is_baseline = config == self.baseline.config
        if len(claimed) >= self._trials and not is_baseline:
            begun = f"{len(claimed)} of {self._trials} trials have begun"
            self._close(trial, config, "withdrawn", begun)
            return True
        if alone and others_run(self.study, self._open, self._peers, before=trial.number):
            self._close(trial, config, "withdrawn", _ALONE)
            return True
        reason = first_failure(self._space.complete(config), self.ranking.cost)
        if reason is None and not is_baseline and config not in self._space:
            reason = f"allowed_values: {NOT_LISTED}"
        if reason is None:
            inference = infer(config, others)
            reason = None if inference is None else f"inferred: {inference.reason}"
        if reason is None:
            return False
        trial.set_constraint(reason.partition(":")[0], 1.0)
        self._close(trial, config, "infeasible", reason)
        return True

    def _close(self, trial: Trial, config: Config, outcome: str, reason: str) -> None:
        for name, entry in ((CONFIG, config), (OUTCOME, outcome), (REASON, reason)):
            trial.set_user_attr(name, entry)
        state = TrialState.PRUNED if outcome == "infeasible" else TrialState.FAIL
        self.study.tell(trial, state=state)

    def _accepted(self, trial: Trial, config: Config) -> Proposal:
        key = self._space.key(config)
        trial.set_user_attr(CONFIG, config)
        trial.set_user_attr(KEY, key)
        if self._ending.news is not None:
            trial.set_user_attr(GAIN, self._ending.news)
        self._open[trial.number] = trial
        return Proposal(
            trial.number,
            config,
            key,
            config == self.baseline.config,
            trial.user_attrs.get(RETRY_OF),
            self.ranking.cost.predict(self._space.complete(config)),
        )

    def _keep_baseline(self) -> None:
        """Queue the baseline unless a trial of it waits, runs or has ended by itself.

        Everything is compared with it, so that it has to be there whatever else was lost.
        """
        trials = self.study.get_trials(deepcopy=False)
        if not is_kept(self.baseline.config, trials, self._space.knobs):
            self._queue(self.baseline.config, {})

    def _queue(self, config: Config, attrs: dict[str, Any]) -> None:
        self.study.enqueue_trial(dict(config), user_attrs=attrs or None)

    def _queue_random(self) -> None:
        """Queue an untried feasible config where the sampler finds none."""
        indices = self.ranking.untried(self.attempts())
        if len(indices):
            number = len(self.study.get_trials(deepcopy=False))
            draw = random.Random(f"{self._seed}:{number}")  # noqa: S311 - a draw, no secret
            self._queue(self.ranking.configs[draw.choice(indices)], {})

    def _may_retry(self, config: Config, trials: list[FrozenTrial], free: int) -> bool:
        """Return whether a config may start once more, when `free` of its starts do not count."""
        is_baseline = config == self.baseline.config
        same = [a for a in attempts(trials, self._space.knobs) if a.config == config]
        finished = any(a.outcome not in ("interrupted", "running") for a in same)
        starts = sum(not attempt.ended_on_request for attempt in same) - free
        return not finished and (is_baseline or starts < MAX_STARTS)

    def _frozen(self, number: int) -> FrozenTrial:
        trials = self.study.get_trials(deepcopy=False)
        if not 0 <= number < len(trials):
            raise SearchError(
                f"a trial's number must be below {len(trials)}, but got {number}; tell what was "
                "asked before."
            )
        return trials[number]

    def _attribute(self, number: int, trial: Trial | None, name: str, entry: Any) -> None:
        if trial is not None:
            trial.set_user_attr(name, entry)
        else:
            # A trial that another process asked has no public way in but its storage.
            trial_id, storage = self._frozen(number)._trial_id, self.study._storage  # noqa: SLF001
            storage.set_trial_user_attr(trial_id, name, entry)
