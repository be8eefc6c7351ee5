"""How much of a study's time is used up, as its storage tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindtune.search.attributes import OUTCOME

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

__all__ = ["UNMEASURED", "span_s"]

UNMEASURED = frozenset({None, "interrupted", "infeasible", "duplicate", "withdrawn"})
"""Outcomes of trials that left no measurement."""


def span_s(trials: Sequence[FrozenTrial]) -> float:
    """Return the seconds during which at least one trial ran, those of killed ones excluded."""
    spans = sorted(
        (trial.datetime_start, trial.datetime_complete)
        for trial in trials
        if trial.user_attrs.get(OUTCOME) not in UNMEASURED
        and trial.datetime_start is not None
        and trial.datetime_complete is not None
    )
    total, until = 0.0, None
    for start, end in spans:
        begin = start if until is None else max(start, until)
        if end > begin:
            total += (end - begin).total_seconds()
            until = end
    return total
