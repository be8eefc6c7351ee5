"""A loss scale outside of the range in which it is of any use.

Theory of operation. A scale that grows above `runaway` gains nothing there and ends in infinity;
one that is infinite or no number at all makes every gradient so. Below `soft_floor` gradients are
scaled *down*: float16 overflows without any scaling, and the scale is about to leave its hardware
range; below `hard_floor` no training is known to go on. Each is reported once, until the scale is
back, and whether or not the log tells the overflows that led there. A scale that a log prints as 0
has fallen below what it prints; a negative one means that there is none.
"""

from __future__ import annotations

import math

from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class

__all__ = ["ScaleRangeState", "judge_scale_range"]


@state_class(frozen=True, slots=True)
class ScaleRangeState:
    """What was reported."""

    scale: float | None = None
    """Finite scale of the step before."""
    ran_away: bool = False
    """Whether the runaway was reported."""
    broken: bool = False
    """Whether a scale that is not finite was reported."""
    sunk: int = 0
    """1: that the scale is below the soft floor was reported; 2: below the hard one."""


def judge_scale_range(
    observation: Observation, state: ScaleRangeState, thresholds: DetectorThresholds
) -> tuple[tuple[Finding, ...], ScaleRangeState]:
    """Return the findings about the height of the loss scale, and the next state."""
    scale = observation.loss_scale
    if scale is None or scale == state.scale or scale < 0:
        return (), state
    if not math.isfinite(scale):
        following = ScaleRangeState(state.scale, True, True, state.sunk)
        return (() if state.broken else (_broken(observation, scale),)), following
    if scale > thresholds.runaway:
        grew = state.scale is not None and scale > state.scale
        following = ScaleRangeState(scale, state.ran_away or grew, False, 0)
        if not grew or state.ran_away:
            return (), following
        return (_ran_away(observation, scale, thresholds),), following
    depth = 0
    if scale < thresholds.soft_floor:
        depth = 2 if scale <= thresholds.hard_floor else 1
    following = ScaleRangeState(
        scale, state.ran_away, False, max(depth, state.sunk) if depth else 0
    )
    # A scale that overflows there is reported as such.
    if depth <= state.sunk or observation.overflow:
        return (), following
    return (_sunk(observation, scale, depth, thresholds),), following


def _broken(observation: Observation, scale: float) -> Finding:
    return _finding(
        observation,
        FindingKind.LOSS_SCALE_RUNAWAY,
        Severity.CRITICAL,
        f"the loss scale is {scale}: every scaled gradient is infinite or no number.",
        {"loss_scale": scale},
    )


def _ran_away(observation: Observation, scale: float, thresholds: DetectorThresholds) -> Finding:
    return _finding(
        observation,
        FindingKind.LOSS_SCALE_RUNAWAY,
        Severity.WARNING,
        f"the loss scale grew to {scale:g}, above {thresholds.runaway:g}: it gains nothing there "
        "and ends in infinity.",
        {"loss_scale": scale, "threshold": thresholds.runaway},
    )


def _sunk(
    observation: Observation, scale: float, depth: int, thresholds: DetectorThresholds
) -> Finding:
    limit = thresholds.hard_floor if depth == 2 else thresholds.soft_floor
    return _finding(
        observation,
        FindingKind.LOSS_SCALE_FLOOR,
        Severity.CRITICAL if depth == 2 else Severity.WARNING,
        f"the loss scale has fallen to {scale:g}, below {limit:g}: gradients overflow float16 "
        "without any scaling, so it cannot help any more.",
        {"loss_scale": scale, "threshold": limit, "consecutive": 0},
    )


def _finding(
    observation: Observation,
    kind: FindingKind,
    severity: Severity,
    message: str,
    evidence: dict[str, float | int | str | None],
) -> Finding:
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=kind,
        severity=severity,
        message=message,
        evidence=evidence,
    )
