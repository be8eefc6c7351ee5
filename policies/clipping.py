"""Clips to the baseline of the gradient norm while a burst lasts: owns the clip norm.

Theory of operation. Clipping is the soft answer between a lower learning rate and a skipped
update. ZClip, AutoClip and OLMo adapt the threshold to the norm at all times, from means that the
spikes themselves move (ZClip's warm-up lets a tenfold norm pass after one outlier) and that a
legal shift of the level is clipped against for ever. Here the baseline is the detectors' median
and median absolute deviation of the unflagged samples, and the user's threshold holds at all
times but in a burst.

A **burst** is a gradient norm that is flagged `patience` times in a row, or `rate` times within
the detectors' window, more often than chance explains in this run (`outliers`), while the loss is
out of line as well (or not measured): a norm that moves alone is a shift of the level, which is no
fault, and in a run whose tails are heavy single spikes are none. In a burst the norm is clipped to

    median + deviations * deviation,

the limit at which the detectors flag, so that no usual step is clipped; never above the user's
own threshold, and not at all where that is below it already. The clip is **released** to the
user's value when the level is declared to have shifted, or `calm` steps after the last flag. In a
run without clipping the user's value is infinity, and so the policy does nothing there but in a
burst.

A clip that always clips is a hidden learning rate. The policy does not change what the user has
set for good, so it only advises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mindtune.policies.decisions import NO_CHANGE, Advise, Decision, SetClipNorm
from mindtune.policies.explanations import diagnose_clip_saturation
from mindtune.policies.findings import Finding, FindingKind
from mindtune.policies.limits import KnobLimits
from mindtune.policies.policy import Feedback, KnobFeedback
from mindtune.policies.settings import PolicySettings, bounded, build
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class

__all__ = ["ClippingLimits", "ClippingPolicy", "ClippingState", "ClippingThresholds"]

_KNOB = SetClipNorm.knob
_ANY_FACTOR = 1e60


@dataclass(frozen=True, kw_only=True)
class ClippingLimits:
    """Hard bounds."""

    min_clip_norm: float = bounded(1e-6, 1e-30, 1e6)
    """Smallest threshold."""
    cooldown: int = bounded(4, 1, 10_000)
    """Steps between two moves."""
    budget: int = bounded(16, 1, 1000)
    """Moves in 1000 steps: eight bursts."""


@dataclass(frozen=True, kw_only=True)
class ClippingThresholds:
    """When it acts, and how strongly."""

    patience: int = bounded(3, 1, 100)
    """Flags of the norm in a row that make a burst: as many as chance does not make in a run that
    had none before."""
    rate: int = bounded(6, 2, 52)
    """Flags within the detectors' window that make one."""
    deviations: float = bounded(6.0, 2.0, 1000.0)
    """Robust deviations above the median to which the norm is clipped: the detectors' own limit,
    and OLMo-core's."""
    loss_within: int = bounded(4, 0, 1000)
    """Steps back in which the loss must have been flagged: the update of a spike shows in the
    loss of the next batches."""
    calm: int = bounded(64, 4, 100_000)
    """Steps without a flag before the user's value acts again: longer than the window in which
    flags are counted."""


@state_class(frozen=True, slots=True)
class ClippingState:
    """Whether a burst is being clipped."""

    user: float | None = None
    """The user's threshold; None: nothing was changed."""
    calm: int = 0
    """Steps in a row without a flag of the norm."""
    since_loss: int = 1_000_000
    """Steps since the loss was flagged."""


