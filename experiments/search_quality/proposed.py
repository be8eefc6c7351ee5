"""Searches as a study makes them, and parts of ours alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import optuna
from optuna.samplers import BaseSampler

from mindtune.experiments.search_quality.problem import SimulatedTrial
from mindtune.search.attributes import MEMORY, STEP_TIME
from mindtune.search.baseline import choose_baseline
from mindtune.search.constraints import SpaceReport
from mindtune.search.cost_model import Measurement
from mindtune.search.encoding import Floats
from mindtune.search.history import Attempt
from mindtune.search.knobs import Config, KnobValue
from mindtune.search.ranking import Ranking
from mindtune.search.sampler import GuidedSampler
from mindtune.search.stopping import StopRule
from mindtune.search.study import Proposer

__all__ = ["CalibratedOrder", "Proposed", "without_model"]


class Proposed:
    """A study as a user runs it, with one of the samplers of the study file."""

    def __init__(
        self,
        sampler: BaseSampler,
        report: SpaceReport,
        trials: int,
        seed: int,
        stop: StopRule | None = None,
    ) -> None:
        study = optuna.create_study(direction="maximize", sampler=sampler)
        self._proposer = Proposer(study, report, trials=trials, stop=stop, seed=seed)

    def ask(self) -> tuple[int, Config] | None:
        """Return the next config and its trial's number; None: the study proposes none."""
        proposal = self._proposer.ask()
        return None if proposal is None else (proposal.number, proposal.config)

    def tell(self, number: int, trial: SimulatedTrial) -> None:
        """Tell the study what a trial loop tells it."""
        measured = {MEMORY: trial.memory_bytes, STEP_TIME: trial.step_time_s}
        if trial.outcome != "ok":
            measured = {}
        known = {name: value for name, value in measured.items() if value is not None}
        self._proposer.tell(number, _told(trial), trial.value, known)


def _told(trial: SimulatedTrial) -> str:
    """Return the outcome as a study tells it: above the limit is as bad as out of memory."""
    return "oom" if trial.outcome == "infeasible" else trial.outcome


class CalibratedOrder:
    """The best predicted untried config, by a cost model that its own trials calibrate."""

    def __init__(self, report: SpaceReport) -> None:
        self._ranking = Ranking(report)
        self._base: Config | None = choose_baseline(report).config
        self._tried: list[Attempt] = []
        self._measured: list[Measurement] = []

    def ask(self) -> tuple[int, Config] | None:
        """Return the best predicted untried config and its place; None: there is no other."""
        config, self._base = self._base, None
        if config is None:
            self._ranking.learn_from(self._measured)
            left = self._ranking.untried(self._tried)
            if not len(left):
                return None
            config = self._ranking.configs[int(left[0])]
        number = len(self._tried)
        self._tried.append(Attempt(number, config, "running"))
        return number, config

    def tell(self, number: int, trial: SimulatedTrial) -> None:
        """Take in what a trial measured."""
        config = self._tried[number].config
        self._tried[number] = Attempt(number, config, _told(trial), trial.value)
        if trial.outcome == "ok":
            complete = self._ranking.space.complete(config)
            seen = Measurement(complete, trial.memory_bytes, trial.step_time_s)
            self._measured.append(seen)


def without_model(report: SpaceReport, seed: int) -> GuidedSampler:
    """Return our sampler with nothing but its surrogate: no time is predicted, memory is."""
    return GuidedSampler(report, seed=seed, ranking=_Unpredicted(report, seed))


class _Unpredicted(Ranking):
    """Configs in an order that is drawn, all of one predicted cost."""

    def __init__(self, report: SpaceReport, seed: int) -> None:
        self._seed = seed
        super().__init__(report)

    def log_cost(self, configs: Iterable[Mapping[str, KnobValue]]) -> Floats:
        """Return 0 for each config."""
        return np.zeros(len(list(configs)))

    def _rank(self) -> None:
        super()._rank()
        self.log_costs = np.zeros(len(self.configs))
        self._order = np.random.default_rng(self._seed).permutation(len(self.configs))
