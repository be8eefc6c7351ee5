"""What a diagnosis is: a symptom, one cause of it, and what speaks for and against that cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

__all__ = ["DECISIVE", "STRONG", "WEAK", "Clues", "Confidence", "Diagnosis", "Symptom"]

WEAK, STRONG, DECISIVE = 1, 2, 4
"""How much one fact weighs: one that fits several causes, one that fits few, one that alone
settles it. A decisive fact outweighs a strong one that points elsewhere."""


class Symptom(str, Enum):
    """What a person would complain of; the values are part of the file formats."""

    LOSS_NOT_FALLING = "loss_not_falling"
    LOSS_SPIKES = "loss_spikes"
    DIVERGENCE = "divergence"
    NON_FINITE = "non_finite"
    OVERFLOWS = "overflows"
    MEMORY = "memory"
    SLOW_STEPS = "slow_steps"
    HANG = "hang"
    LOW_MFU = "low_mfu"
    ODD_GRADIENT = "odd_gradient"
    HIDDEN_STEPS = "hidden_steps"
    WRONG_FIGURE = "wrong_figure"
    ATTENTION_MISSING = "attention_missing"
    UNRULY_KNOB = "unruly_knob"


class Confidence(str, Enum):
    """How sure a cause is, from the surest to the least sure."""

    NEARLY_CERTAIN = "nearly certain"
    LIKELY = "likely"
    POSSIBLE = "possible"
    CANNOT_BE_TOLD = "cannot be told"
    """Nothing was measured that speaks for or against it."""
    UNLIKELY = "unlikely"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One cause that a symptom may have."""

    symptom: Symptom
    step: int
    """First step of the symptom."""
    last_step: int
    """Its last one."""
    cause: str
    """Key of the cause, the same in every version, such as `learning_rate_too_high`."""
    statement: str
    """The cause as a sentence without a full stop."""
    confidence: Confidence
    evidence_for: tuple[str, ...]
    """Facts with their numbers and steps that speak for the cause."""
    evidence_against: tuple[str, ...]
    """The same against it."""
    missing: tuple[str, ...]
    """What to measure to know, and what it would tell."""
    next_steps: tuple[str, ...]
    """What to do if it is this cause, in order."""


@dataclass
class Clues:
    """What a rule has gathered about one cause."""

    evidence_for: list[str] = field(default_factory=list)
    evidence_against: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    weight_for: int = 0
    weight_against: int = 0

    def speaks(self, text: str, weight: int = WEAK) -> None:
        """Note a fact for the cause."""
        self.evidence_for.append(text)
        self.weight_for += weight

    def denies(self, text: str, weight: int = WEAK) -> None:
        """Note a fact against the cause."""
        self.evidence_against.append(text)
        self.weight_against += weight

    def lacks(self, text: str) -> None:
        """Note what was not measured, and what it would have told."""
        self.missing.append(text)

    @property
    def confidence(self) -> Confidence | None:
        """How sure the cause is; None: there is nothing to say of it at all."""
        if not self.evidence_for:
            if self.evidence_against:
                return Confidence.UNLIKELY
            return Confidence.CANNOT_BE_TOLD if self.missing else None
        score = self.weight_for - self.weight_against
        if score >= DECISIVE:
            return Confidence.NEARLY_CERTAIN
        if score >= STRONG:
            return Confidence.LIKELY
        return Confidence.POSSIBLE if score >= WEAK else Confidence.UNLIKELY
