"""What a study tells while it runs, and how long it still takes.

The runner calls `on_event` with one of these values; whoever renders them needs no other source.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from mindtune.search.knobs import KnobValue

__all__ = [
    "CalibrationStarted",
    "Listener",
    "Phase",
    "RejectedBy",
    "StudyEnded",
    "StudyEvent",
    "StudyNote",
    "StudyStarted",
    "TimeLeft",
    "TrialEnded",
    "TrialProgress",
    "TrialStarted",
]

Phase = Literal["search", "confirm"]
"""search: each config once; confirm: the base and the leaders again, in turn."""


@dataclass(frozen=True)
class RejectedBy:
    """How many configs a rule keeps from being launched, and why."""

    rule: str
    count: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StudyStarted:
    """The space is checked and the folder is ready."""

    name: str
    folder: str
    storage: str
    """Without secrets."""
    trials: int
    """Configs to measure, those already measured included."""
    finished: int
    """Already measured when a study goes on."""
    total: int
    """Configs before any rule."""
    feasible: int
    rejected: tuple[RejectedBy, ...]
    """Rules that rejected at least one config."""
    objective: Literal["mfu", "relative"]
    """relative: the peak is unknown, values are speeds over the base config's."""


@dataclass(frozen=True, kw_only=True)
class CalibrationStarted:
    """The peak of this host is being measured, which takes 10 to 20 s."""

    precision: str


@dataclass(frozen=True, kw_only=True)
class TrialStarted:
    """A fresh process tree measures a config."""

    phase: Phase
    number: int
    repeat: int
    config: Mapping[str, KnobValue]
    differs: Mapping[str, KnobValue]
    """The knobs in which it differs from the base config."""
    time_left_s: float | None
    """Of the whole study; None while nothing is known."""


@dataclass(frozen=True, kw_only=True)
class TrialProgress:
    """The running trial has recorded further steps."""

    number: int
    repeat: int
    steps: int
    of_steps: int
    elapsed_s: float
    time_left_s: float | None


@dataclass(frozen=True, kw_only=True)
class TrialEnded:
    """A measurement is over, with its typed outcome."""

    phase: Phase
    number: int
    repeat: int
    outcome: str
    message: str
    """Why it failed, was stopped or was rejected; empty if it is ok."""
    value: float | None
    mfu: float | None
    stability: float | None
    step_time_s: float | None
    """Median."""
    peak_memory_bytes: int | None
    wall_s: float
    best_number: int | None
    """The best config so far."""
    time_left_s: float | None
    worker: str = ""
    """Who measured it; empty: this process."""


@dataclass(frozen=True, kw_only=True)
class StudyNote:
    """Something that the user should know, such as a trial taken up again or a spent budget."""

    message: str


@dataclass(frozen=True, kw_only=True)
class StudyEnded:
    """The winner is known and best_config.yaml is written."""

    winner: int
    reason: str
    wall_s: float


StudyEvent = (
    StudyStarted
    | CalibrationStarted
    | TrialStarted
    | TrialProgress
    | TrialEnded
    | StudyNote
    | StudyEnded
)
Listener = Callable[[StudyEvent], None]


class TimeLeft:
    """Estimates the rest of a study from how long its measurements took."""

    def __init__(self) -> None:
        self._open: dict[Phase, int] = {"search": 0, "confirm": 0}
        self._factor: dict[Phase, float] = {"search": 1.0, "confirm": 1.0}
        self._taken: list[float] = []

    def done(self, phase: Phase, wall_s: float) -> None:
        """Learn from one finished measurement."""
        self._taken.append(wall_s / self._factor[phase])

    def plan(self, phase: Phase, measurements: int, *, longer_by: float = 1.0) -> None:
        """Say what is still to be measured.

        Args:
            phase: of the study.
            measurements: launches still to come.
            longer_by: their length over one of the search.
        """
        self._open[phase] = max(0, measurements)
        self._factor[phase] = longer_by

    def seconds(self, *, elapsed_s: float = 0.0, phase: Phase | None = None) -> float | None:
        """Return the time left; None before anything was measured.

        Args:
            elapsed_s: what the running measurement has taken already.
            phase: count this phase alone; None: all that is to come.
        """
        if not self._taken:
            return None
        one = statistics.median(self._taken)
        phases = list(self._open) if phase is None else [phase]
        rest = sum(self._open[name] * self._factor[name] for name in phases) * one
        return max(0.0, rest - elapsed_s)
