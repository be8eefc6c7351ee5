"""What the trials of an Optuna study say, in the terms of the search."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mindtune.search.attributes import ENDED_ON_REQUEST, MEMORY, OUTCOME, STEP_TIME, VALUE
from mindtune.search.cost_model import Measurement
from mindtune.search.history import Attempt
from mindtune.search.knobs import Config
from mindtune.search.noise import LaunchNoise, between_launches
from mindtune.search.repeats import repeats
from mindtune.search.space import Space

__all__ = ["NEVER_TRIED", "attempts", "launch_noise", "measurements"]

_BY_STATE = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "ok",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "interrupted",
}
"""Outcome of a trial that nobody has told."""
NEVER_TRIED = frozenset({"infeasible", "duplicate", "withdrawn"})
"""Outcomes of proposals that were turned down before a trial was started."""


def attempts(trials: Sequence[FrozenTrial], names: Sequence[str]) -> list[Attempt]:
    """Return the trials of a study that were really started, in order.

    Args:
        trials: Of a study.
        names: Knobs of the space; a trial that lacks one was never proposed in full.
    """
    found = []
    for trial in trials:
        if trial.state == TrialState.WAITING:
            continue
        attributes = trial.user_attrs
        outcome = str(attributes.get(OUTCOME) or _BY_STATE[trial.state])
        config = None if outcome in NEVER_TRIED else _config(trial, names)
        if config is None:
            continue
        if trial.state == TrialState.RUNNING:
            outcome = "running"  # a worker that is killed while it reports leaves no result
        value, objectives = None, ()
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
            values = trial.values or ()
            objectives = tuple(values) if len(values) > 1 else ()
            several = VALUE in attributes or objectives  # then Optuna knows no single value
            value = attributes.get(VALUE) if several else trial.value
        on_request = bool(attributes.get(ENDED_ON_REQUEST))
        found.append(Attempt(trial.number, config, outcome, value, objectives, on_request))
    return found


def _config(trial: FrozenTrial, names: Sequence[str]) -> Config | None:
    """Return the knobs of a trial; None: it was never proposed in full."""
    params = trial.params
    try:
        return {name: params[name] for name in names}
    except KeyError:
        return None


def launch_noise(study: Study) -> LaunchNoise | None:
    """Return how much launches of one config differ, from all repeats; None: there are none."""
    values: dict[int, dict[int, float]] = defaultdict(dict)
    for repeat in repeats(study):
        if repeat.value is not None:
            values[repeat.number][repeat.repeat] = repeat.value
    return between_launches(values)


def measurements(trials: Sequence[FrozenTrial], space: Space) -> list[Measurement]:
    """Return what ended trials measured of memory and step time, where they say so.

    Of a trial that ran out of memory it is only known that it wants more than there was, whatever
    it had taken when it failed; one that ended above the limit says how much it used.
    """
    capacity = space.facts.memory_capacity or 0.0
    limit = math.inf if space.facts.memory_limit is None else space.facts.memory_limit[0]
    found = []
    for trial in trials:
        if not trial.state.is_finished():
            continue  # of a report that is being made, the outcome comes last
        known = trial.user_attrs
        memory, above = known.get(MEMORY), None
        if known.get(OUTCOME) == "oom" and (memory is None or memory <= limit):
            memory, above = None, max(memory or 0.0, capacity) or None
        if memory is None and above is None and STEP_TIME not in known:
            continue
        config = _config(trial, space.knobs)
        if config is not None:
            complete = space.complete(config)
            found.append(Measurement(complete, memory, known.get(STEP_TIME), above))
    return found
