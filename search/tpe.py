"""Optuna's TPE for a space of configs: data parallelism follows from the other degrees.

Where all devices are used, most values of data parallelism are wrong for the other degrees that
were drawn. A sampler that draws it as one more knob is turned down for most of its proposals, and
models what it was turned down for. Here it is no matter of the model: it is what the devices
leave, where the space lists that.
"""

from __future__ import annotations

from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mindtune.search.constraints import SpaceReport
from mindtune.search.layout import num_ranks
from mindtune.search.ranking import choices

__all__ = ["ConfigTPESampler"]

_DATA = "data_parallel"
_RANDOM_TRIALS = 5
"""Before the model takes over; half of Optuna's default, as a search has a few dozen trials."""


_PROPOSED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
_MAX_REPEATS = 10
"""Draws in a row of what was proposed before, after which every knob is drawn uniformly, as often
again: where TPE is sure of what is good, it proposes that for ever."""


class ConfigTPESampler(TPESampler):  # type: ignore[misc]  # optuna is skipped by mypy
    """TPE over all knobs but data parallelism, which is derived where all devices are used.

    There it draws again what was proposed before.
    """

    def __init__(self, report: SpaceReport, *, seed: int) -> None:
        """Take over a space.

        Args:
            report: The space under the rules.
            seed: Of everything that is drawn.
        """
        super().__init__(seed=seed, n_startup_trials=_RANDOM_TRIALS)
        self._space = report.space
        self._parameters = {
            name: CategoricalDistribution(values) for name, values in choices(report).items()
        }
        self._uniform = RandomSampler(seed=seed)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return every knob where data parallelism follows; otherwise what TPE models."""
        if not self._derives or "fixed_params" in trial.system_attrs:
            found: dict[str, BaseDistribution] = super().infer_relative_search_space(study, trial)
            return found
        return dict(self._parameters)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the knobs that TPE draws, and data parallelism as they leave it."""
        if search_space != self._parameters or not self._derives:
            known: dict[str, Any] = super().sample_relative(study, trial, search_space)
            return known
        free = {name: one for name, one in search_space.items() if name != _DATA}
        modelled = {name: one for name, one in free.items() if not one.single()}
        trials = study.get_trials(deepcopy=False, states=_PROPOSED)
        proposed = {self._values(other.params) for other in trials if other.params}
        config: dict[str, Any] = {}
        for repeats in range(2 * _MAX_REPEATS):
            config, draw = {}, self.sample_independent
            if repeats >= _MAX_REPEATS:
                draw = self._uniform.sample_independent
            elif len(study.directions) == 1:
                config = super().sample_relative(study, trial, modelled)
            for name, distribution in free.items():
                if name not in config:
                    config[name] = draw(study, trial, name, distribution)
            config[_DATA] = self._data_parallel(study, trial, config)
            if self._values(config) not in proposed:
                break
        return config

    def _values(self, config: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(config.get(name) for name in self._parameters)

    def _data_parallel(self, study: Study, trial: FrozenTrial, drawn: dict[str, Any]) -> Any:
        """Return what the devices leave; any value where the space does not list that."""
        others = num_ranks({**self._space.complete(drawn), _DATA: 1})
        data, rest = divmod(self._space.facts.cluster.num_devices, others)
        listed = self._parameters[_DATA].choices
        if rest or data not in listed:
            return self._uniform.sample_independent(study, trial, _DATA, self._parameters[_DATA])
        return data

    @property
    def _derives(self) -> bool:
        """Whether the devices decide on data parallelism."""
        space = self._space
        return (
            _DATA in space.searched
            and space.candidates is None
            and not space.facts.cluster.allow_idle
        )
