"""What the trials of an Optuna study say, in the terms of the search."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from mindtune.search.attributes import MEMORY, OUTCOME, STEP_TIME, VALUE
from mindtune.search.cost_model import Measurement
from mindtune.search.history import Attempt
from mindtune.search.space import Space

__all__ = ["attempts", "measurements"]

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


def measurements(trials: Sequence[FrozenTrial], space: Space) -> list[Measurement]:
    """Return what trials measured of memory and step time, where they say so."""
    return [
        Measurement(
            space.complete({name: trial.params[name] for name in space.knobs}),
            trial.user_attrs.get(MEMORY),
            trial.user_attrs.get(STEP_TIME),
        )
        for trial in trials
        if {MEMORY, STEP_TIME} & trial.user_attrs.keys()
        and all(name in trial.params for name in space.knobs)
    ]
