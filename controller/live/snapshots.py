"""Earlier states of the weights to return to: when one is taken, proved, dropped and used.

Theory of operation. The first copy is taken before the first step of the process: what the user
starts from needs no judgement. After a step that the engine calls healthy, and `every` healthy
steps after the last copy, the state is copied again. What the step measured speaks of the weights
before its update, not of those that were copied: a copy counts as healthy only once `PROVED_AFTER`
further steps, made with these weights, were healthy without a break. One bad step before that and
the copy is dropped. Health is decided before anything is pruned: a new copy replaces the oldest
only where a newer healthy one stays, so the newest healthy state is never lost.

A return goes to the newest healthy state, and the copy that waits to be proved is dropped, since
it lies on the way that is left; so is a newer one that cannot be read. Steps and
the schedule's position go on rising; the data that the run has passed over are not seen again.

Every rank runs this on equal decisions, so all copy and return at the same steps. Before a return
each rank tells the newest step that it can return to, and where they differ, tells again, of those
up to the oldest that was told, until all are equal: that is the newest state that every rank
holds. All see all answers, so all ask equally often. If a rank has none left, none returns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from mindtune.controller.errors import ConfigError

__all__ = ["MIN_KEPT", "PROVED_AFTER", "Snapshots", "Storage"]

_LOGGER = logging.getLogger(__name__)

PROVED_AFTER: Final = 8
"""Healthy steps after which a copy counts as healthy. A NaN shows in the next step; an update that
is far too large shows in the loss of the next and stays in it."""
MIN_KEPT: Final = 2
"""The newest healthy copy and the one that is to replace it."""
_NOTHING: Final = -1


class Storage(Protocol):
    """Where copies of the state lie, by the step after which they were taken."""

    @property
    def survives(self) -> bool:
        """Whether the copies outlive the process."""

    def write(self, step: int) -> None:
        """Copy the state.

        Raises:
            ConfigError: It cannot be written.
        """

    def load(self, step: int) -> Any:
        """Return the copy, ready for `assign`.

        Raises:
            ConfigError: It is not there or is damaged.
        """

    def assign(self, copy: Any) -> None:
        """Make a loaded copy the current state."""

    def holds(self, step: int) -> bool:
        """Tell whether there is a copy of this step."""

    def retain(self, steps: Collection[int]) -> None:
        """Drop the copies of all other steps; what cannot be dropped stays, with a warning."""


class Snapshots:
    """Decides when the state is copied, and returns to the newest healthy copy.

    Args:
        storage: Holds the copies.
        every: Healthy steps between two copies; longer where the last one is not yet proved.
        keep: Copies held, the one to be proved included; at least `MIN_KEPT`.
        of_all_ranks: Returns the number that each rank calls it with; every rank does.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        every: int,
        keep: int,
        of_all_ranks: Callable[[int], Sequence[int]] = lambda number: (number,),
    ) -> None:
        self._storage = storage
        self._every = every
        self._keep = max(keep, MIN_KEPT)
        self._of_all_ranks = of_all_ranks
        self._healthy: tuple[int, ...] = ()
        self._unproved: int | None = None
        self._since = 0
        self._saved: tuple[int, ...] = ()

    @property
    def healthy(self) -> tuple[int, ...]:
        """Steps of the copies that can be returned to, oldest first."""
        return self._healthy

    def begin(self, step: int, *, saved: Mapping[str, Any] | None = None) -> None:
        """Go on with the copies that a saved state names, or begin with one of the state as it is.

        Args:
            step: Optimizer steps attempted before this process.
            saved: What `state` returned; None: nothing was saved.
        """
        if saved is not None and self._storage.survives:
            self._restore(saved)
        if not self._healthy and self._write(step):
            self._healthy = (step,)

    def note(self, step: int, *, healthy: bool) -> bool:
        """Take in how a step went; copy the state if it is time to, and tell whether it was.

        Args:
            step: Optimizer steps attempted.
            healthy: Whether the engine sees nothing wrong.
        """
        if not healthy:
            self._unproved = None
            return False
        self._since += 1
        if self._unproved is not None:
            if step - self._unproved < PROVED_AFTER:
                return False
            self._healthy = (*self._healthy, self._unproved)
            self._unproved = None
        if self._since < self._every:
            return False
        return self._take(step)

    def rewind(self) -> int:
        """Return to the newest healthy state that all ranks hold; the result is its step.

        Raises:
            ConfigError: There is none; nothing was changed.
        """
        newest, copy, problem = self._load(self._healthy)
        found = newest
        # All ranks come here together, whether or not they have a state: this is no error path.
        while len(set(offers := self._of_all_ranks(found))) > 1:
            oldest = min(offers)
            if found > oldest:
                found, copy, _ = self._load([step for step in self._healthy if step <= oldest])
        if found == _NOTHING and newest != _NOTHING:
            raise ConfigError(
                "the ranks hold no earlier state in common (the newest of this one: step "
                f"{newest}), so none returns; restart from a checkpoint."
            )
        if found == _NOTHING:
            raise ConfigError(
                problem or "no earlier state could be kept; restart from a checkpoint."
            )
        self._storage.assign(copy)
        self._healthy = tuple(step for step in self._healthy if step <= found)
        self._unproved = None
        self._since = 0
        return found

    def state(self) -> dict[str, Any] | None:
        """Return which copies there are, as JSON-ready data; None where they end with the process.

        The copies that it names are kept until the next call, so that a run which is resumed from
        here finds them.
        """
        if not self._storage.survives:
            return None
        unproved = () if self._unproved is None else (self._unproved,)
        self._saved = (*self._healthy, *unproved)
        return {
            "healthy": list(self._healthy),
            "unproved": self._unproved,
            "healthy_steps": self._since,
        }

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with the copies that a saved state names and that are still there."""
        try:
            healthy = tuple(int(step) for step in saved["healthy"])
            unproved = None if saved["unproved"] is None else int(saved["unproved"])
            since = int(saved["healthy_steps"])
        except (KeyError, TypeError, ValueError) as error:
            _LOGGER.warning(
                "the saved list of earlier states cannot be read (%r): they are taken anew", error
            )
            return
        self._healthy = tuple(step for step in healthy if self._storage.holds(step))
        missing = sorted(set(healthy) - set(self._healthy))
        if missing:
            _LOGGER.warning(
                "earlier states of step %s are no longer there: the run cannot return to them",
                ", ".join(map(str, missing)),
            )
        if unproved is not None and self._storage.holds(unproved):
            self._unproved = unproved
        self._saved = healthy if unproved is None else (*healthy, unproved)
        self._since = since

    def _take(self, step: int) -> bool:
        self._healthy = self._healthy[-(self._keep - 1) :]
        self._since = 0
        if not self._write(step):
            return False
        self._unproved = step
        return True

    def _write(self, step: int) -> bool:
        self._storage.retain({*self._healthy, *self._saved})
        try:
            self._storage.write(step)
        except ConfigError as error:
            _LOGGER.warning("no state of step %d is kept: %s", step, error)
            return False
        return True

    def _load(self, steps: Sequence[int]) -> tuple[int, Any, str]:
        """Return step and copy of the newest of these that can be read, or what is wrong."""
        problem = ""
        for step in reversed(steps):
            try:
                return step, self._storage.load(step), ""
            # A rank that raised here would leave the others waiting for its answer.
            except Exception as error:  # noqa: BLE001, PERF203 - at most `keep` of them
                problem = str(error)
                _LOGGER.warning("the state of step %d cannot be used: %s", step, error)
        return _NOTHING, None, problem
