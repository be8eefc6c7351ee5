"""What policies learn from the detectors' windows, and what of these survives a rewind."""

from __future__ import annotations

from dataclasses import replace

from mindtune.policies.detectors import DetectorState, DetectorThresholds
from mindtune.policies.detectors.cold_start import ColdStartState
from mindtune.policies.detectors.course import CourseState
from mindtune.policies.detectors.spike import SpikeState
from mindtune.policies.detectors.untrained import UntrainedState
from mindtune.policies.policy import Baseline

__all__ = ["baseline_of", "rearmed"]


def baseline_of(state: SpikeState, thresholds: DetectorThresholds) -> Baseline | None:
    """Return what is usual for a signal, or None if its unflagged samples are too few."""
    window = state.window
    count = len(window)
    if count < thresholds.early_after:
        return None
    return Baseline(window, armed=count >= thresholds.arm_after)


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
