"""What policies may ask for: a closed union of actions, and the decision that carries them.

Set-points are absolute, so a refused or lost one heals on the next step, and one that equals the
acting value is no action. Events are idempotent by `id`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mindtune.policies.errors import PolicyError
from mindtune.policies.findings import Evidence

__all__ = [
    "EVENTS",
    "GUARDS",
    "KNOBS",
    "NO_CHANGE",
    "SET_POINTS",
    "Action",
    "Advise",
    "Decision",
    "Event",
    "RequestStop",
    "Rewind",
    "SetBatchSize",
    "SetClipNorm",
    "SetCompressionRatio",
    "SetLearningRateScale",
    "SetLossScale",
    "SetMicroBatch",
    "SetPoint",
    "SetSkipThreshold",
]


@dataclass(frozen=True)
class SetLearningRateScale:
    """Multiply the schedule's learning rate by `value`; 1 is the schedule itself."""

    value: float
    knob: ClassVar[str] = "learning_rate_scale"


@dataclass(frozen=True)
class SetLossScale:
    """Use `value` as the loss scale from the next step on."""

    value: float
    knob: ClassVar[str] = "loss_scale"


@dataclass(frozen=True)
class SetBatchSize:
    """Train with `value` samples per optimizer step over all ranks, at a fixed micro-batch."""

    value: int
    knob: ClassVar[str] = "global_batch_size"


@dataclass(frozen=True)
class SetMicroBatch:
    """Train with `value` samples per rank and micro-batch, at a fixed global batch."""

    value: int
    knob: ClassVar[str] = "micro_batch_size"


@dataclass(frozen=True)
class SetClipNorm:
    """Clip the gradient to a global norm of `value`; infinity switches clipping off."""

    value: float
    knob: ClassVar[str] = "clip_norm"


@dataclass(frozen=True)
class SetSkipThreshold:
    """Skip, inside the step, every update whose gradient norm is above `value`; infinity: none."""

    value: float
    knob: ClassVar[str] = "skip_threshold"


@dataclass(frozen=True)
class SetCompressionRatio:
    """Exchange this share of the gradient entries (top-k compression), in (0, 1]."""

    value: float
    knob: ClassVar[str] = "compression_ratio"


@dataclass(frozen=True)
class Rewind:
    """Return to the last healthy state and pass over the data since then."""

    id: str
    reason: str


@dataclass(frozen=True)
class RequestStop:
    """End the run in good order; `diagnosis` names cause, evidence and what to do next."""

    id: str
    diagnosis: str


@dataclass(frozen=True)
class Advise:
    """Tell the user what the policy may not or cannot do itself."""

    id: str
    message: str


SetPoint = (
    SetLearningRateScale
    | SetLossScale
    | SetBatchSize
    | SetMicroBatch
    | SetClipNorm
    | SetSkipThreshold
    | SetCompressionRatio
)
Event = Rewind | RequestStop | Advise
Action = SetPoint | Event

SET_POINTS: tuple[type[SetPoint], ...] = (
    SetLearningRateScale,
    SetLossScale,
    SetBatchSize,
    SetMicroBatch,
    SetClipNorm,
    SetSkipThreshold,
    SetCompressionRatio,
)
EVENTS: tuple[type[Event], ...] = (Rewind, RequestStop, Advise)

GUARDS: tuple[type[SetPoint], ...] = (SetSkipThreshold,)
"""Set-points that change nothing in a run by themselves: they only say what the device is to
refuse. A healthy run gets them and no other."""

KNOBS: dict[str, type[SetPoint]] = {action.knob: action for action in SET_POINTS}
"""Live knobs by the name of the signal in which the step reports the value that acted."""


@dataclass(frozen=True)
class Decision:
    """The actions that a policy asks for at one step, with the reason and the evidence.

    Raises:
        PolicyError: if actions come without a reason.
    """

    actions: tuple[Action, ...] = ()
    reason: str = ""
    evidence: Evidence = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.actions and not self.reason.strip():
            raise PolicyError(
                f"a decision with actions must state its reason, but got {self.actions!r} "
                "without one; say what was seen, against which threshold."
            )


NO_CHANGE = Decision()
"""The decision to leave everything as it is."""
