"""A run that has forgotten what it knew: the loss is back where it was before the first update.

Theory of operation. One update at a poisoned gradient can take the weights to a place from which
there is no way back: the loss jumps to that of uniform guesses, or above, and stays. Nothing rises
there any more, so it is no divergence by the other rules, and after `rebase_after` steps it would
pass for a new level. But data and schedule do not bring a loss back to where nothing was learnt,
and where they do (a new task), it falls at once. So it is reported when

- the level of the loss (median of its baseline) was once at `_LEARNT` of the first loss or below;
- a row of at least `_ROW` losses that began as outliers, or where there is no baseline yet, stands
  at the first loss or above;
- the newer half of the newest `_ROW` does not stand below the older one.

The first loss is the median of the first three. One below `_SCALE` may scatter around zero, and
one that is summed over samples follows the batch, so that with another batch the rule begins anew.
"""

from __future__ import annotations

import math

from mindtune.policies.detectors.spike import Judgement
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import median, push

__all__ = ["UNTRAINED", "UntrainedState", "judge_untrained"]

UNTRAINED = "untrained again"
"""Pattern in the evidence of such a divergence."""
_FIRST = 3
_ROW = 8
_LEARNT = 0.7
_FALLS = 0.97
_SCALE = 0.5
_LONG = 1_000_000


@state_class(frozen=True, slots=True)
class UntrainedState:
    """What the loss was like before anything was learnt, and how long it has been so again."""

    first: tuple[float, ...] = ()
    """First losses."""
    lowest: float = math.inf
    """Lowest level since then."""
    row: int = 0
    """Losses in a row that are no lower than the first."""
    newest: tuple[float, ...] = ()
    """Newest losses of the row."""
    batch: float | None = None
    """Global batch that all these belong to."""


def judge_untrained(
    observation: Observation, loss: float, judgement: Judgement, state: UntrainedState
) -> tuple[tuple[Finding, ...], UntrainedState]:
    """Return the finding that the run is untrained again, and the next state.

    Args:
        observation: The step.
        loss: Its loss, finite.
        judgement: The verdict over it as a spike.
        state: State before the step.
    """
    batch: float | None = observation.global_batch_size
    if batch is None or not batch > 0:
        batch = state.batch
    elif state.batch not in (None, batch):
        state = UntrainedState()
    if len(state.first) < _FIRST:
        return (), UntrainedState((*state.first, loss), state.lowest, batch=batch)
    first, lowest = median(state.first), state.lowest
    if judgement.deviation > 0.0:
        lowest = min(lowest, judgement.median)
    begins = bool(judgement.held) or judgement.deviation == 0.0
    if loss < first or not (state.row or begins):
        if lowest == state.lowest and batch == state.batch and not (state.row or state.newest):
            return (), state
        return (), UntrainedState(state.first, lowest, batch=batch)
    newest = push(state.newest, loss, _ROW)
    row = min(state.row + 1, _LONG)
    following = UntrainedState(state.first, lowest, row, newest, batch)
    half = _ROW // 2
    if (
        row < _ROW
        or first < _SCALE
        or lowest > _LEARNT * first
        or median(newest[half:]) < _FALLS * median(newest[:half])
    ):
        return (), following
    level = median(newest)
    finding = Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.DIVERGENCE,
        severity=Severity.CRITICAL,
        message=f"the loss, which was at {lowest:.4g}, has stood at {level:.4g} for {row} steps, "
        f"no lower than in the first ones ({first:.4g}): nothing is left of what was learnt.",
        evidence={
            "cold_start": 0,
            "pattern": UNTRAINED,
            "loss": level,
            "median": lowest,
            "threshold": first,
            "consecutive": row,
        },
    )
    return (finding,), following
