"""What attempts say of configs that were not tried: what they gain, and whether they run.

Whether a config runs is two questions, and the answer is their product. Whether it fits the memory
is for the calibrated cost model to say, as a probability: its prediction is off by some percent,
so that a config just below the limit is no surer to run than one just above it is to fail, and to
weigh gain by chance is what decides between a fast config at the limit and a slower one below it
(a constraint as in Gardner et al., Bayesian optimization with inequality constraints, ICML 2014).
What the rules let pass is only what is far from hopeless: a config that is predicted above the
limit by more than the model's own error, or was above a limit of the user's own before any trial,
is rejected. Below that, no correction of the model takes back at a stroke what was allowed.

Whatever else makes configs fail is learnt from which ones did, knob by knob. Failures for memory
say nothing there, as the memory model has learnt from them already; but those that it cannot
explain, since it still expects the config to fit, do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mindtune.search.encoding import Floats, Indices, Places
from mindtune.search.history import Attempt
from mindtune.search.noise import LaunchNoise
from mindtune.search.ranking import Ranking
from mindtune.search.surrogate import (
    MAX_TRIED,
    Beliefs,
    believe_below,
    fit,
    informative,
    log_expected_improvement,
    probability_ok,
)

__all__ = ["Prospects"]

_MAX_STOPPED = 60
"""Trials stopped early that the model looks at, the newest."""
_NO_CHANCE = 1e-300
"""Stands for a probability of 0, which has no logarithm."""
_NO_VERDICT = frozenset({"interrupted", "running", "ok", "pruned"})
"""Outcomes that say nothing against a config."""


class Prospects:
    """What attempts say of configs that were not tried."""

    def __init__(
        self,
        ranking: Ranking,
        tried: Sequence[Attempt],
        sign: float,
        repeated: LaunchNoise | None,
        speed_share: float,
    ) -> None:
        self.measured = _measured(tried, sign)
        """Best first."""
        self._ranking, self._tried, self._sign = ranking, tried, sign
        self._repeated, self._speed_share = repeated, speed_share

    def log_gain(self, asked: Indices) -> Floats:
        """Return log of each asked config's expected improvement, weighted by its chance to run.

        Needs a measured attempt.
        """
        tried, encoding = self._tried, self._ranking.encoding
        measured = [attempt for attempt in tried if _is_measured(attempt)]
        kept = informative(self._log_values(measured))
        measured = [measured[index] for index in kept]
        places, log_cost = self._places(measured)
        model = fit(encoding, places, self._log_values(measured), log_cost, self._repeated)
        believed = []
        running = [attempt for attempt in tried if attempt.outcome == "running"]
        if running:
            own, cost = self._places(running)
            guess = model.posterior(own, cost)
            believed.append(Beliefs(own, cost, guess.mean, np.zeros(len(own))))
        stopped = [attempt for attempt in tried if _is_bound(attempt)][-_MAX_STOPPED:]
        if stopped:
            own, cost = self._places(stopped)
            guess = model.posterior(own, cost)
            believed.append(believe_below(guess, own, cost, self._log_values(stopped)))
        log_cost = self._speed_share * self._ranking.log_costs[asked]
        posterior = model.posterior(self._ranking.places[asked], log_cost, believed)
        return log_expected_improvement(posterior) + self.log_chance(asked)

    def log_chance(self, asked: Indices) -> Floats:
        """Return log of the probability that each asked config runs at all."""
        chance = self._ranking.chance_to_fit(asked) * self._chance_otherwise(asked)
        return np.asarray(np.log(np.maximum(chance, _NO_CHANCE)))

    def _chance_otherwise(self, asked: Indices) -> Floats:
        """Return the probability that each asked config does not fail but for its memory."""
        judged = [attempt for attempt in self._tried if self._is_told(attempt)]
        succeeded = [(attempt.value or 0.0) > 0 for attempt in judged]
        if all(succeeded):
            return np.ones(len(asked))
        encoding, places = self._ranking.encoding, self._ranking.places[asked]
        known = encoding.places([attempt.config for attempt in judged[-MAX_TRIED:]])
        return probability_ok(encoding, known, np.array(succeeded[-MAX_TRIED:]), places)

    def _is_told(self, attempt: Attempt) -> bool:
        """Return whether an attempt says if its config runs, its memory aside."""
        if attempt.outcome == "oom":
            return self._ranking.is_expected_to_fit(attempt.config) is not False
        return attempt.outcome not in _NO_VERDICT or attempt.value is not None

    def _places(self, known: Sequence[Attempt]) -> tuple[Places, Floats]:
        """Return places and predicted log costs of attempts."""
        configs = [attempt.config for attempt in known]
        log_cost = self._speed_share * self._ranking.log_cost(configs)
        return self._ranking.encoding.places(configs), log_cost

    def _log_values(self, known: Sequence[Attempt]) -> Floats:
        return np.array([self._sign * math.log(attempt.value or 1.0) for attempt in known])


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
