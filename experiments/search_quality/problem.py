"""What a search problem of the experiments is: a space, and what its configs come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mindtune.search.constraints import SpaceReport
from mindtune.search.knobs import Config

__all__ = ["Problem", "SimulatedTrial"]


@dataclass(frozen=True)
class SimulatedTrial:
    """What a trial of a config came to, without a process having been started."""

    outcome: str
    """As the launcher types it: ok, oom, crash, timeout, bad_config, non_finite; as the study
    judges it: infeasible (it needs more memory than the user allows), pruned (stopped early)."""
    value: float | None = None
    """What the search maximizes, positive; None: it ended without one. Of a trial that was stopped
    early, the most that it could still have come to."""
    step_time_s: float | None = None
    memory_bytes: float | None = None
    """Of the worst rank; None: not measured."""
    wall_s: float = 0.0
    """What the trial would have taken, start and compilation included; failures cost as well."""
    step_times_s: tuple[float, ...] = ()
    """Of each measured step, where they are known: then it can be stopped early."""
    is_bad: tuple[bool, ...] = ()
    """Of the same steps: whether each was skipped or its loss spiked."""


class Problem(Protocol):
    """A search whose answer is known.

    Its values are maximized. A problem depends on what it was made of alone: equal calls give
    equal results, in any order and in any process.
    """

    @property
    def name(self) -> str:
        """Name in rows and reports, without spaces."""
        ...

    @property
    def report(self) -> SpaceReport:
        """The space under the rules, with the cost model that a search starts with."""
        ...

    def run(self, config: Config, *, seed: int) -> SimulatedTrial:
        """Return what a trial comes to.

        Args:
            config: Knobs of the space; any config that the space lists, infeasible ones included.
            seed: Of the trial: with the config it fixes noise and mishaps.
        """
        ...

    def can_start(self, config: Config) -> bool:
        """Return whether the program starts a config at all, as far as the problem knows."""
        ...

    def fails_for_memory(self, config: Config) -> bool:
        """Return whether a config that starts and cannot run fails for want of memory."""
        ...

    def true_value(self, config: Config) -> float | None:
        """Return the mean of the value without noise and mishaps; None: it cannot run."""
        ...
