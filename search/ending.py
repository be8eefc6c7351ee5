"""When a search is over: its budget is used up, nothing is left, or no trial pays any more."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import optuna
from optuna.trial import FrozenTrial, TrialState

from mindtune.search.attributes import GAIN, WALL
from mindtune.search.history import Attempt
from mindtune.search.knobs import Config
from mindtune.search.peers import queued_configs
from mindtune.search.sampler import GuidedSampler
from mindtune.search.stopping import Outlook, StopRule, reason_to_stop

__all__ = ["Ending"]


@dataclass(kw_only=True)
class Ending:
    """What ends a search of a study."""

    study: optuna.Study
    outlook: GuidedSampler
    """Asked for the gain that the next trial promises, whoever proposes it."""
    baseline: Config
    trials: int
    """Configs to try, the baseline included."""
    time_budget_s: float | None = None
    stop: StopRule | None = None
    news: tuple[float, int] | None = field(default=None, init=False)
    """Gain expected of the trial to come, and the number of results that this rests on."""

    def reason(
        self, trials: list[FrozenTrial], tried: list[Attempt], *, elapsed_s: float, has_news: bool
    ) -> str | None:
        """Return why the search is over; None: it is not.

        Args:
            trials: Of the study.
            tried: Configs that were really started.
            elapsed_s: Seconds that the search has taken so far.
            has_news: Whether a result may have come since the last question; rejected proposals
                are none.
        """
        if self.time_budget_s is not None and elapsed_s >= self.time_budget_s:
            return f"the time budget of {self.time_budget_s:g} s is used up"
        ranking = self.outlook.ranking
        counted = sum(attempt.outcome != "interrupted" for attempt in tried)
        waiting = [trial for trial in trials if trial.state == TrialState.WAITING]
        queued = queued_configs(waiting, ranking.space.knobs).values()
        # A baseline that was lost is measured besides: the others are compared with it.
        if counted >= self.trials and self.baseline not in queued:
            return f"{counted} of {self.trials} trials are done"
        if waiting:
            return None
        if not len(ranking.untried(tried)):
            return f"every feasible config has been tried ({ranking.feasible})"
        if self.stop is None or not has_news:
            return None
        return self._no_longer_pays(self.stop, trials, tried)

    def _no_longer_pays(
        self, stop: StopRule, trials: list[FrozenTrial], tried: list[Attempt]
    ) -> str | None:
        """Return why no further trial pays; None: one does, or nothing is known yet."""
        finished = sum(a.outcome not in ("running", "interrupted") for a in tried)
        # The number that the next trial will have, unless another worker is faster.
        found = self.outlook.look(self.study, tried, number=len(trials))
        if found is None or found.gain is None:
            return None
        self.news = (found.gain, finished)
        looks = [trial.user_attrs[GAIN] for trial in trials if GAIN in trial.user_attrs]
        walls = [trial.user_attrs[WALL] for trial in trials if WALL in trial.user_attrs]
        # Workers that ask at the same time know the same: one look per number of results.
        gains = sorted({known: gain for gain, known in (*looks, self.news)}.items())
        outlook = Outlook(
            gains=tuple(gain for _, gain in gains),
            num_trials=finished,
            num_knobs=len(self.outlook.ranking.encoding.names),
            trial_s=statistics.median(walls) if walls else None,
        )
        return reason_to_stop(stop, outlook)
