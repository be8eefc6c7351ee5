"""Other workers on the same study, as far as a proposal has to know of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Protocol

import optuna
from optuna.trial import FrozenTrial, TrialState

from mindtune.search.attributes import FIXED, OUTCOME
from mindtune.search.knobs import Config

__all__ = [
    "NO_PEERS",
    "Peers",
    "chosen_config",
    "earlier_trials",
    "is_kept",
    "others_run",
    "queued_configs",
]

_LOST = frozenset({None, "interrupted", "duplicate", "withdrawn"})
"""Outcomes of failed trials that say nothing of their config."""


class Peers(Protocol):
    """Whoever else asks and tells the same study."""

    def is_alive(self, trial: FrozenTrial) -> bool:
        """Return whether somebody still works on a running trial."""

    def wait(self) -> None:
        """Let a moment pass."""


class _NoPeers:
    """Nobody else works on the study."""

    def is_alive(self, trial: FrozenTrial) -> bool:
        """Return that nobody does."""
        del trial
        return False

    def wait(self) -> None:
        """Return at once."""


NO_PEERS: Peers = _NoPeers()


def others_run(
    study: optuna.Study, own: Collection[int], peers: Peers, *, before: float = math.inf
) -> bool:
    """Return whether another worker's trial runs.

    Args:
        study: The study.
        own: Numbers of the own trials.
        peers: The other workers.
        before: Count trials below this number alone.
    """
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return any(t.number < before and t.number not in own and peers.is_alive(t) for t in running)


def earlier_trials(
    study: optuna.Study, number: int, names: Sequence[str], peers: Peers
) -> list[FrozenTrial]:
    """Return the trials before a number, once no peer still chooses the config of one.

    The storage gives every trial a number of its own, in order. Once all earlier trials have
    shown their configs, two workers that compare notes come to the same verdict: the later one
    gives way.

    Args:
        study: The study.
        number: Of the own trial, whose config is stored.
        names: Knobs of the space.
        peers: The other workers.
    """
    while True:
        trials = study.get_trials(deepcopy=False)
        earlier = [trial for trial in trials if trial.number < number]
        undecided = (
            trial
            for trial in earlier
            if trial.state == TrialState.RUNNING and any(n not in trial.params for n in names)
        )
        if not any(map(peers.is_alive, undecided)):
            return earlier
        peers.wait()


def queued_configs(trials: Sequence[FrozenTrial], names: Sequence[str]) -> dict[int, Config]:
    """Return number -> config of the trials that wait for a worker."""
    found = {}
    for trial in trials:
        config = chosen_config(trial, names)
        if trial.state == TrialState.WAITING and config is not None:
            found[trial.number] = config
    return found


def chosen_config(trial: FrozenTrial, names: Sequence[str]) -> Config | None:
    """Return the config of a trial; None: it is still to be chosen.

    One that was queued has its config from then on, though whoever takes it from the queue stores
    its parameters a moment later.

    Args:
        trial: In any state.
        names: Knobs of the space.
    """
    known = {**trial.system_attrs.get(FIXED, {}), **trial.params}
    return {name: known[name] for name in names} if all(name in known for name in names) else None


def is_kept(config: Config, trials: Sequence[FrozenTrial], names: Sequence[str]) -> bool:
    """Return whether a trial of a config waits, runs or has ended by itself; else it is lost."""
    return any(
        chosen_config(trial, names) == config
        for trial in trials
        if trial.state != TrialState.FAIL or trial.user_attrs.get(OUTCOME) not in _LOST
    )
