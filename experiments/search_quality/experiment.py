"""One search of one problem, from the base config to what its study concludes.

Theory of operation. The base config, the method and the noise of trials and of confirmations have
random streams of their own, all from the seed of the search. Trials take the problem's time: a
method with several workers is asked again whenever one of them is free, and told of a result when
its trial ends. After each end a study of the trials so far is concluded.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush

from mindtune.experiments.provenance import Provenance
from mindtune.experiments.search_quality.conclusion import BASE, Tried, concluded, leaders
from mindtune.experiments.search_quality.early_stops import best_bar, stopped_early
from mindtune.experiments.search_quality.methods import METHODS, Method, Searcher
from mindtune.experiments.search_quality.problem import Problem, SimulatedTrial
from mindtune.experiments.search_quality.rows import SearchRow, SpaceFacts
from mindtune.search.constraints import SpaceReport
from mindtune.search.facts import StudyFacts
from mindtune.search.knobs import Config

__all__ = ["search", "stream", "with_base"]


def search(
    problem: Problem,
    name: str,
    method: str,
    *,
    seed: int,
    trials: int,
    known: SpaceFacts,
    measured: Provenance,
) -> SearchRow:
    """Return what a search came to.

    Args:
        problem: What to search.
        name: Of the problem in the rows, the same for all its clusters.
        method: Key of `METHODS`.
        seed: Of everything that is drawn.
        trials: The most that it may take.
        known: `answers` of the problem.
        measured: Where and when.
    """
    how = METHODS[method]
    report = with_base(problem, seed)
    begin = time.perf_counter()
    searcher = how.open(report, trials, stream(seed, "method"))
    course = _Course(problem, how, searcher, seed, trials, own_s=time.perf_counter() - begin)
    regrets: list[float] = []
    leader_regrets: list[float] = []
    while course.step():
        regrets.append(_regret([course.winner()], problem, known))
        best = [one.config for one in leaders(course.tried)]
        leader_regrets.append(_regret([*best, course.base], problem, known))
    return SearchRow(
        problem=name,
        method=method,
        seed=seed,
        trials=trials,
        space=known,
        regrets=tuple(regrets),
        leader_regrets=tuple(leader_regrets),
        outcomes=tuple(one.trial.outcome for one in course.tried),
        own_s=statistics.median(course.spent_s),
        slowest_own_s=max(course.spent_s),
        wall_s=course.now_s,
        measured=measured,
    )


def stream(seed: int, purpose: str) -> int:
    """Return the seed of one purpose: 32 bits that have nothing to do with those of others."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{seed}".encode()).digest()[:4], "big")


def with_base(problem: Problem, seed: int) -> SpaceReport:
    """Return the space as a user would hand it over, whose own config runs: drawn by the seed."""
    report, draw = problem.report, random.Random(stream(seed, "base"))
    while True:
        base = draw.choice(report.configs).config
        if problem.true_value(base) is not None:
            return replace(report, space=replace(report.space, base=base))


def _regret(found: list[Config | None], problem: Problem, known: SpaceFacts) -> float:
    values = [problem.true_value(config) or 0.0 for config in found if config is not None]
    return round(1.0 - max(values, default=0.0) / known.best, 6)


@dataclass
class _Course:
    """A search as its trials start and end."""

    problem: Problem
    how: Method
    searcher: Searcher
    seed: int
    trials: int
    own_s: float
    """Of the method since its last result."""
    now_s: float = 0.0
    """The problem's clock."""
    tried: list[Tried] = field(default_factory=list)
    """In the order of their ends."""
    spent_s: list[float] = field(default_factory=list)
    """Of the method, for each of them."""
    base: Config = field(default_factory=dict)
    """The first config that is asked for."""
    _running: list[tuple[float, int, int, Tried]] = field(default_factory=list)
    """End, number of the start, number that the method knows it by."""
    _started: int = 0

    def __post_init__(self) -> None:
        # A prefix of the trials confirms mostly what the one before it did.
        self._confirm = lru_cache(maxsize=None)(self._confirming)

    def step(self) -> bool:
        """Let the next trial end; return False where there is none."""
        begin = time.perf_counter()
        while len(self._running) < self.how.workers and self._started < self.trials:
            asked = self.searcher.ask()
            if asked is None:
                break
            own, config = asked
            self.own_s += time.perf_counter() - begin
            self._start(own, config)
            begin = time.perf_counter()
        if not self._running:
            return False
        self.now_s, _, own, ended = heappop(self._running)
        self.tried.append(ended)
        begin = time.perf_counter()
        self.searcher.tell(own, ended.trial)
        self.spent_s.append(self.own_s + time.perf_counter() - begin)
        self.own_s = 0.0
        return True

    def winner(self) -> Config | None:
        """Return what a study of the trials so far concludes; None: it has no winner."""
        return concluded(
            self.tried,
            self.base,
            lambda config, repeat: self._confirm(tuple(config.items()), repeat),
            device_memory=self._facts.cluster.device_memory,
        )

    def _start(self, own: int, config: Config) -> None:
        trial = self.problem.run(config, seed=stream(self.seed, "trial"))
        number = self._started
        if self.how.stops_early and number != BASE:
            bar = best_bar([one.trial for one in self.tried], self._facts)
            trial = stopped_early(trial, bar, self._facts)
        if number == BASE:
            self.base = config
        started = Tried(number, config, _judged(trial, self._facts))
        heappush(self._running, (self.now_s + trial.wall_s, number, own, started))
        self._started += 1

    def _confirming(self, config: tuple[tuple[str, bool | int | str], ...], repeat: int
                    ) -> SimulatedTrial:  # fmt: skip
        seed = stream(self.seed, f"confirming:{repeat}")
        return _judged(self.problem.run(dict(config), seed=seed), self._facts)

    @property
    def _facts(self) -> StudyFacts:
        return self.problem.report.space.facts


def _judged(trial: SimulatedTrial, facts: StudyFacts) -> SimulatedTrial:
    """Return a trial as its study takes it: above the memory that the user allows, it is out."""
    limit = facts.memory_limit
    if trial.outcome != "ok" or limit is None or (trial.memory_bytes or 0.0) <= limit[0]:
        return trial
    return replace(trial, outcome="infeasible", value=None)
