"""Which config next: an Optuna sampler that knows rules, cost model and failures.

It returns feasible configs only, never one that was tried or is running, never one that a
failure rules out for certain, and is deterministic: the same seed, space and trials give the same
proposal, in a resumed study too. Every step it asks a Gaussian process, whose prior mean is the
cost model's order, for the config with the largest expected improvement of log(value), weighted
by the probability that it runs at all. Trials that are still running count with the value that
is expected of them, so that parallel workers spread out; those that were stopped early with what
is expected at or below the value that they had then.

In its staged mode it changes one thing of the best config at a time, in the order of `STAGES`, as
long as that is expected to be worth a trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from mindtune.search.attributes import OUTCOME, VALUE
from mindtune.search.baseline import choose_baseline
from mindtune.search.constraints import SpaceReport
from mindtune.search.encoding import Floats, Places
from mindtune.search.errors import SearchError, SpaceExhaustedError
from mindtune.search.history import Attempt
from mindtune.search.knobs import Config
from mindtune.search.ranking import Indices, Ranking, choices
from mindtune.search.stages import changes_one_thing
from mindtune.search.surrogate import (
    expected_below,
    expected_improvement,
    fit_posterior,
    probability_ok,
)

__all__ = ["SAMPLERS", "GuidedSampler", "attempts", "make_sampler", "parameters"]

SAMPLERS = ("guided", "staged", "tpe", "random")
"""Samplers by name; `tpe` and `random` may propose infeasible configs, which are never run."""

_MAX_ASKED = 2048
"""Candidates judged per proposal; of larger spaces the best predicted, a random part and the
neighbours of the best trials."""
_WORTH = 0.03
"""Expected gain, in log(value), from which on a single change is tried in the staged mode: less is
a tie of two measurements."""
_NO_BOUND = 1e3
"""log(value) that no value reaches."""
_BY_STATE = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "ok",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "interrupted",
}
"""Outcome of a trial that nobody has told."""
_NEVER_TRIED = frozenset({"infeasible", "duplicate", "withdrawn"})
"""Outcomes of proposals that were turned down before a trial was started."""
_NO_VERDICT = frozenset({"interrupted", "running", "ok", "pruned"})
"""Outcomes that say nothing against a config."""


def parameters(report: SpaceReport) -> dict[str, BaseDistribution]:
    """Return one categorical per knob; a base value outside the user's choices is added.

    Optuna forbids to change the choices of a parameter within a study.
    """
    return {name: CategoricalDistribution(values) for name, values in choices(report).items()}


def make_sampler(name: str, report: SpaceReport, *, seed: int) -> BaseSampler:
    """Return a sampler by name.

    Raises:
        SearchError: if there is none of that name.
    """
    if name in ("guided", "staged"):
        return GuidedSampler(report, seed=seed, is_staged=name == "staged")
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
        value = None
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
            several = VALUE in trial.user_attrs  # then Optuna knows no single value
            value = trial.user_attrs[VALUE] if several else trial.value
        config = {name: trial.params[name] for name in names}
        found.append(Attempt(trial.number, config, outcome, value))
    return found


class GuidedSampler(BaseSampler):  # type: ignore[misc]  # optuna is skipped by mypy
    """The study's own sampler; see the module's theory of operation."""

    def __init__(self, report: SpaceReport, *, seed: int = 0, is_staged: bool = False) -> None:
        self._seed = seed
        self._is_staged = is_staged
        self._parameters = parameters(report)
        self._baseline = choose_baseline(report).config
        self._ranking = Ranking(report)

    def use(self, ranking: Ranking) -> None:
        """Share a ranking of the same space, which somebody else lets learn."""
        self._ranking = ranking

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
        tried = attempts(study.get_trials(deepcopy=False), self._ranking.space.knobs)
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
        open_indices = self._ranking.untried(tried)
        if not len(open_indices):
            return None
        measured = _measured(tried, sign)
        if not measured:
            # Nothing to learn from yet: the best predicted config that is likely to run.
            asked = open_indices[:_MAX_ASKED]
            log_cost = self._ranking.log_costs[asked]
            promise = np.exp(log_cost.min() - log_cost) * self._chance(tried, asked)
            return self._best(asked, promise)
        if self._is_staged:
            for asked in self._stages(open_indices, measured[0].config):
                gain = self._gain(tried, asked, sign)
                if gain.max() >= _WORTH:
                    return self._best(asked, gain)
        asked = self._asked(open_indices, measured, number)
        return self._best(asked, self._gain(tried, asked, sign))

    def largest_gain(
        self, tried: Sequence[Attempt], *, number: int, sign: float = 1.0
    ) -> float | None:
        """Return what the most promising untried config is expected to gain, in log(value).

        None: nothing is known, or nothing is left.
        """
        open_indices = self._ranking.untried(tried)
        measured = _measured(tried, sign)
        if not len(open_indices) or not measured:
            return None
        return float(self._gain(tried, self._asked(open_indices, measured, number), sign).max())

    def _best(self, asked: Indices, scores: Floats) -> Config:
        return self._ranking.configs[int(asked[np.argmax(scores)])]

    def _gain(self, tried: Sequence[Attempt], asked: Indices, sign: float) -> Floats:
        """Return the expected improvement of each asked config, weighted by its chance to run.

        Needs a measured attempt.
        """
        encoding = self._ranking.encoding
        measured = [attempt for attempt in tried if _is_measured(attempt)]
        log_values = _log_values(measured, sign)
        places, log_cost = self._known(measured)
        # Running ones are believed to come to what is expected, stopped ones to no more than the
        # value at which they were stopped.
        running = [attempt for attempt in tried if attempt.outcome == "running"]
        stopped = [attempt for attempt in tried if _is_bound(attempt)]
        believed = [*running, *stopped]
        if believed:
            believed_places, believed_cost = self._known(believed)
            guess = fit_posterior(
                encoding, places, log_values, believed_places,
                tried_log_cost=log_cost, asked_log_cost=believed_cost,
            )  # fmt: skip
            bounds = np.full(len(believed), np.inf)
            bounds[len(running) :] = _log_values(stopped, sign)
            expected = np.where(
                np.isinf(bounds), guess.mean, expected_below(guess, np.minimum(bounds, _NO_BOUND))
            )
            log_values = np.concatenate([log_values, expected])
            places = np.concatenate([places, believed_places])
            log_cost = np.concatenate([log_cost, believed_cost])
        posterior = fit_posterior(
            encoding, places, log_values, self._ranking.places[asked],
            tried_log_cost=log_cost, asked_log_cost=self._ranking.log_costs[asked],
        )  # fmt: skip
        return expected_improvement(posterior) * self._chance(tried, asked)

    def _chance(self, tried: Sequence[Attempt], asked: Indices) -> Floats:
        """Return the probability that each asked config runs at all."""
        judged = [a for a in tried if a.outcome not in _NO_VERDICT or a.value is not None]
        succeeded = np.array([(a.value or 0.0) > 0 for a in judged], dtype=bool)
        known = self._ranking.encoding.places([attempt.config for attempt in judged])
        return probability_ok(
            self._ranking.encoding, known, succeeded, self._ranking.places[asked]
        )

    def _asked(self, open_indices: Indices, measured: Sequence[Attempt], number: int) -> Indices:
        """Return the candidates worth judging, best predicted first."""
        if len(open_indices) <= _MAX_ASKED:
            return open_indices
        half = _MAX_ASKED // 2
        draw = np.random.default_rng([self._seed, number])
        at = [np.arange(half), draw.choice(len(open_indices), half // 2, replace=False)]
        for attempt in measured[:5]:
            is_near = self._ranking.num_different(attempt.config)[open_indices] <= 2
            at.append(np.flatnonzero(is_near)[: half // 10])
        return np.asarray(open_indices[np.unique(np.concatenate(at))])

    def _stages(self, open_indices: Indices, best: Config) -> Iterator[Indices]:
        """Yield the candidates of each stage that change one thing of the best config."""
        encoding = self._ranking.encoding
        own = encoding.places([best])[0]
        differs = self._ranking.places[open_indices] != own
        for at in changes_one_thing(encoding.names, differs):
            if at.any():
                yield open_indices[np.flatnonzero(at)[:_MAX_ASKED]]

    def _known(self, known: Sequence[Attempt]) -> tuple[Places, Floats]:
        """Return places and predicted costs of attempts."""
        configs = [attempt.config for attempt in known]
        return self._ranking.encoding.places(configs), self._ranking.log_cost(configs)


def _is_measured(attempt: Attempt) -> bool:
    """Whether an attempt came to a value of its own; 0 is a failure."""
    return attempt.outcome not in ("pruned", "running") and _is_usable(attempt.value)


def _is_bound(attempt: Attempt) -> bool:
    return attempt.outcome == "pruned" and _is_usable(attempt.value)


def _is_usable(value: float | None) -> bool:
    return value is not None and 0 < value < math.inf


def _measured(tried: Sequence[Attempt], sign: float) -> list[Attempt]:
    """Return the measured attempts, best first."""
    found = [attempt for attempt in tried if _is_measured(attempt)]
    return sorted(found, key=lambda attempt: -sign * (attempt.value or 0.0))


def _log_values(known: Sequence[Attempt], sign: float) -> Floats:
    return np.array([sign * math.log(attempt.value or 1.0) for attempt in known])
