"""One symptom as the rules see it: its incidents, the steps around it, the run as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mindtune.policies.diagnosis.history import Course, History, Scene
from mindtune.policies.diagnosis.model import Symptom
from mindtune.policies.findings import Finding, FindingKind
from mindtune.policies.signals import Observation
from mindtune.policies.windows import median

__all__ = ["Case", "RunContext"]


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What other records of the run tell; every field may be unknown."""

    outcome: str | None = None
    """How it ended (`outcome` of result.json)."""
    message: str = ""
    """What was said at its end."""
    hung: bool = False
    """Whether its watchdog saw it stand still."""
    every_step: bool | None = None
    """Whether its records are meant to hold every step (our own are); None: unknown."""
    has_attention: bool | None = None
    """Whether its sampled model signals hold attention weights; None: it has no such signals."""
    vocab_size: int | None = None
    """Tokens that the model knows."""
    num_ranks: int = 0
    """Ranks whose logs were read beside each other; 0: one log alone."""
    communication_share: float | None = None
    """Share of the profiled steps in which ranks exchanged; None: no step was profiled."""
    communication_overlap: float | None = None
    """Share of that in which other kernels ran as well."""
    host_share: float | None = None
    """Share of the profiled steps in which neither a kernel ran nor data were waited for."""
    profiled: str = ""
    """Which steps were profiled, in words."""
    first_non_finite: str | None = None
    """Which rank alone told of NaN first, and where, in words; None: unknown, or none did."""
    idle_ranks: str | None = None
    """Which ranks' devices did nothing, in words; None: unknown, or none of them."""


@dataclass(frozen=True)
class Case:
    """One symptom, from its first step to its last."""

    symptom: Symptom
    incidents: tuple[Finding, ...]
    """Those that make it, in the order of their steps; none for what only the whole run shows."""
    history: History
    others: tuple[Finding, ...] = ()
    """All incidents of the segment."""
    context: RunContext = field(default_factory=RunContext)

    @property
    def first(self) -> int:
        """First step of the symptom."""
        if self.incidents:
            return min(finding.step for finding in self.incidents)
        return self.history.first_step or 0

    @property
    def last(self) -> int:
        """Last step of it."""
        if self.incidents:
            return max(finding.last_step for finding in self.incidents)
        return self.history.last_step

    @property
    def scene(self) -> Scene | None:
        """The steps around the first incident, if they were kept."""
        scenes = [self.history.scene(finding) for finding in self.incidents]
        known = [scene for scene in scenes if scene is not None]
        return min(known, key=lambda scene: scene.step) if known else None

    @property
    def before(self) -> tuple[Observation, ...]:
        """Up to 32 steps before the symptom, oldest first."""
        return () if self.scene is None else self.scene.before

    @property
    def onset(self) -> Sequence[Observation]:
        """Up to 16 steps from its first one on."""
        return () if self.scene is None else self.scene.onset

    def found(self, *kinds: FindingKind) -> Finding | None:
        """Return the first incident of these kinds that makes the symptom."""
        return next((entry for entry in self.incidents if entry.kind in kinds), None)

    def near(self, *kinds: FindingKind, reach: int = 16) -> Finding | None:
        """Return the first other incident of these kinds in the steps around the symptom.

        Args:
            kinds: Kinds of findings.
            reach: Records of distance that are still near.
        """
        steps = reach * self.history.interval
        for finding in self.others:
            touches = finding.step <= self.last + steps and finding.last_step >= self.first - steps
            if finding.kind in kinds and touches:
                return finding
        return None

    def earlier(self, *kinds: FindingKind, within: int = 64) -> Finding | None:
        """Return the newest incident of these kinds that began before the symptom.

        Args:
            kinds: Kinds of findings.
            within: Records before the symptom in which it must have been seen last.
        """
        least = self.first - within * self.history.interval
        found = [
            finding
            for finding in self.others
            if finding.kind in kinds and finding.step < self.first and finding.last_step >= least
        ]
        return found[-1] if found else None

    def course(self, name: str) -> Course | None:
        """Return the course of a signal over the segment."""
        return self.history.course(name)

    def usual(self, name: str) -> float | None:
        """Return the median of a signal in the steps before the symptom."""
        values = _finite(self.before, name)
        return median(tuple(values)) if values else None

    def peak(self, name: str, steps: int = 16) -> float | None:
        """Return the largest finite value in the first steps of the symptom."""
        return max(_finite(self.onset[:steps], name), default=None)

    def ratio(self, name: str) -> float | None:
        """Return how many times its usual value a signal reaches; None: unknown."""
        usual, peak = self.usual(name), self.peak(name)
        return peak / usual if usual is not None and usual > 0 and peak is not None else None

    def stays(self, name: str) -> float | None:
        """Return how many times its usual value a signal is at the end of what was kept of it.

        None: unknown, or fewer than 4 records were kept from the first step of the symptom on.
        """
        usual, after = self.usual(name), _finite(self.onset, name)
        if usual is None or usual <= 0 or len(after) < 4:
            return None
        return median(tuple(after[-3:])) / usual

    def rises_from(self, name: str, factor: float) -> int | None:
        """Return the first step, at most 8 before the symptom, at `factor` times the usual."""
        usual = self.usual(name)
        if usual is None or usual <= 0:
            return None
        for observation in (*self.before[-8:], *self.onset):
            value = getattr(observation, name)
            if value is not None and (not math.isfinite(value) or value >= factor * usual):
                return int(observation.step)
        return None

    @property
    def since_start(self) -> int:
        """Steps from the begin of the segment to the symptom."""
        return self.first - (self.history.first_step or 0)


def _finite(observations: Sequence[Observation], name: str) -> list[float]:
    values = (getattr(observation, name) for observation in observations)
    return [float(value) for value in values if value is not None and math.isfinite(value)]
