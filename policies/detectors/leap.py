"""A loss that leaps between few records: logs with an interval, and runs resumed in the middle.

Theory of operation. The other rules need a baseline or the first steps of a run. A log that holds
every tenth step or fewer gives means over many steps, and a run that goes on after step
`cold_end` has settled: there a single record says more. A **leap** is a loss of `leap` times
everything in the newest 4 records, and above the newest of them by 4 times the largest distance
between any two neighbours of the newest 8. It is a warning, since one step may be an outlier; one
of the next two records at that height makes it critical. A level below `_SCALE` (a loss that may
scatter around zero) needs 4 records that say how it scatters.
"""

from __future__ import annotations

from itertools import pairwise

from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import push

__all__ = ["LeapState", "judge_leap"]

_INTERVAL = 10
_KEPT, _LEVEL = 8, 4
_OF_DISTANCE = 4.0
_SCALE = 0.5
_KNOWN = 4
_CONFIRM = 2


@state_class(frozen=True, slots=True)
class LeapState:
    """The newest records, and the leap that waits for a second one."""

    losses: tuple[float, ...] = ()
    """Newest finite losses that are part of no leap."""
    first_step: int = -1
    """Step of the first record."""
    level: float = 0.0
    """Highest loss before the leap."""
    waits: int = 0
    """Records that may still confirm it."""


def judge_leap(
    observation: Observation,
    loss: float,
    interval: int,
    armed: bool,
    state: LeapState,
    thresholds: DetectorThresholds,
) -> tuple[tuple[Finding, ...], LeapState]:
    """Return the finding that the loss leaps from record to record, and the next state.

    Args:
        observation: The step.
        loss: Its loss, finite.
        interval: Steps since the record before.
        armed: Whether the baseline of the loss is armed.
        state: State before the step.
        thresholds: When to report.
    """
    first = observation.step if state.first_step < 0 else state.first_step
    if interval < _INTERVAL and (first <= thresholds.cold_end or armed):
        return (), state if state.first_step >= 0 and not state.losses else LeapState((), first)
    if state.waits and loss >= thresholds.leap * state.level:
        finding = _finding(observation, loss, state.level, thresholds, Severity.CRITICAL)
        return (finding,), LeapState(state.losses, first, state.level, _CONFIRM)
    if not state.waits and _leaps(state.losses, loss, thresholds):
        level = max(state.losses[-_LEVEL:])
        finding = _finding(observation, loss, level, thresholds, Severity.WARNING)
        return (finding,), LeapState(state.losses, first, level, _CONFIRM)
    waits = max(0, state.waits - 1)
    return (), LeapState(push(state.losses, loss, _KEPT), first, state.level, waits)


def _leaps(earlier: tuple[float, ...], loss: float, thresholds: DetectorThresholds) -> bool:
    if not earlier or min(earlier) <= 0.0:
        return False
    level = max(earlier[-_LEVEL:])
    if loss < thresholds.leap * level or loss <= max(earlier):
        return False
    if level < _SCALE and len(earlier) < _KNOWN:
        return False
    largest = max((abs(later - before) for before, later in pairwise(earlier)), default=0.0)
    return loss - earlier[-1] >= _OF_DISTANCE * largest


def _finding(
    observation: Observation,
    loss: float,
    level: float,
    thresholds: DetectorThresholds,
    severity: Severity,
) -> Finding:
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.DIVERGENCE,
        severity=severity,
        message=f"the loss leapt from at most {level:.4g} to {loss:.4g} between few records.",
        evidence={
            "cold_start": 0,
            "pattern": "leap",
            "loss": loss,
            "median": level,
            "threshold": thresholds.leap,
        },
    )
