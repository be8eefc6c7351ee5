"""Lowers the learning-rate scale on trouble, and brings it back when the trouble is over.

Theory of operation. Trouble is one of

- an **explosion in the cold start**: the loss climbs above its own first values. The rate is far
  too high, by an unknown factor, so it is cut by `cold_factor` at once, and again every
  `cold_patience` steps while the loss neither returns to its old minimum nor falls;
- a **jump of the learning rate** which the loss answers: as in the cold start, and whatever comes
  of the loss, since the cause is known;
- a **divergence**: the loss stands above its baseline and still rises;
- **persistent spikes**: the gradient norm is flagged `patience` times in a row, or `rate` times
  within the detectors' window, and the loss agrees: it is flagged as often and does not fall, and
  one of the two is a burst, which counts more spikes than this run is used to; or the loss is
  flagged twice as long and has grown by half since it left its baseline. Without a loss the norm
  must be `norm_ratio` times its median. Where some batches are harder than others (one in ten of
  another source, one task of several), spikes of both signals are what is usual.

These cut the scale by `factor`, at most once in `patience_after_cut` steps. What is no trouble: a
single spike, a norm that moves to another level while the loss is fine, a loss that jumped once
and is coming down, anything in the first steps of a warm-up that the loss does not confirm, and
nothing at all in a step whose update was skipped, since no rate acted in it. A non-finite loss is
not cured by a lower rate (the weights are gone, or the batch was bad): after `stop_after` in a row
the run is ended with a diagnosis, as it is when the loss is frozen while every update is skipped.

After a **rewind** the rate is cut by `factor`, unless it was cut within the last
`patience_after_cut` steps: the same state with the same rate would take the same way.

After `recover_after` steps without trouble the scale is raised by 1 / `factor`, up to 1, the
schedule itself; the arbiter takes back a raise after which the loss is worse. A raise that was
taken back, or that trouble follows, multiplies the stretch before the next one by
`relapse_factor`. After a cold start the stretch is `recover_after_cold`: the schedule itself is
suspect there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mindtune.policies.decisions import (
    NO_CHANGE,
    Advise,
    Decision,
    SetLearningRateScale,
)
from mindtune.policies.detectors.rate_jump import RATE_JUMP
from mindtune.policies.explanations import diagnose_floor_of_learning_rate, stop_dead_run
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.gradient_norm_settings import (
    GradientNormLimits,
    GradientNormState,
    GradientNormThresholds,
)
from mindtune.policies.limits import KnobLimits
from mindtune.policies.policy import Feedback
from mindtune.policies.settings import PolicySettings, build
from mindtune.policies.signals import Observation
from mindtune.policies.windows import median, push

__all__ = ["GradientNormPolicy"]

_KNOB = SetLearningRateScale.knob
_LEVEL = 4
_MAX_STRETCH = 100_000
_RETURNED = 1.05
_RESCUE_STEPS = 32
_FALLING = 0.97
_GROWN = 1.5
_WHOLE = 1.0 - 1e-6


@dataclass(frozen=True)
class GradientNormPolicy:
    """Owner of `learning_rate_scale`."""

    limits: GradientNormLimits = field(default_factory=GradientNormLimits)
    thresholds: GradientNormThresholds = field(default_factory=GradientNormThresholds)

    @classmethod
    def from_settings(cls, settings: PolicySettings) -> GradientNormPolicy:
        """Return the policy with the user's values."""
        return cls(
            build(GradientNormLimits, settings.limits, "policies.gradient_norm.limits"),
            build(
                GradientNormThresholds, settings.thresholds, "policies.gradient_norm.thresholds"
            ),
        )

    @property
    def name(self) -> str:
        """Name in settings and records."""
        return "gradient_norm"

    @property
    def knobs(self) -> Mapping[str, KnobLimits]:
        """What it may turn."""
        return MappingProxyType(
            {
                _KNOB: KnobLimits(
                    low=self.limits.min_scale,
                    high=1.0,
                    max_factor=1.0 / min(self.thresholds.cold_factor, self.thresholds.factor),
                    cooldown=self.limits.cooldown,
                    budget=self.limits.budget,
                    check="loss",
                    check_after=16,
                )
            }
        )

    def init(self) -> GradientNormState:
        """Return the state before the first step."""
        return GradientNormState()

    def decide(
        self,
        observation: Observation,
        findings: Sequence[Finding],
        feedback: Feedback,
        state: GradientNormState,
    ) -> tuple[Decision, GradientNormState]:
        """Return a cut, a raise, a stop, or no change."""
        found = {finding.kind: finding for finding in findings}
        state = self._follow(observation, found, feedback, state)
        lasted = observation.step - state.bad_from + 1 if state.bad_from else 0
        stop = stop_dead_run(observation, found, self.thresholds.stop_after, lasted)
        if stop is not None:
            return stop, state
        scale = _acting(observation, feedback)
        if feedback.rewound_step is not None and feedback.rewound_step != state.rewound_step:
            return self._after_rewind(scale, feedback.rewound_step, state)
        trouble = self._trouble(observation, found, state)
        if trouble is not None:
            return self._cut(observation, scale, trouble, state)
        if state.rescuing:
            return self._rescue(scale, state)
        return self._recover(scale, state)

    def _follow(
        self,
        observation: Observation,
        found: Mapping[FindingKind, Finding],
        feedback: Feedback,
        state: GradientNormState,
    ) -> GradientNormState:
        losses, first = state.losses, state.first_flagged
        loss = observation.loss
        if loss is not None and math.isfinite(loss):
            losses = push(losses, loss, _LEVEL)
            if FindingKind.LOSS_SPIKE not in found:
                first = None
            elif first is None:
                first = loss
        since = None if state.since_move is None else state.since_move + 1
        disturbed = any(_disturbs(finding) for finding in found.values())
        bad = FindingKind.NON_FINITE_LOSS in found or FindingKind.NON_FINITE_GRAD in found
        following = GradientNormState(
            losses,
            since,
            0 if disturbed else state.healthy + 1,
            state.stretch,
            max(0, state.rescuing - 1),
            state.cold,
            state.level,
            state.lowest,
            first,
            state.raised,
            state.undone_step,
            state.rewound_step,
            (state.bad_from or observation.step) if bad else 0,
        )
        last = feedback.knobs.get(_KNOB)
        if last is None or last.verdict != "undone" or last.step == state.undone_step:
            return following
        return replace(
            following,
            undone_step=last.step,
            stretch=self._longer(following),
            healthy=0,
            since_move=0,
            raised=False,
        )

    def _longer(self, state: GradientNormState) -> int:
        stretch = self._stretch(state) * self.thresholds.relapse_factor
        return min(_MAX_STRETCH, round(stretch))

    def _stretch(self, state: GradientNormState) -> int:
        default = (
            self.thresholds.recover_after_cold if state.cold else self.thresholds.recover_after
        )
        return max(state.stretch, default)

    def _trouble(
        self,
        observation: Observation,
        found: Mapping[FindingKind, Finding],
        state: GradientNormState,
    ) -> Finding | None:
        """Return the finding that asks for a lower rate, if there is one."""
        skipped = observation.update_skipped
        if observation.overflow if skipped is None else skipped:
            return None
        divergence = found.get(FindingKind.DIVERGENCE)
        if divergence is not None:
            return divergence
        norm = found.get(FindingKind.GRAD_NORM_SPIKE)
        loss = found.get(FindingKind.LOSS_SPIKE)
        if FindingKind.LEVEL_SHIFT in found:
            return None
        if observation.loss is None:
            if norm is None or not (self._persists(norm) and _is_burst(norm)):
                return None
            ratio = norm.number("value") / max(norm.number("median"), 1e-12)
            return norm if ratio >= self.thresholds.norm_ratio else None
        if loss is None or state.first_flagged is None or not self._persists(loss):
            return None
        base = loss.number("median")
        excess, first = loss.number("value") - base, state.first_flagged - base
        if norm is not None and self._persists(norm) and excess >= first:
            return loss if _is_burst(loss) or _is_burst(norm) else None
        lasts = loss.number("consecutive") >= 2 * self.thresholds.patience
        return loss if lasts and excess >= _GROWN * first else None

    def _persists(self, finding: Finding) -> bool:
        return (
            finding.number("consecutive") >= self.thresholds.patience
            or finding.number("count") >= self.thresholds.rate
        )

    def _cut(
        self,
        observation: Observation,
        scale: float,
        trouble: Finding,
        state: GradientNormState,
    ) -> tuple[Decision, GradientNormState]:
        cold = _is_rate_far_too_high(trouble)
        patience = self.thresholds.cold_patience if cold else self.thresholds.patience_after_cut
        state = replace(state, healthy=0)
        if state.since_move is not None and state.since_move < patience and not state.raised:
            return NO_CHANGE, state
        if scale <= self.limits.min_scale * (1 + 1e-6):
            text = diagnose_floor_of_learning_rate(observation, trouble, self.limits.min_scale)
            return (
                Decision(
                    actions=(Advise(id="learning-rate-floor", message=text),),
                    reason=trouble.message,
                    evidence=trouble.evidence,
                ),
                state,
            )
        factor = self.thresholds.cold_factor if cold else self.thresholds.factor
        value = max(self.limits.min_scale, scale * factor)
        following = replace(
            state,
            since_move=0,
            stretch=self._longer(state) if state.raised else state.stretch,
            rescuing=_RESCUE_STEPS if cold else state.rescuing,
            cold=cold or state.cold,
            level=median(state.losses) if cold and state.losses else state.level,
            lowest=trouble.number("lowest") if cold else state.lowest,
            raised=False,
        )
        return (
            Decision(
                actions=(SetLearningRateScale(value),),
                reason=trouble.message,
                evidence={**trouble.evidence, "scale": scale},
            ),
            following,
        )

    def _after_rewind(
        self, scale: float, rewound_step: int, state: GradientNormState
    ) -> tuple[Decision, GradientNormState]:
        """Do not take the same way again: lower the rate, unless that has just been done."""
        since = state.since_move
        just_cut = since is not None and since <= self.thresholds.patience_after_cut
        state = replace(
            state,
            losses=(),
            # What a rescue wants back is there again, unless it is lost once more.
            level=state.lowest,
            healthy=0,
            first_flagged=None,
            rewound_step=rewound_step,
        )
        floor = self.limits.min_scale
        if (just_cut and not state.raised) or scale <= floor * (1 + 1e-6):
            return NO_CHANGE, state
        value = max(floor, scale * self.thresholds.factor)
        return (
            Decision(
                actions=(SetLearningRateScale(value),),
                reason=f"the run returned to an earlier state after step {rewound_step}: on from "
                "there with a lower rate",
                evidence={"scale": scale, "rewound_step": rewound_step},
            ),
            replace(state, since_move=0, raised=False),
        )

    def _rescue(
        self, scale: float, state: GradientNormState
    ) -> tuple[Decision, GradientNormState]:
        """Go on cutting while a cold start neither returns to its minimum nor falls."""
        if len(state.losses) < _LEVEL or state.since_move is None:
            return NO_CHANGE, state
        level = median(state.losses)
        if level <= _RETURNED * state.lowest:
            return NO_CHANGE, replace(state, rescuing=0)
        if state.since_move < self.thresholds.cold_patience:
            return NO_CHANGE, state
        if level <= _FALLING * state.level or scale <= self.limits.min_scale * (1 + 1e-6):
            return NO_CHANGE, replace(state, level=level, since_move=0)
        value = max(self.limits.min_scale, scale * self.thresholds.factor)
        reason = (
            f"the loss is at {level:.4g} after {state.level:.4g} at the last cut: it does not "
            f"return to {state.lowest:.4g}"
        )
        return (
            Decision(
                actions=(SetLearningRateScale(value),),
                reason=reason,
                evidence={"loss": level, "lowest": state.lowest, "scale": scale},
            ),
            replace(state, level=level, since_move=0, healthy=0),
        )

    def _recover(
        self, scale: float, state: GradientNormState
    ) -> tuple[Decision, GradientNormState]:
        stretch = self._stretch(state)
        since = state.since_move
        if scale >= _WHOLE or state.healthy < stretch or (since is not None and since < stretch):
            return NO_CHANGE, state
        value = min(1.0, scale / self.thresholds.factor)
        return (
            Decision(
                actions=(SetLearningRateScale(value),),
                reason=f"no trouble for {state.healthy} steps: back towards the schedule",
                evidence={"scale": scale, "healthy": state.healthy, "stretch": stretch},
            ),
            replace(state, since_move=0, raised=True),
        )


_DISTURBING = frozenset(
    {
        FindingKind.NON_FINITE_LOSS,
        FindingKind.NON_FINITE_GRAD,
        FindingKind.DIVERGENCE,
        FindingKind.OVERFLOW_STORM,
        FindingKind.FROZEN_LOSS,
    }
)


def _is_burst(spike: Finding) -> bool:
    return spike.number("burst") == 1


def _is_rate_far_too_high(trouble: Finding) -> bool:
    return trouble.number("cold_start") == 1 or trouble.evidence.get("pattern") == RATE_JUMP


def _disturbs(finding: Finding) -> bool:
    """Return whether a run with this finding is not healthy enough for a higher rate."""
    if finding.kind is FindingKind.LOSS_SPIKE:
        return finding.severity is not Severity.INFO
    return finding.kind in _DISTURBING and finding.severity is Severity.CRITICAL


def _acting(observation: Observation, feedback: Feedback) -> float:
    """Return the scale that acts: as reported, else as granted last, else the schedule's own."""
    scale = observation.learning_rate_scale
    if scale is not None and math.isfinite(scale) and scale > 0:
        return scale
    last = feedback.knobs.get(_KNOB)
    return last.granted if last is not None and last.granted is not None else 1.0
