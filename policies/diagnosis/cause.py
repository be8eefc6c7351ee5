"""A cause that a symptom may have: what is said of it, and the rule that weighs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mindtune.policies.diagnosis.case import Case
from mindtune.policies.diagnosis.model import Clues, Diagnosis

__all__ = ["Cause", "judge"]


@dataclass(frozen=True)
class Cause:
    """One cause of a symptom."""

    key: str
    statement: str
    next_steps: tuple[str, ...]
    weigh: Callable[[Case, Clues], None]
    """Gathers what speaks for and against it; gathers nothing where it has nothing to say."""


def judge(case: Case, cause: Cause) -> Diagnosis | None:
    """Return how sure a cause of a symptom is; None where nothing can be said of it."""
    clues = Clues()
    cause.weigh(case, clues)
    confidence = clues.confidence
    if confidence is None:
        return None
    return Diagnosis(
        symptom=case.symptom,
        step=case.first,
        last_step=case.last,
        cause=cause.key,
        statement=cause.statement,
        confidence=confidence,
        evidence_for=tuple(clues.evidence_for),
        evidence_against=tuple(clues.evidence_against),
        missing=tuple(clues.missing),
        next_steps=cause.next_steps,
    )
