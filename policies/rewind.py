"""Returns to the last healthy state where nothing softer helps; ends runs that it cannot save.

Theory of operation. Answers escalate: log, advise, soft (learning rate, loss scale, clipping),
skip, rewind, stop. The first four belong to others; this policy looks whether they are enough. A
state is **lost** if one of these holds:

- an update with a non-finite gradient was applied: the weights are gone in this very step;
- the loss is not finite for 2 steps whose updates were applied, or anything is not finite for
  `patience` steps that were skipped: the weights were bad before, or the data is bad for long;
- a quarter of the last 48 steps was not finite, since a rule on rows alone is evaded by one good
  step in between;
- the loss is frozen while every update is skipped;
- the gradient overflows at the floor of the loss scale `patience` times in a row;
- the loss explodes in the first steps: the learning rate is cut by the owner of that knob in the
  same step, but what the first steps did to the weights stays;
- the learning rate jumped and the loss with it: the rate is cut in the same step as well, but the
  weights have been through some updates at the rate that was wrong;
- the loss is back where it was before anything was learnt, and stays there;
- a divergence is not over `soft_patience` steps after it was found, nor has the loss come half of
  the way back from its peak; if it has, it gets as long again.

The finite loss of a step whose update was skipped tells nothing: it is that of a bad batch. Guards
that skip for ever open by themselves.

Then, if the run keeps healthy states, it **rewinds**: weights and optimizer go back, the data
since then is passed over (PaLM skipped 200 - 500 batches and saw that the same data does no harm
from another state), and the owner of the learning rate lowers it, so that the run does not take
the same way again. After a rewind the run gets `cooldown` steps to show that it is well, and a
loss that had diverged gets `soft_patience` steps to come back. It may rewind `budget` times in
1000 steps; who needs more has a cause that going back does not remove, and the run **stops** with
a diagnosis. So does a divergence that cannot be rewound and stands where it began or higher after
`give_up_after` steps, or as high as before anything was learnt, and a run whose loss was never
finite at all, in its first `never_finite` steps: there is nothing to return to. What else is lost
and cannot be rewound is stopped by the owners of the knobs concerned, when their own patience
ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mindtune.policies.decisions import NO_CHANGE, Decision, RequestStop, Rewind
from mindtune.policies.detectors.rate_jump import RATE_JUMP
from mindtune.policies.detectors.untrained import UNTRAINED
from mindtune.policies.explanations import diagnose_lost_run, diagnose_never_finite
from mindtune.policies.findings import Evidence, Finding, FindingKind, Severity
from mindtune.policies.limits import BUDGET_WINDOW, KnobLimits
from mindtune.policies.policy import Feedback
from mindtune.policies.rewind_settings import (
    LONG,
    RewindLimits,
    RewindState,
    RewindThresholds,
)
from mindtune.policies.settings import PolicySettings, build
from mindtune.policies.signals import Observation
from mindtune.policies.windows import median, push

__all__ = ["RewindPolicy"]

_HALF = 0.5
_LEVEL = 5
_RETRY_AFTER = 256
_APPLIED = 2
_RATE_WINDOW = 48
_RATE_MASK = (1 << _RATE_WINDOW) - 1


@dataclass(frozen=True)
class RewindPolicy:
    """Owner of no knob: asks for events alone."""

    limits: RewindLimits = field(default_factory=RewindLimits)
    thresholds: RewindThresholds = field(default_factory=RewindThresholds)

    @classmethod
    def from_settings(cls, settings: PolicySettings) -> RewindPolicy:
        """Return the policy with the user's values."""
        return cls(
            build(RewindLimits, settings.limits, "policies.rewind.limits"),
            build(RewindThresholds, settings.thresholds, "policies.rewind.thresholds"),
        )

    @property
    def name(self) -> str:
        """Name in settings and records."""
        return "rewind"

    @property
    def knobs(self) -> Mapping[str, KnobLimits]:
        """What it may turn: nothing."""
        return MappingProxyType({})

    def init(self) -> RewindState:
        """Return the state before the first step."""
        return RewindState()

    def decide(
        self,
        observation: Observation,
        findings: Sequence[Finding],
        feedback: Feedback,
        state: RewindState,
    ) -> tuple[Decision, RewindState]:
        """Return a rewind, a stop, or no change."""
        found = {finding.kind: finding for finding in findings}
        state = _take_in(feedback, self._follow(observation, found, state))
        if self._was_never_finite(found, state):
            text = diagnose_never_finite(observation, state.bad)
            return (
                Decision(
                    actions=(RequestStop(id="never-finite", diagnosis=text),),
                    reason=f"the first {state.bad} losses of the run were not finite",
                    evidence={"count": state.bad, "threshold": self.thresholds.never_finite},
                ),
                state,
            )
        lost = self._lost(observation, found, state)
        if lost is None:
            return NO_CHANGE, state
        if state.since < self.limits.cooldown:
            return NO_CHANGE, state
        can_rewind = feedback.facts.can_rewind and not state.refused
        if can_rewind and len(state.rewinds) < self.limits.budget:
            return self._rewind(observation, lost, state)
        return self._stop(observation, lost, state), state

    def _follow(
        self, observation: Observation, found: Mapping[FindingKind, Finding], state: RewindState
    ) -> RewindState:
        clock = state.clock + 1
        non_finite = FindingKind.NON_FINITE_LOSS in found or FindingKind.NON_FINITE_GRAD in found
        bad = state.bad + 1 if non_finite else 0
        skipped = observation.update_skipped
        applied = state.applied + 1 if non_finite and skipped == 0 else 0
        following = RewindState(
            clock=clock,
            rewinds=state.rewinds
            and tuple(at for at in state.rewinds if clock - at < BUDGET_WINDOW),
            total=state.total,
            since=min(state.since + 1, LONG),
            bad=min(bad, LONG),
            applied=min(applied, LONG),
            bad_bits=((state.bad_bits << 1) | int(non_finite)) & _RATE_MASK,
            was_finite=state.was_finite
            or (observation.loss is not None and math.isfinite(observation.loss)),
            asked_step=state.asked_step,
            refused=max(0, state.refused - 1),
            age=min(state.age + 1, LONG) if state.age else 0,
            calm=min(state.calm + 1, LONG),
            base=state.base,
            opened_at=state.opened_at,
            peak=state.peak,
            losses=state.losses,
            deadline=state.deadline,
        )
        return self._follow_divergence(observation, found, following)

    def _follow_divergence(
        self, observation: Observation, found: Mapping[FindingKind, Finding], state: RewindState
    ) -> RewindState:
        """Open, go on with or close the episode of a divergence."""
        divergence, loss = found.get(FindingKind.DIVERGENCE), observation.loss
        if loss is None or not math.isfinite(loss) or _is_skipped(observation):
            return state
        if not state.age:
            if divergence is None or divergence.severity is not Severity.CRITICAL:
                return state
            return replace(
                state,
                age=1,
                calm=0,
                base=divergence.number("median") or divergence.number("lowest"),
                opened_at=loss,
                peak=loss,
                losses=(loss,),
                deadline=self.thresholds.soft_patience,
            )
        losses = push(state.losses, loss, _LEVEL)
        level = median(losses)
        half_back = level - state.base <= _HALF * (state.peak - state.base)
        flagged = divergence is not None or FindingKind.LOSS_SPIKE in found
        calm = 0 if flagged or not half_back else state.calm
        # A shift of the level does not end it: a run that is ruined stays where it is.
        if calm >= self.thresholds.calm:
            return replace(state, age=0, losses=(), calm=calm)
        deadline = state.deadline
        if half_back and state.age >= deadline:
            deadline = state.age + self.thresholds.soft_patience
        peak = max(state.peak, level)
        return replace(state, losses=losses, peak=peak, calm=calm, deadline=deadline)

    def _was_never_finite(self, found: Mapping[FindingKind, Finding], state: RewindState) -> bool:
        return (
            FindingKind.NON_FINITE_LOSS in found
            and not state.was_finite
            and state.bad >= self.thresholds.never_finite
        )

    def _lost(
        self, observation: Observation, found: Mapping[FindingKind, Finding], state: RewindState
    ) -> _Lost | None:
        """Return why the present state is not worth going on from, if it is not."""
        norm, skipped = observation.grad_norm, observation.update_skipped
        if norm is not None and not math.isfinite(norm) and skipped == 0:
            return _Lost(
                "non-finite-update",
                f"an update with a gradient norm of {norm} was applied: the weights are not "
                "finite any more",
                {"grad_norm": norm, "update_skipped": skipped},
            )
        # A row that goes on after a rewind does not come from the weights: others end it.
        lasts = self.thresholds.patience <= state.bad <= state.since
        if state.applied >= _APPLIED or lasts:
            kind = (
                FindingKind.NON_FINITE_LOSS
                if FindingKind.NON_FINITE_LOSS in found
                else FindingKind.NON_FINITE_GRAD
            )
            return _Lost(
                "non-finite",
                f"{found[kind].message} {state.bad} non-finite steps in a row are no single bad "
                "batch",
                {**found[kind].evidence, "threshold": self.thresholds.patience},
            )
        count = state.bad_bits.bit_count()
        if count >= self.thresholds.rate and state.bad:
            return _Lost(
                "non-finite-rate",
                f"{count} of the last {_RATE_WINDOW} steps were not finite (limit "
                f"{self.thresholds.rate})",
                {"count": count, "threshold": self.thresholds.rate},
                final=count >= self.thresholds.stop_rate,
            )
        for kind in (FindingKind.FROZEN_LOSS, FindingKind.LOSS_SCALE_FLOOR):
            finding = found.get(kind)
            if (
                finding is not None
                and finding.severity is Severity.CRITICAL
                and finding.number("consecutive" if "consecutive" in finding.evidence else "count")
                >= self.thresholds.patience
            ):
                return _Lost(kind.value.replace("_", "-"), finding.message, finding.evidence)
        if _is_skipped(observation):
            return None
        divergence = found.get(FindingKind.DIVERGENCE)
        if divergence is not None and divergence.number("cold_start") == 1:
            return _Lost("explosion", divergence.message, divergence.evidence)
        if divergence is not None and divergence.evidence.get("pattern") == RATE_JUMP:
            return _Lost("learning-rate-jump", divergence.message, divergence.evidence)
        if divergence is not None and divergence.evidence.get("pattern") == UNTRAINED:
            return _Lost(
                "untrained-again",
                divergence.message,
                divergence.evidence,
                final=divergence.number("consecutive") >= self.thresholds.give_up_after,
            )
        if state.age and state.age >= state.deadline:
            return _Lost(
                "divergence",
                f"the loss diverged {state.age} steps ago, from {state.base:.4g}, and stands at "
                f"{observation.loss}: lower learning rates did not bring it back",
                {
                    "loss": observation.loss,
                    "median": state.base,
                    "steps": state.age,
                    "threshold": self.thresholds.soft_patience,
                },
                final=state.age >= self.thresholds.give_up_after
                and median(state.losses) >= state.opened_at,
            )
        return None

    def _rewind(
        self, observation: Observation, lost: _Lost, state: RewindState
    ) -> tuple[Decision, RewindState]:
        total = state.total + 1
        return (
            Decision(
                actions=(Rewind(id=f"rewind-{observation.step}-{total}", reason=lost.reason),),
                reason=f"{lost.reason.rstrip('.')}: back to the last healthy state, past the data "
                "since then",
                evidence={
                    **lost.evidence,
                    "rewinds": len(state.rewinds) + 1,
                    "budget": self.limits.budget,
                },
            ),
            replace(
                state,
                rewinds=(*state.rewinds, state.clock),
                total=total,
                since=0,
                asked_step=observation.step,
                bad_bits=0,
                # The loss must come back now, or it was not the weights.
                age=min(state.age, 1),
                losses=state.losses[-1:],
                calm=0,
                deadline=self.thresholds.soft_patience,
            ),
        )

    def _stop(self, observation: Observation, lost: _Lost, state: RewindState) -> Decision:
        """End a run that going back did not save, or that cannot go back and must not go on."""
        rewinds = len(state.rewinds)
        if not rewinds and not lost.final:
            return NO_CHANGE
        text = diagnose_lost_run(observation, lost.reason.rstrip("."), rewinds)
        return Decision(
            actions=(RequestStop(id=f"lost-{lost.code}", diagnosis=text),),
            reason=lost.reason,
            evidence={
                **lost.evidence,
                "rewinds": len(state.rewinds),
                "budget": self.limits.budget,
            },
        )


def _take_in(feedback: Feedback, state: RewindState) -> RewindState:
    """Return the state with what became of the last rewind: it may not have been carried out."""
    if state.asked_step is None:
        return state
    if feedback.rewound_step == state.asked_step:
        return replace(state, asked_step=None)
    return replace(state, asked_step=None, rewinds=state.rewinds[:-1], refused=_RETRY_AFTER)


def _is_skipped(observation: Observation) -> bool:
    """Return whether the batch did not act: its loss then speaks of it, not of the weights."""
    skipped = observation.update_skipped
    return bool(observation.overflow if skipped is None else skipped)


@dataclass(frozen=True)
class _Lost:
    """Why a state is lost."""

    code: str
    reason: str
    evidence: Evidence
    final: bool = False
    """Whether a run that cannot go back must end for it by now."""
