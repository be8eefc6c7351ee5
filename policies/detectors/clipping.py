"""A clip that always clips is a hidden learning rate."""

from __future__ import annotations

import math

from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class

__all__ = ["ClippingState", "judge_clipping"]


@state_class(frozen=True, slots=True)
class ClippingState:
    """Which of the newest steps were clipped."""

    bits: int = 0
    """One bit per step, the newest lowest."""
    seen: int = 0
    """Steps with a norm and a clip threshold, up to the window."""
    reported: bool = False
    """Whether the present saturation was reported: it is one finding, not one per step."""


def judge_clipping(
    observation: Observation,
    median_norm: float | None,
    state: ClippingState,
    thresholds: DetectorThresholds,
) -> tuple[tuple[Finding, ...], ClippingState]:
    """Return the finding that nearly all steps are clipped hard, and the next state.

    Args:
        observation: The step.
        median_norm: Baseline of the gradient norm.
        state: State before the step.
        thresholds: When to report.
    """
    norm, clip = observation.grad_norm, observation.clip_norm
    if norm is None or clip is None or not (math.isfinite(norm) and math.isfinite(clip)):
        return (), state
    if clip <= 0:
        return (), state
    mask = (1 << thresholds.clip_window) - 1
    bits = ((state.bits << 1) | int(norm > clip)) & mask
    seen = min(state.seen + 1, thresholds.clip_window)
    share = bits.bit_count() / thresholds.clip_window
    saturated = (
        seen == thresholds.clip_window
        and share >= thresholds.clip_share
        and median_norm is not None
        and median_norm > thresholds.clip_ratio * clip
    )
    if (bits, seen, saturated) == (state.bits, state.seen, state.reported):
        return (), state
    following = ClippingState(bits, seen, saturated)
    if not saturated or state.reported:
        return (), following
    finding = Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.CLIP_SATURATION,
        severity=Severity.WARNING,
        message=f"{share:.0%} of the last {thresholds.clip_window} steps were clipped, and the "
        f"median norm {median_norm:.4g} is far above the threshold {clip:g}: the clip sets the "
        "step size, not the learning rate.",
        evidence={"share": share, "median": median_norm, "clip_norm": clip},
    )
    return (finding,), following