@dataclass(frozen=True)
class ClippingPolicy:
    """Owner of `clip_norm`."""

    limits: ClippingLimits = ClippingLimits()
    thresholds: ClippingThresholds = ClippingThresholds()

    @classmethod
    def from_settings(cls, settings: PolicySettings) -> ClippingPolicy:
        """Return the policy with the user's values."""
        return cls(
            build(ClippingLimits, settings.limits, "policies.clipping.limits"),
            build(ClippingThresholds, settings.thresholds, "policies.clipping.thresholds"),
        )

    @property
    def name(self) -> str:
        """Name in settings and records."""
        return "clipping"

    @property
    def knobs(self) -> Mapping[str, KnobLimits]:
        """What it may turn."""
        return MappingProxyType(
            {
                _KNOB: KnobLimits(
                    low=self.limits.min_clip_norm,
                    high=1e30,
                    max_factor=_ANY_FACTOR,
                    cooldown=self.limits.cooldown,
                    budget=self.limits.budget,
                    check="loss",
                    check_after=16,
                    off=math.inf,
                )
            }
        )

    def init(self) -> ClippingState:
        """Return the state before the first step."""
        return ClippingState()

    def decide(
        self,
        observation: Observation,
        findings: Sequence[Finding],
        feedback: Feedback,
        state: ClippingState,
    ) -> tuple[Decision, ClippingState]:
        """Return a tighter clip, the user's, advice, or no change."""
        found = {finding.kind: finding for finding in findings}
        spike = found.get(FindingKind.GRAD_NORM_SPIKE)
        off_line = FindingKind.LOSS_SPIKE in found or FindingKind.DIVERGENCE in found
        state = ClippingState(
            state.user,
            0 if spike is not None else min(state.calm + 1, self.thresholds.calm),
            0 if off_line else min(state.since_loss + 1, 1_000_000),
        )
        if state.user is not None:
            return self._release(observation, found, feedback.knobs.get(_KNOB), state)
        saturation = found.get(FindingKind.CLIP_SATURATION)
        if saturation is not None:
            return self._advise(saturation), state
        if spike is None or FindingKind.LEVEL_SHIFT in found:
            return NO_CHANGE, state
        return self._tighten(observation, spike, feedback, state)

    def _tighten(
        self,
        observation: Observation,
        spike: Finding,
        feedback: Feedback,
        state: ClippingState,
    ) -> tuple[Decision, ClippingState]:
        user, baseline = observation.clip_norm, feedback.grad_norm
        lasts = spike.number("burst") == 1 and (
            spike.number("consecutive") >= self.thresholds.patience
            or spike.number("count") >= self.thresholds.rate
        )
        agrees = observation.loss is None or state.since_loss <= self.thresholds.loss_within
        if user is None or not user > 0 or baseline is None or not (lasts and agrees):
            return NO_CHANGE, state
        value = baseline.median + self.thresholds.deviations * baseline.deviation
        if not (baseline.armed and self.limits.min_clip_norm <= value < user):
            return NO_CHANGE, state
        return (
            Decision(
                actions=(SetClipNorm(value),),
                reason=f"{spike.message} Until it is over the norm is clipped to {value:.4g}, "
                "below which all usual ones are.",
                evidence={**spike.evidence, "clip_norm": user},
            ),
            # Out of reach nothing acts, so there is nothing to release.
            replace(state, user=user) if _KNOB in feedback.facts.reachable else state,
        )

    def _release(
        self,
        observation: Observation,
        found: Mapping[FindingKind, Finding],
        last: KnobFeedback | None,
        state: ClippingState,
    ) -> tuple[Decision, ClippingState]:
        """Ask for the user's value again when the burst is over, until it is granted."""
        user = state.user
        refused = last is not None and last.verdict == "refused" and observation.clip_norm == user
        if user is None or refused or (last is not None and last.granted == user):
            return NO_CHANGE, replace(state, user=None)
        if last is not None and last.verdict == "undone" and last.step == observation.step:
            return NO_CHANGE, replace(state, calm=0)
        level = found.get(FindingKind.LEVEL_SHIFT)
        shifted = level is not None and level.evidence.get("pattern") != "climb"
        if not shifted and state.calm < self.thresholds.calm:
            return NO_CHANGE, state
        why = "the level has shifted" if shifted else f"no spike for {state.calm} steps"
        return (
            Decision(
                actions=(SetClipNorm(user),),
                reason=f"{why}: back to the clip norm of the run",
                evidence={"clip_norm": user, "calm": state.calm},
            ),
            replace(state, calm=self.thresholds.calm),
        )

    def _advise(self, saturation: Finding) -> Decision:
        text = diagnose_clip_saturation(saturation)
        return Decision(
            actions=(Advise(id="clip-saturation", message=text),),
            reason=saturation.message,
            evidence=saturation.evidence,
        )
