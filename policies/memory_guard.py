"""Answers a device that runs out of memory before the run dies of it.

Theory of operation. Memory **under pressure** (a warning of the detectors) gets advice alone:
recompute and offload save most and change no numbers, but they need a restart. Only where memory
is **about to run out** (a critical one) for `patience` steps in a row is the micro-batch halved,
at an unchanged global batch: the samples of a step are accumulated over twice as many
micro-batches, so the run learns the same at a lower speed. One move at a time, at most by a
factor of 2, never below 1, and after each the arbiter looks whether the memory in use has fallen;
if it has not, the move is taken back, since activations are not what fills the device, and not
tried again for `retry_after` steps.

Memory that is nearly full and grows steadily, so that it ends within `stop_within` steps, whatever
the micro-batch is (it was halved lately, or cannot be), ends the run: what is a leak dies anyway,
by a kernel that leaves no result and no word of why.

The micro-batch does not grow back by itself: what pressed the memory once is not known to be
over, and an out-of-memory ends a run while a small micro-batch only slows it. A restart with
recomputation brings it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mindtune.policies.decisions import (
    NO_CHANGE,
    Advise,
    Decision,
    RequestStop,
    SetMicroBatch,
)
from mindtune.policies.explanations import diagnose_leak, diagnose_memory
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.limits import KnobLimits
from mindtune.policies.policy import Feedback
from mindtune.policies.settings import PolicySettings, bounded, build
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class

__all__ = ["MemoryGuardLimits", "MemoryGuardPolicy", "MemoryGuardState", "MemoryGuardThresholds"]

_KNOB = SetMicroBatch.knob
_LARGEST = 1 << 24
_FACTOR = 2


@dataclass(frozen=True, kw_only=True)
class MemoryGuardLimits:
    """Hard bounds."""

    min_micro_batch_size: int = bounded(1, 1, 1 << 20)
    """Smallest micro-batch."""
    cooldown: int = bounded(32, 1, 100_000)
    """Steps between two moves: the memory must show the first one's effect."""
    budget: int = bounded(4, 1, 100)
    """Moves in 1000 steps: four halvings are a sixteenth."""


@dataclass(frozen=True, kw_only=True)
class MemoryGuardThresholds:
    """When it acts."""

    patience: int = bounded(2, 1, 1000)
    """Critical readings in a row before a move: one may be a transient of another process."""
    check_after: int = bounded(8, 4, 1000)
    """Steps over which the fall of the memory is taken."""
    full: float = bounded(0.95, 0.1, 1.0)
    """Share of the memory in use above which steady growth may end the run (`memory_full` of the
    detectors)."""
    stop_within: int = bounded(3, 1, 1000)
    """Steps left at which it does: one to end in, and two for a forecast that is off."""
    retry_after: int = bounded(1000, 1, 10_000_000)
    """Steps for which a move that freed nothing is not tried again: one window of the budget."""


@state_class(frozen=True, slots=True)
class MemoryGuardState:
    """How long memory has been short."""

    critical: int = 0
    """Critical readings in a row."""
    rest: int = 0
    """Steps until a move may be tried again."""


@dataclass(frozen=True)
class MemoryGuardPolicy:
    """Owner of `micro_batch_size`."""

    limits: MemoryGuardLimits = MemoryGuardLimits()
    thresholds: MemoryGuardThresholds = MemoryGuardThresholds()

    @classmethod
    def from_settings(cls, settings: PolicySettings) -> MemoryGuardPolicy:
        """Return the policy with the user's values."""
        return cls(
            build(MemoryGuardLimits, settings.limits, "policies.memory_guard.limits"),
            build(MemoryGuardThresholds, settings.thresholds, "policies.memory_guard.thresholds"),
        )

    @property
    def name(self) -> str:
        """Name in settings and records."""
        return "memory_guard"

    @property
    def knobs(self) -> Mapping[str, KnobLimits]:
        """What it may turn."""
        return MappingProxyType(
            {
                _KNOB: KnobLimits(
                    low=self.limits.min_micro_batch_size,
                    high=_LARGEST,
                    max_factor=_FACTOR,
                    cooldown=self.limits.cooldown,
                    budget=self.limits.budget,
                    check="memory",
                    check_after=self.thresholds.check_after,
                    settle=16,
                )
            }
        )

    def init(self) -> MemoryGuardState:
        """Return the state before the first step."""
        return MemoryGuardState()

    def decide(
        self,
        observation: Observation,
        findings: Sequence[Finding],
        feedback: Feedback,
        state: MemoryGuardState,
    ) -> tuple[Decision, MemoryGuardState]:
        """Return advice, a smaller micro-batch, a stop, or no change."""
        pressure = next(
            (found for found in findings if found.kind is FindingKind.MEMORY_PRESSURE), None
        )
        last = feedback.knobs.get(_KNOB)
        if last is not None and last.verdict == "undone" and last.step == observation.step:
            state = replace(state, rest=self.thresholds.retry_after)
        elif state.rest > 0:
            state = replace(state, rest=state.rest - 1)
        if pressure is None:
            return NO_CHANGE, state if state.critical == 0 else replace(state, critical=0)
        if pressure.severity is not Severity.CRITICAL:
            return self._advise(pressure, "memory-pressure", 0), replace(state, critical=0)
        following = replace(state, critical=min(state.critical + 1, self.thresholds.patience))
        if following.critical < self.thresholds.patience:
            return NO_CHANGE, following
        size = observation.micro_batch_size
        if size is None:
            size = feedback.facts.micro_batch_size or 0
        smaller = self._smaller(size, feedback.facts.micro_batch_size)
        helpless = smaller is None or state.rest > 0 or _KNOB not in feedback.facts.reachable
        lately = last is not None and 0 < observation.step - last.step < self.limits.cooldown
        if (helpless or lately) and self._ends(pressure):
            diagnosis = diagnose_leak(pressure, size)
            return (
                Decision(
                    actions=(RequestStop(id="memory-full", diagnosis=diagnosis),),
                    reason=pressure.message,
                    evidence={**pressure.evidence, "micro_batch_size": size},
                ),
                following,
            )
        if smaller is None or helpless:
            return self._advise(pressure, "memory-critical", size), following
        return (
            Decision(
                actions=(SetMicroBatch(smaller),),
                reason=f"{pressure.message} A micro-batch of {smaller} instead of {size} holds "
                "fewer activations; the global batch stays.",
                evidence={**pressure.evidence, "micro_batch_size": size},
            ),
            following,
        )

    def _ends(self, pressure: Finding) -> bool:
        """Return whether steady growth fills the memory within a few steps."""
        left = pressure.evidence.get("steps_left")
        return (
            isinstance(left, (int, float))
            and left <= self.thresholds.stop_within
            and pressure.number("share") >= self.thresholds.full
        )

    def _smaller(self, size: float, incoming: int | None) -> int | None:
        """Return the size nearest to a half that divides the incoming micro-batch, or None."""
        if not 1 < size < _LARGEST or size != int(size):
            return None
        samples = incoming or int(size)
        low = max(self.limits.min_micro_batch_size, -(-int(size) // _FACTOR))
        return next((value for value in range(low, int(size)) if samples % value == 0), None)

    def _advise(self, pressure: Finding, name: str, size: float) -> Decision:
        return Decision(
            actions=(Advise(id=name, message=diagnose_memory(pressure, size)),),
            reason=pressure.message,
            evidence=pressure.evidence,
        )
