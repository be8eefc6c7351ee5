"""What policies learn from the detectors' windows, and what of these survives a rewind."""

from __future__ import annotations

from dataclasses import replace

from mindtune.policies.detectors import DetectorState, DetectorThresholds
from mindtune.policies.detectors.cold_start import ColdStartState
from mindtune.policies.detectors.course import CourseState
from mindtune.policies.detectors.spike import SpikeState
from mindtune.policies.detectors.untrained import UntrainedState
from mindtune.policies.policy import Baseline
from mindtune.policies.windows import MAD_TO_SIGMA

__all__ = ["baseline_of", "rearmed"]

# As in the detectors' score: a very quiet signal has no smaller deviation.
_RELATIVE_FLOOR = 0.05
_ABSOLUTE_FLOOR = 1e-12


def baseline_of(state: SpikeState, thresholds: DetectorThresholds) -> Baseline | None:
    """Return median and deviation of a signal's unflagged samples, or None if they are too few."""
    window = state.window
    count = len(window)
    if count < thresholds.early_after:
        return None
    median = window.median()
    floor = max(_RELATIVE_FLOOR * abs(median), _ABSOLUTE_FLOOR)
    deviation = max(MAD_TO_SIGMA * window.mad(median), floor)
    return Baseline(
        median=median,
        deviation=deviation,
        samples=window.values,
        armed=count >= thresholds.arm_after,
    )


def rearmed(state: DetectorState, thresholds: DetectorThresholds) -> DetectorState:
    """Return the detectors' state for a run that has just returned to an earlier state.

    Rows of flags belong to the weights that were left behind. The baselines of loss and norm hold
    on, since flagged samples never entered them; but in the cold start, where nothing is flagged
    yet, they begin anew.
    """
    before = state.untrained
    state = replace(
        state, untrained=UntrainedState(before.first, before.lowest, batch=before.batch)
    )
    if state.cold_start.seen < thresholds.cold_end:
        return replace(
            state,
            loss=SpikeState(),
            grad_norm=SpikeState(),
            cold_start=ColdStartState(),
            course=CourseState(),
            rate_jump=replace(state.rate_jump, waits=0),
        )
    return replace(
        state,
        loss=SpikeState(window=state.loss.window),
        grad_norm=SpikeState(window=state.grad_norm.window),
        course=CourseState(),
        rate_jump=replace(state.rate_jump, waits=0),
    )
