"""Optuna's TPE for a space of configs, without proposals that are known to lead nowhere.

Where all devices are used, most values of data parallelism are wrong for the other degrees that
were drawn. A sampler that draws it as one more knob is turned down for most of its proposals, and
models what it was turned down for. Here it is no matter of the model: it is what the devices
leave, where the space lists that. Neither is proposed again what was, nor what a list of
candidates does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mindtune.search.attributes import OUTCOME
from mindtune.search.constraints import SpaceReport
from mindtune.search.layout import num_ranks
from mindtune.search.parameters import parameters, to_choose
from mindtune.search.trial_history import NEVER_TRIED

__all__ = ["ConfigTPESampler"]

_DATA = "data_parallel"
_RANDOM_TRIALS = 5
"""Proposals before the model takes over, those that were turned down as infeasible included; half
of Optuna's default, as a search has a few dozen trials."""

_PROPOSED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
_MAX_REPEATS = 10
"""Draws in a row that lead nowhere, after which the model is not asked any more: where TPE is sure
of what is good, it proposes that for ever. Then one of the feasible configs is drawn that were not
tried."""


class ConfigTPESampler(TPESampler):  # type: ignore[misc]  # optuna is skipped by mypy
    """TPE over all knobs but data parallelism, which is derived where all devices are used."""

    def __init__(self, report: SpaceReport, *, seed: int) -> None:
        """Take over a space.

        Args:
            report: The space under the rules.
            seed: Of everything that is drawn.
        """
        super().__init__(seed=seed, n_startup_trials=_RANDOM_TRIALS)
        self._space = report.space
        self._parameters = parameters(report)
        candidates = report.space.candidates
        self._derives = (
            _DATA in report.space.searched
            and candidates is None
            and not report.space.facts.cluster.allow_idle
        )
        self._listed = None if candidates is None else {self._values(one) for one in candidates}
        self._feasible = [self._values(entry.config) for entry in report.configs]
        self._uniform = RandomSampler(seed=seed)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return every knob: they are always chosen together."""
        del study
        return to_choose(trial, self._parameters)

    def reseed_rng(self) -> None:
        """Draw anew from here on: Optuna asks for it where several processes share a seed."""
        super().reseed_rng()
        self._uniform.reseed_rng()

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the next config."""
        if not search_space:
            return {}
        trials = [other for other in study.get_trials(deepcopy=False) if other.params]
        proposed = {self._values(one.params) for one in trials if one.state in _PROPOSED}
        config: dict[str, Any] = {}
        for _ in range(_MAX_REPEATS):
            config = self._draw(study, trial)
            values = self._values(config)
            if values not in proposed and (self._listed is None or values in self._listed):
                return config
        # What was turned down may be allowed by now, as the cost model learns.
        started = {
            self._values(one.params)
            for one in trials
            if one.user_attrs.get(OUTCOME) not in NEVER_TRIED
        }
        left = [values for values in self._feasible if values not in started]
        if not left:
            return config
        place = IntDistribution(0, len(left) - 1)
        index = self._uniform.sample_independent(study, trial, "place", place)
        return dict(zip(self._parameters, left[index], strict=True))

    def _draw(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        """Return all knobs: from the model where it has begun, otherwise one by one."""
        own = {
            name: one
            for name, one in self._parameters.items()
            if not (self._derives and name == _DATA)
        }
        config: dict[str, Any] = {}
        if len(study.directions) == 1:
            modelled = {name: one for name, one in own.items() if not one.single()}
            config = super().sample_relative(study, trial, modelled)
        for name, distribution in own.items():
            if name not in config:
                config[name] = self.sample_independent(study, trial, name, distribution)
        if self._derives:
            config[_DATA] = self._data_parallel(study, trial, config)
        return config

    def _data_parallel(self, study: Study, trial: FrozenTrial, config: dict[str, Any]) -> Any:
        """Return what the devices leave; any value where the space does not list that."""
        others = num_ranks({**self._space.complete(config), _DATA: 1})
        data, rest = divmod(self._space.facts.cluster.num_devices, others)
        own = self._parameters[_DATA]
        if rest or data not in own.choices:
            return self._uniform.sample_independent(study, trial, _DATA, own)
        return data

    def _values(self, config: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(config.get(name) for name in self._parameters)
