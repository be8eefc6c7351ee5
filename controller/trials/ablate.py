"""Measure the configs between base and winner that the search has not: what each knob gave.

They lie in a folder of their own and are no trials of the search: they cost none of its budget,
teach its sampler nothing, and none of them can win.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mindtune.controller.trials.conclusions import (
    ConfigKey,
    ablation_way,
    config_key,
    known_values,
)
from mindtune.controller.trials.confirm import BASE
from mindtune.controller.trials.measure import Launch, Measurer
from mindtune.controller.trials.progress import Listener, StudyNote
from mindtune.controller.trials.study_folder import StudyFolder
from mindtune.controller.trials.study_state import StudyState
from mindtune.search.constraints import first_failure
from mindtune.search.history import Attempt, infer
from mindtune.search.knobs import Config, describe, differences

__all__ = ["ablate"]

_FOLDER = "ablation"


def ablate(state: StudyState, measurer: Measurer, emit: Listener, *, measure: bool) -> None:
    """Take what was measured for the ablation into a study whose winner is known.

    Args:
        state: Of the study.
        measurer: Of the study.
        emit: Hears of what is measured.
        measure: Whether what is missing is measured now; otherwise it stays unknown.
    """
    winner = None if state.final is None else state.final.winner
    if winner is None or winner == BASE:
        return
    own = replace(measurer, folder=StudyFolder(measurer.folder.root / _FOLDER))
    trials = state.summary().trials
    known = known_values(state.configs, trials, ends=(BASE, winner))
    if not {config_key(state.configs[number]) for number in (BASE, winner)} <= known.keys():
        if measure:
            message = "nothing to ablate: base or best config has no value"
            emit(StudyNote(message=message))
        return
    given_up: set[ConfigKey] = set()

    def may_run(config: Config) -> bool:
        return config_key(config) not in given_up and _may_run(state, config)

    while True:
        way = ablation_way(
            state.configs, trials, base=BASE, winner=winner, extra=state.ablated, may_run=may_run
        )
        keys = [config_key(config) for config in way]
        missing = [
            (key, config)
            for key, config in zip(keys, way, strict=True)
            if key not in known and key not in state.ablated
        ]
        if not missing:
            break
        key, config = missing[0]
        launch = next(_found(state, own, config), None)
        if launch is None and measure:
            changed = describe(differences(config, state.configs[BASE]))
            emit(StudyNote(message=f"measuring for the ablation: {changed}"))
            launch = own.measure(config, own.plan(1 + _count(own), 0))
        found = None if launch is None else state.scorer.measurement(launch)
        if found is not None and found.outcome == "ok" and found.value:
            state.ablated[key] = found.value
            continue
        given_up.add(key)
        if found is not None and measure:
            emit(StudyNote(message=f"left out, it ended {found.outcome}: {found.message}"))
    if state.ablated:
        state.save()


def _may_run(state: StudyState, config: Config) -> bool:
    """Tell whether nothing is known to speak against running a config."""
    space = state.setup.space
    attempts = [
        Attempt(number, state.configs[number], launches[0].outcome.record.outcome)
        for number, launches in state.launches.items()
    ]
    return (
        config in space
        and all(attempt.config != config for attempt in attempts)
        and first_failure(space.complete(config), state.report.cost) is None
        and infer(config, attempts) is None
    )


def _found(state: StudyState, own: Measurer, config: Config) -> Iterator[Launch]:
    """Yield what an earlier start has measured of a config."""
    knobs = state.setup.knobs(config)
    for number in range(1, 1 + _count(own)):
        launch = own.find(knobs, own.plan(number, 0))
        if launch is not None:
            yield launch


def _count(own: Measurer) -> int:
    """Return how many configs have a folder here; they are numbered from 1."""
    number = 0
    while own.folder.trial_dir(number + 1).parent.exists():
        number += 1
    return number
