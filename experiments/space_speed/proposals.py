"""Our own time per proposal, as a study grows, in CPU seconds: as a whole and by steps."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence

import optuna
from optuna.trial import TrialState, create_trial

from mindtune.experiments.space_speed.spaces import SPACES
from mindtune.search.attributes import MEMORY, OUTCOME, STEP_TIME
from mindtune.search.constraints import SpaceReport, check
from mindtune.search.cost_model import Measurement, calibrate
from mindtune.search.history import Attempt
from mindtune.search.knobs import Config
from mindtune.search.parameters import parameters
from mindtune.search.proposal import Proposal
from mindtune.search.ranking import Ranking
from mindtune.search.sampler import GuidedSampler
from mindtune.search.study import Proposer

__all__ = ["proposals"]

_FAILED = 0.1
"""Share of the made-up trials that fail."""
_NOISE = 0.1


def proposals(name: str, trials: int, rounds: int) -> str:
    """Return one row of the table: what the next proposal takes after so many trials."""
    report = check(SPACES[name]())
    begin = time.process_time()
    ranking = Ranking(report)
    started = time.process_time() - begin
    sampler = GuidedSampler(report, seed=0, ranking=ranking)
    tried, seen = _made_up(ranking, trials)
    begin = time.process_time()
    ranking.learn(calibrate(report.cost, seen))  # the first time also takes in what did not fit
    first = time.process_time() - begin
    learning = _timed(rounds, lambda _: ranking.learn(calibrate(report.cost, seen)))
    asking = _timed(rounds, lambda turn: sampler.propose(tried, number=trials + turn))
    whole = _whole(report, tried, rounds)
    return (
        f"| {name} | {report.feasible:,} | {trials} | {whole} | {asking} | {learning} | "
        f"{started:.2f} + {first:.2f} |"
    )


def _whole(report: SpaceReport, tried: Sequence[Attempt], rounds: int) -> str:
    """Return the time of the study's own question, each with a new result to learn from."""
    study = optuna.create_study(direction="maximize")
    study.sampler = GuidedSampler(report, seed=0)
    proposer = Proposer(study, report, trials=len(tried) + rounds + 2)
    cost, distributions = report.cost, parameters(report)

    def measured(config: Config) -> dict[str, float]:
        predicted = cost.predict(report.space.complete(config))
        known = {MEMORY: predicted.memory_bytes, STEP_TIME: predicted.step_time_s}
        return {name: value for name, value in known.items() if value is not None}

    for attempt in tried:
        is_ok = attempt.value is not None
        attributes = measured(attempt.config) if is_ok else {}
        study.add_trial(
            create_trial(
                params=dict(attempt.config), distributions=distributions, value=attempt.value,
                state=TrialState.COMPLETE if is_ok else TrialState.FAIL,
                user_attrs={OUTCOME: attempt.outcome, **attributes},
            )
        )  # fmt: skip

    def tell(proposal: Proposal | None) -> None:
        if proposal is None:
            raise RuntimeError(f"the search is over: {proposer.stopped}")
        relative = cost.relative_cost(report.space.complete(proposal.config))
        proposer.tell(proposal.number, "ok", 1.0 / (relative or 1.0), measured(proposal.config))

    for _ in range(2):  # the baseline, and the first measurement, after which the space is known
        tell(proposer.ask())
    taken = []
    for _ in range(rounds):
        gc.collect()
        begin = time.process_time()
        proposal = proposer.ask()
        taken.append(1e3 * (time.process_time() - begin))
        tell(proposal)
    return _text(taken)


def _made_up(ranking: Ranking, trials: int) -> tuple[list[Attempt], list[Measurement]]:
    """Return trials of a machine that is the cost model with noise; equal in every round."""
    draw = random.Random(0)
    space = ranking.space
    tried, seen = [], []
    chosen = draw.sample(range(ranking.feasible), min(trials, ranking.feasible))
    for number, index in enumerate(chosen):
        config = ranking.configs[index]
        if draw.random() < _FAILED:
            tried.append(Attempt(number, config, "crash"))
            continue
        complete = space.complete(config)
        noise = math.exp(draw.gauss(0.0, _NOISE))
        cost = ranking.cost.relative_cost(complete)
        tried.append(Attempt(number, config, "ok", 1.0 / ((cost or 1.0) * noise)))
        step_time = ranking.cost.step_time_s(complete)
        memory = ranking.cost.memory_bytes(complete)
        seen.append(
            Measurement(
                complete,
                None if memory is None else memory * noise,
                None if step_time is None else step_time * noise,
            )
        )
    return tried, seen


def _timed(rounds: int, work: Callable[[int], object]) -> str:
    """Return median and range of the milliseconds of some work."""
    taken = []
    for turn in range(rounds):
        begin = time.process_time()
        work(turn)
        taken.append(1e3 * (time.process_time() - begin))
    return _text(taken)


def _text(taken: Sequence[float]) -> str:
    return f"{statistics.median(taken):.0f} [{min(taken):.0f}, {max(taken):.0f}]"
