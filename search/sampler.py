"""Which config next: an Optuna sampler that knows rules, cost model and failures.

It returns feasible configs only, never one that was tried or is running, never one that a
failure rules out for certain, and is deterministic: the same seed, space and trials give the same
proposal, in a resumed study too. Every step it asks a Gaussian process, whose prior mean is the
cost model's order, for the config with the largest expected improvement of log(value), weighted
by the probability that it runs at all. Trials that are still running count with the value that
is expected of them, so that parallel workers spread out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from mindtune.search.attributes import OUTCOME
from mindtune.search.baseline import choose_baseline
from mindtune.search.constraints import SpaceReport
from mindtune.search.encoding import Encoding, Floats, Points
from mindtune.search.errors import SearchError, SpaceExhaustedError
from mindtune.search.history import Attempt
from mindtune.search.knobs import Config
from mindtune.search.remaining import Remaining
from mindtune.search.surrogate import expected_improvement, fit_posterior, probability_ok

__all__ = ["SAMPLERS", "GuidedSampler", "attempts", "make_sampler", "parameters"]

SAMPLERS = ("guided", "tpe", "random")
"""Samplers by name; all but `guided` may propose infeasible configs, which are never run."""

_MAX_ASKED = 2048
"""Candidates judged per proposal; of larger spaces the best predicted, a random part and the
neighbours of the best trials."""
_BY_STATE = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "ok",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "interrupted",
}
"""Outcome of a trial that nobody has told."""
_NEVER_TRIED = frozenset({"infeasible", "duplicate"})
"""Outcomes of proposals that were turned down before a trial was started."""
_NO_VERDICT = frozenset({"interrupted", "running", "ok", "pruned"})
"""Outcomes that say nothing against a config."""


def parameters(report: SpaceReport) -> dict[str, BaseDistribution]:
    """Return one categorical per knob; a base value outside the user's choices is added.

    Optuna forbids to change the choices of a parameter within a study.
    """
    baseline = choose_baseline(report).config
    return {
        name: CategoricalDistribution(tuple(dict.fromkeys((*values, baseline[name]))))
        for name, values in report.space.choices.items()
    }


def make_sampler(name: str, report: SpaceReport, *, seed: int) -> BaseSampler:
    """Return a sampler by name.

    Raises:
        SearchError: if there is none of that name.
    """
    if name == "guided":
        return GuidedSampler(report, seed=seed)
    if name == "tpe":
        return TPESampler(seed=seed)
    if name == "random":
        return RandomSampler(seed=seed)
    raise SearchError(f"sampler must be one of {', '.join(SAMPLERS)}, but got {name!r}.")


def attempts(trials: Sequence[FrozenTrial], names: Sequence[str]) -> list[Attempt]:
    """Return the trials of a study that were really started, in order.

    Args:
        trials: Of a study.
        names: Knobs of the space; a trial that lacks one was never proposed in full.
    """
    found = []
    for trial in trials:
        outcome = str(trial.user_attrs.get(OUTCOME, _BY_STATE[trial.state]))
        if trial.state == TrialState.WAITING or outcome in _NEVER_TRIED:
            continue
        if any(name not in trial.params for name in names):
            continue
        value = trial.value if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) else None
        config = {name: trial.params[name] for name in names}
        found.append(Attempt(trial.number, config, outcome, value))
    return found


class GuidedSampler(BaseSampler):  # type: ignore[misc]  # optuna is skipped by mypy
    """The study's own sampler; see the module's theory of operation."""

    def __init__(self, report: SpaceReport, *, seed: int = 0) -> None:
        self._seed = seed
        self._parameters = parameters(report)
        self._baseline = choose_baseline(report).config
        self.use(report)

    def use(self, report: SpaceReport) -> None:
        """Take over a report of the same space whose cost model has learnt since."""
        self._report = report
        self._space = report.space
        self._remaining = Remaining(report)
        self._configs = self._remaining.configs
        self._encoding = Encoding(
            {
                name: distribution.choices
                for name, distribution in self._parameters.items()
                if isinstance(distribution, CategoricalDistribution)
            }
        )
        self._points = self._encoding.points(self._configs)
        self._log_cost = self._costs(self._configs)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return every knob: they are always chosen together."""
        del study
        return {} if "fixed_params" in trial.system_attrs else dict(self._parameters)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the next config.

        Raises:
            SpaceExhaustedError: if no untried config is left.
        """
        if not search_space:
            return {}
        if len(study.directions) > 1:
            raise SearchError(
                "the guided sampler maximises or minimises one value, but the study has "
                f"{len(study.directions)} directions."
            )
        tried = attempts(study.get_trials(deepcopy=False), self._space.knobs)
        sign = 1.0 if study.direction == StudyDirection.MAXIMIZE else -1.0
        config = self.propose(tried, number=trial.number, sign=sign)
        if config is None:
            raise SpaceExhaustedError(trial.number)
        return dict(config)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return the base config's value of a knob that a queued trial leaves open."""
        del study, trial
        if param_name not in self._baseline or not isinstance(
            param_distribution, CategoricalDistribution
        ):
            raise SearchError(
                f"the guided sampler knows {', '.join(self._baseline)}, but was asked for "
                f"{param_name!r}."
            )
        return self._baseline[param_name]

    def propose(
        self, tried: Sequence[Attempt], *, number: int, sign: float = 1.0
    ) -> Config | None:
        """Return the next config after some attempts; None: every one was tried.

        Args:
            tried: Everything that was started so far.
            number: Of the trial to come; together with the seed it fixes all randomness.
            sign: 1 for values to maximise, -1 for values to minimise.
        """
        open_indices = self._remaining.indices(tried)
        if not open_indices:
            return None
        measured = [a for a in tried if a.value is not None and 0 < a.value < math.inf]
        asked = self._asked(open_indices, measured, number, sign)
        points = Points(self._points.coordinates[asked])
        weight = self._chance(tried, points)
        if not measured:
            # Nothing to learn from yet: the best predicted config that is likely to run.
            gain = np.exp(-(self._log_cost[asked] - self._log_cost[asked].min()))
            return self._configs[asked[int(np.argmax(gain * weight))]]
        gain = self._gain(tried, measured, points, self._log_cost[asked], sign)
        return self._configs[asked[int(np.argmax(gain * weight))]]

    def _gain(
        self,
        tried: Sequence[Attempt],
        measured: Sequence[Attempt],
        asked: Points,
        asked_log_cost: Floats,
        sign: float,
    ) -> Floats:
        """Return the expected improvement of each asked config."""
        configs = [attempt.config for attempt in measured]
        log_values = np.array([sign * math.log(attempt.value or 1.0) for attempt in measured])
        running = [attempt.config for attempt in tried if attempt.outcome == "running"]
        points, log_cost = self._encoding.points(configs), self._costs(configs)
        if running:
            guess = fit_posterior(
                self._encoding, points, log_values, self._encoding.points(running),
                tried_log_cost=log_cost, asked_log_cost=self._costs(running),
            )  # fmt: skip
            configs += running
            log_values = np.concatenate([log_values, guess.mean])
            points, log_cost = self._encoding.points(configs), self._costs(configs)
        posterior = fit_posterior(
            self._encoding, points, log_values, asked,
            tried_log_cost=log_cost, asked_log_cost=asked_log_cost,
        )  # fmt: skip
        return expected_improvement(posterior)

    def _chance(self, tried: Sequence[Attempt], points: Points) -> Floats:
        """Return the probability that each point runs at all."""
        judged = [a for a in tried if a.outcome not in _NO_VERDICT or a.value is not None]
        succeeded = np.array([a.value is not None and a.value > 0 for a in judged], dtype=bool)
        known = self._encoding.points([attempt.config for attempt in judged])
        return probability_ok(self._encoding, known, succeeded, points)

    def _asked(
        self, open_indices: list[int], measured: Sequence[Attempt], number: int, sign: float
    ) -> list[int]:
        """Return the candidates worth judging, best predicted first."""
        if len(open_indices) <= _MAX_ASKED:
            return open_indices
        half = _MAX_ASKED // 2
        chosen = set(open_indices[:half])
        draw = np.random.default_rng([self._seed, number])
        chosen.update(draw.choice(open_indices, half // 2, replace=False).tolist())
        best = sorted(measured, key=lambda attempt: -sign * (attempt.value or 0.0))[:5]
        open_points = self._points.coordinates[open_indices]
        for own in self._encoding.points([attempt.config for attempt in best]).coordinates:
            near = np.flatnonzero((open_points != own).sum(axis=1) <= 2)
            chosen.update(open_indices[index] for index in near[: half // 10])
        return sorted(chosen)

    def _costs(self, configs: Sequence[Config]) -> Floats:
        costs = [self._report.cost.relative_cost(self._space.complete(c)) for c in configs]
        return np.array([0.0 if cost is None else math.log(cost) for cost in costs])
