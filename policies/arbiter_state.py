"""What the arbiter remembers between steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field

from mindtune.policies.decisions import KNOBS, SetBatchSize, SetMicroBatch
from mindtune.policies.policy import KnobFeedback
from mindtune.policies.records import ActionRecord
from mindtune.policies.state import ADDED
from mindtune.policies.state_class import state_class

__all__ = ["ArbiterState", "KnobState", "Pending"]

_COUNTS = frozenset({SetBatchSize.knob, SetMicroBatch.knob})


@state_class(frozen=True, kw_only=True, slots=True)
class Pending:
    """A granted set-point whose effect or outcome is still awaited."""

    record: ActionRecord
    """As given out last; given out again when `acted` or `outcome` is known."""
    since: int
    """Clock of the grant."""
    value: float
    """What was granted, in the policy's own unit."""
    before: float | None
    """What acted before, in the policy's own unit; None if no step reported it."""
    judged: bool
    """False: only the effect is awaited, no outcome."""
    baseline: float | None
    """Median of the judged signal before the grant; None: too few samples."""
    spread: float
    """Robust standard deviation of the judged signal before the grant."""
    effective: bool = False
    """Whether a step has reported the granted value."""
    mismatches: int = 0
    """Steps that reported another value."""
    samples: tuple[float, ...] = ()
    """The judged signal since it took effect."""

    def contradiction(self) -> str | None:
        """Return why no run can have stored this; None if one can."""
        if not self.value >= 0.0 or not (self.before is None or self.before >= 0.0):
            return f"no knob goes from {self.before} to {self.value}"
        if not math.isfinite(self.spread) or not math.isfinite(self.baseline or 0.0):
            return f"baseline and spread must be finite, but are {self.baseline}, {self.spread}"
        return None


@state_class(frozen=True, kw_only=True, slots=True)
class KnobState:
    """One knob's history, as far as it matters for the next request."""

    last_grant: int | None = None
    """Clock of the last grant, or of what would have been one in observe mode."""
    grants: tuple[int, ...] = ()
    """Clocks of the grants that count against the budget."""
    blocked_until: int = 0
    """Clock before which nothing is granted, since the knob did not obey."""
    feedback: KnobFeedback | None = None
    pending: Pending | None = None
    refusal: str = ""
    """Kind of the last recorded refusal: the same one is not recorded again and again."""
    refusal_clock: int = 0
    blocks: int = field(default=0, metadata={ADDED: True})
    """How often in a row it was found ineffective."""


@state_class(frozen=True, kw_only=True, slots=True)
class ArbiterState:
    """State of the second stage."""

    clock: int = 0
    """Steps lived through: grows with every observation, also where `step` goes back."""
    last_step: int = -1
    """Step of the last observation; -1 before the first."""
    losses: tuple[float, ...] = ()
    """Newest finite losses."""
    throughputs: tuple[float, ...] = ()
    """Newest tokens per second."""
    base_batch: float | None = None
    """Batch to which the schedule's learning rate belongs; None: it was never resized."""
    batch_factor: float = 1.0
    """Factor that the learning-rate rule gives to the batch that was granted."""
    knobs: Mapping[str, KnobState] = field(default_factory=dict)
    events: tuple[str, ...] = ()
    """Newest ids of events that were recorded: an event happens once."""
    history: tuple[str, ...] = ()
    """Newest actions in words, for the diagnosis of a stop; guards and advice left out."""
    rewound_step: int | None = None
    """Step at which the last return to an earlier state was granted."""

    def contradiction(self) -> str | None:
        """Return why no run can have stored this; None if one can."""
        if not 0.0 < self.batch_factor < math.inf:
            return f"batch_factor must be finite and above 0, but is {self.batch_factor}"
        if self.base_batch is not None and not 0.0 < self.base_batch < math.inf:
            return f"base_batch must be finite and above 0, but is {self.base_batch}"
        unknown = sorted(set(self.knobs) - set(KNOBS))
        if unknown:
            return f"there is no knob {', '.join(unknown):.80}"
        for knob, entry in self.knobs.items():
            newest = max(entry.last_grant or 0, *entry.grants, entry.refusal_clock)
            if newest > self.clock:
                return f"{knob} was turned at clock {newest}, but it is {self.clock}"
            if knob in _COUNTS and entry.pending is not None:
                pending = entry.pending
                numbers = (pending.value, pending.before, pending.baseline)
                if not all(number is None or 0.0 < number < math.inf for number in numbers):
                    return f"{knob} and what it is judged by must be finite and above 0"
        return None
