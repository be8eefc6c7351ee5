"""Which config next: an Optuna sampler that knows rules, cost model and failures.

It returns feasible configs only, never one that was tried or is running, never one that a
failure rules out for certain, and is deterministic: the same seed, space and trials give the same
proposal, in a resumed study too. Every step it asks a Gaussian process, whose prior mean is the
cost model's order, for the config with the largest expected improvement of log(value), weighted
by the probability that it runs at all (`prospects`). Trials that are still running count with the
value that is expected of them, so that parallel workers spread out; those that were stopped early
as a bound: their value is the best that they could still have come to.

It needs no more than Optuna: a trial that carries what it measured of memory and step time
(`attributes.MEMORY`, `attributes.STEP_TIME`) or that it ran out of memory (`attributes.OUTCOME`)
calibrates the cost model, whoever ran it. In a study of several objectives it proposes for their
front, each trial by weights of its own (`tchebycheff`).

In its staged mode it changes one thing of the best config at a time, in the order of `STAGES`, as
long as that is expected to be worth a trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial

from mindtune.search.baseline import choose_baseline
from mindtune.search.constraints import SpaceReport
from mindtune.search.encoding import Floats, Indices
from mindtune.search.errors import SearchError, SpaceExhaustedError
from mindtune.search.history import Attempt
from mindtune.search.knobs import Config
from mindtune.search.noise import LaunchNoise
from mindtune.search.parameters import parameters, to_choose
from mindtune.search.prospects import Prospects
from mindtune.search.ranking import Ranking
from mindtune.search.stages import changes_one_thing
from mindtune.search.tchebycheff import draw_weights, scalarize
from mindtune.search.tpe import ConfigTPESampler
from mindtune.search.trial_history import attempts, launch_noise, measurements

__all__ = ["SAMPLERS", "GuidedSampler", "Suggestion", "make_sampler"]

SAMPLERS = ("guided", "staged", "tpe", "random")
"""Samplers by name; `tpe` and `random` may propose infeasible configs, which are never run."""

_MAX_ASKED = 2048
"""Candidates judged per proposal; of larger spaces the most promising, a random part and the
neighbours of the best trials."""
_WORTH = 0.03
"""Expected gain, in log(value), from which on a single change is tried in the staged mode: less is
a tie of two measurements."""


def make_sampler(name: str, report: SpaceReport, *, seed: int) -> BaseSampler:
    """Return a sampler by name.

    Raises:
        SearchError: if there is none of that name.
    """
    if name in ("guided", "staged"):
        return GuidedSampler(report, seed=seed, is_staged=name == "staged")
    if name == "tpe":
        return ConfigTPESampler(report, seed=seed)
    if name == "random":
        return RandomSampler(seed=seed)
    raise SearchError(f"sampler must be one of {', '.join(SAMPLERS)}, but got {name!r}.")


@dataclass(frozen=True)
class Suggestion:
    """What to try next."""

    config: Config
    gain: float | None
    """What the most promising untried config is expected to gain on the best one so far, in
    log(value), its chance to run included; None: nothing has been measured yet."""


class GuidedSampler(BaseSampler):  # type: ignore[misc]  # optuna is skipped by mypy
    """The study's own sampler; see the module's theory of operation."""

    def __init__(
        self,
        report: SpaceReport,
        *,
        seed: int = 0,
        is_staged: bool = False,
        ranking: Ranking | None = None,
    ) -> None:
        """Take over a space.

        Args:
            report: The space under the rules.
            seed: Of the part of a large space that is looked at.
            is_staged: Change one thing at a time.
            ranking: Of the same report, to share what it learns; None: its own.
        """
        self._seed = seed
        self._is_staged = is_staged
        self._parameters = parameters(report)
        self._baseline = choose_baseline(report).config
        self.ranking = Ranking(report) if ranking is None else ranking
        """What may be tried, as far as is known now."""
        self._last: tuple[object, Suggestion | None] | None = None

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return every knob: they are always chosen together."""
        del study
        return to_choose(trial, self._parameters)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the next config.

        Raises:
            SpaceExhaustedError: if no untried config is left.
        """
        if not search_space:
            return {}
        trials = study.get_trials(deepcopy=False)
        self.ranking.learn_from(measurements(trials, self.ranking.space))
        tried = attempts(trials, self.ranking.space.knobs)
        found = self.look(study, tried, number=trial.number)
        if found is None:
            raise SpaceExhaustedError(trial.number)
        return dict(found.config)

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

    def look(self, study: Study, tried: Sequence[Attempt], *, number: int) -> Suggestion | None:
        """Return what to try next in a study; None: every config was tried.

        Args:
            study: With its directions and repeats.
            tried: Its attempts.
            number: Of the trial to come.
        """
        signs = [-1.0 if d == StudyDirection.MINIMIZE else 1.0 for d in study.directions]
        repeated = launch_noise(study)
        if len(signs) == 1:
            return self.suggest(tried, number=number, sign=signs[0], repeated=repeated)
        weights = draw_weights(self._seed, number, len(signs))
        single = scalarize(tried, signs, weights)
        return self.suggest(
            single.tried, number=number, repeated=repeated, speed_share=single.speed_share
        )

    def propose(
        self, tried: Sequence[Attempt], *, number: int, sign: float = 1.0
    ) -> Config | None:
        """Return the config of `suggest`; None: every one was tried."""
        found = self.suggest(tried, number=number, sign=sign)
        return None if found is None else found.config

    def suggest(
        self,
        tried: Sequence[Attempt],
        *,
        number: int,
        sign: float = 1.0,
        repeated: LaunchNoise | None = None,
        speed_share: float = 1.0,
    ) -> Suggestion | None:
        """Return what to try after some attempts; None: every config was tried.

        Asked again about the same trial, it answers from memory.

        Args:
            tried: Everything that was started so far.
            number: Of the trial to come; together with the seed it fixes all randomness.
            sign: 1 for values to maximise, -1 for values to minimise.
            repeated: How much launches of one config differ, where that was measured.
            speed_share: How far log(value) falls with the predicted log cost.
        """
        open_indices = self.ranking.untried(tried)
        asked_for = (list(tried), number, sign, repeated, speed_share, self.ranking.cost)
        if self._last is None or self._last[0] != asked_for:
            known = Prospects(self.ranking, tried, sign, repeated, speed_share)
            found = self._suggest(known, open_indices, number) if len(open_indices) else None
            self._last = (asked_for, found)
        return self._last[1]

    def _suggest(self, known: Prospects, open_indices: Indices, number: int) -> Suggestion:
        measured = known.measured
        if not measured:
            # Nothing to learn from yet: the best predicted config that is likely to run.
            asked = open_indices[:_MAX_ASKED]
            promise = known.log_chance(asked) - self.ranking.log_costs[asked]
            return Suggestion(self._best(asked, promise), gain=None)
        stages: list[Indices] = []
        if self._is_staged:
            stages = list(self._stages(open_indices, measured[0].config))
        at = self._asked(open_indices, measured, number)
        at = np.unique(np.concatenate([at, *stages]))  # the order is that of the ranking
        asked = open_indices[at]
        log_gain = known.log_gain(asked)
        largest = float(np.exp(log_gain.max()))
        for stage in stages:
            own = np.isin(at, stage)
            if log_gain[own].max() >= math.log(_WORTH):
                return Suggestion(self._best(asked[own], log_gain[own]), largest)
        return Suggestion(self._best(asked, log_gain), largest)

    def _best(self, asked: Indices, scores: Floats) -> Config:
        return self.ranking.configs[int(asked[np.argmax(scores)])]

    def _asked(self, open_indices: Indices, measured: Sequence[Attempt], number: int) -> Indices:
        """Return which of the open configs are worth judging, by their places there."""
        if len(open_indices) <= _MAX_ASKED:
            return np.arange(len(open_indices))
        half = _MAX_ASKED // 2
        draw = np.random.default_rng([self._seed, number])
        first = open_indices[: 4 * _MAX_ASKED]
        promise = np.log(self.ranking.chance_to_fit(first)) - self.ranking.log_costs[first]
        at = [
            np.argsort(-promise, kind="stable")[:half],
            draw.choice(len(open_indices), half // 2, replace=False),
        ]
        for attempt in measured[:5]:
            is_near = self.ranking.num_different(attempt.config)[open_indices] <= 2
            at.append(np.flatnonzero(is_near)[: half // 10])
        return np.asarray(np.unique(np.concatenate(at)))

    def _stages(self, open_indices: Indices, best: Config) -> Iterator[Indices]:
        """Yield which of the open configs change one thing of the best one, stage by stage."""
        encoding = self.ranking.encoding
        own = encoding.places([best])[0]
        differs = self.ranking.places[open_indices] != own
        for at in changes_one_thing(encoding.names, differs):
            if at.any():
                yield np.flatnonzero(at)[:_MAX_ASKED]
