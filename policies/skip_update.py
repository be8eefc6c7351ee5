"""Lets the device skip a poisoned update in the very step: owns the skip threshold.

Theory of operation. An update whose gradient norm is far beyond everything usual cannot be taken
back by a decision that comes after it, so the decision is made before: the policy sets a
threshold, and the training step compares and skips. The threshold stands at

    median * max(ratio, exp(deviations * spread))

of the detectors' baseline of the norm, that is of its unflagged samples: the median, and the
robust deviation of the logarithm upwards (`scatter`), from which the fall of the norm in a warm-up
is taken out, since a guard that takes it for scatter lets a hundredfold gradient pass. Where norms
are zero more often than not, it stands at 100 times the median or 3 times what one sample in
twenty exceeds. That is far enough above that no healthy step reaches it; moderate spikes are left
to clipping and to the learning rate. Until the baseline is armed the threshold is infinite.

It follows the level with hysteresis, since every move is a record: **up** at once when the target
has left it by `raise_ratio` and the norm is flagged or one of the newest comes within a third of
it, since a threshold that is too low skips healthy updates; **down** only when the target has
fallen below it by `lower_ratio`, which is looked at every `lower_after` steps (after a raise,
every eighth time: a norm that goes to and fro is followed upwards alone), and at once in a step
whose norm is beyond `ratio` and whose loss is flagged as well: scatter of the norm does not
explain the loss, so that scatter counts no more, and the rest of a burst is skipped. A legal shift
of the level (another batch size) that reaches the threshold must not be skipped for long, nor only
until the detectors declare it: while norms are flagged, and before it falls, the median of the
newest 32 norms counts as well, flagged ones included. A burst of bad batches does not move it, a
new level does after 17 steps.

A guard that fires again and again is wrong, or the run has a trouble that skipping does not cure:
after `max_skips` skipped updates within 48 steps it **opens**: the threshold is infinite for
`rest` steps, with an advice, and others (learning rate, rewind) deal with what is left. So a
healthy run whose level jumps loses `max_skips` updates at the most. And where it goes on skipping
`max_often` updates in 1000 steps, these are no single bad batches but a part of the data (another
source, a harder task), which would never be learnt: the threshold rises to three times their
median over the usual norm, up to a factor of 100, with an advice. What lies beyond stays skipped,
and is told.

Setting the threshold changes nothing in a run by itself. Where it is not within reach, or in
observe mode, nothing is asked for until an update comes that would have been skipped and whose
loss is out of line as well (or not measured). A threshold that the user has set is left alone; if
it skips as much as would open the guard there is an advice, and where it skips `stop_after`
updates in a row, and nothing can be learnt any more, the run is ended.
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
    RequestStop,
    SetSkipThreshold,
)
from mindtune.policies.explanations import diagnose_frequent_skips, diagnose_skipping
from mindtune.policies.findings import Finding, FindingKind
from mindtune.policies.limits import BUDGET_WINDOW, KnobLimits
from mindtune.policies.policy import Baseline, Feedback
from mindtune.policies.scatter import upward_scatter
from mindtune.policies.settings import PolicySettings, build
from mindtune.policies.signals import Observation
from mindtune.policies.skip_update_settings import (
    SkipUpdateLimits,
    SkipUpdateState,
    SkipUpdateThresholds,
)
from mindtune.policies.windows import median, push

__all__ = ["SkipUpdatePolicy"]

_KNOB = SetSkipThreshold.knob
_WINDOW = 48
_MASK = (1 << _WINDOW) - 1
_RECENT = 32
_NEAR = 3.0
_LOWEST, _HIGHEST = 1e-30, 1e30
_ANY_FACTOR = 1e60
# A scatter of 1 in the logarithm reaches it in 1 step of 400,000; what seems wider is no baseline.
_LARGEST_RATIO = 100.0
_HIGH, _OVER_HIGH = 0.95, 3.0
_LONG = 1_000_000
_AFTER_RAISE = 8
_SKIPPED, _FORGET = 8, 1 - 1 / BUDGET_WINDOW


@dataclass(frozen=True)
class SkipUpdatePolicy:
    """Owner of `skip_threshold`."""

    limits: SkipUpdateLimits = field(default_factory=SkipUpdateLimits)
    thresholds: SkipUpdateThresholds = field(default_factory=SkipUpdateThresholds)

    @classmethod
    def from_settings(cls, settings: PolicySettings) -> SkipUpdatePolicy:
        """Return the policy with the user's values."""
        return cls(
            build(SkipUpdateLimits, settings.limits, "policies.skip_update.limits"),
            build(SkipUpdateThresholds, settings.thresholds, "policies.skip_update.thresholds"),
        )

    @property
    def name(self) -> str:
        """Name in settings and records."""
        return "skip_update"

    @property
    def knobs(self) -> Mapping[str, KnobLimits]:
        """What it may turn."""
        return MappingProxyType(
            {
                _KNOB: KnobLimits(
                    low=_LOWEST,
                    high=_HIGHEST,
                    max_factor=_ANY_FACTOR,
                    cooldown=1,
                    budget=self.limits.budget,
                    check="skipped",
                    check_after=16,
                    off=math.inf,
                )
            }
        )

    def init(self) -> SkipUpdateState:
        """Return the state before the first step."""
        return SkipUpdateState()

    def decide(
        self,
        observation: Observation,
        findings: Sequence[Finding],
        feedback: Feedback,
        state: SkipUpdateState,
    ) -> tuple[Decision, SkipUpdateState]:
        """Return the threshold of the next step, advice, or no change."""
        reported = observation.skip_threshold
        if not state.moved and reported is not None and math.isfinite(reported):
            state = replace(state, threshold=reported)
            state = _follow(observation, feedback, state, self.thresholds.rest)
            return self._warn(observation, reported, feedback.grad_norm, state), state
        state = _follow(observation, feedback, state, self.thresholds.rest)
        within_reach = _KNOB in feedback.facts.reachable
        if state.skips.bit_count() >= self.limits.max_skips and within_reach:
            return self._open(observation, feedback.grad_norm, state)
        if state.open_for > 0:
            return NO_CHANGE, replace(state, open_for=state.open_for - 1)
        baseline = feedback.grad_norm
        if baseline is None or not baseline.armed:
            return NO_CHANGE, state
        if state.often >= self.limits.max_often and state.skipped and within_reach:
            return self._let_pass(observation, baseline, state)
        told = NO_CHANGE
        if not within_reach:
            told = self._tell(observation, findings, baseline, state)
        now = state.threshold
        flagged = any(found.kind is FindingKind.GRAD_NORM_SPIKE for found in findings)
        near = now is not None and (flagged or max(baseline.samples[-_RECENT:]) > now / _NEAR)
        every = self.thresholds.lower_after * (_AFTER_RAISE if state.rose else 1)
        looks = state.since_move > 0 and state.since_move % every == 0
        if now is not None and not near and not looks:
            return told, state
        level = baseline.median
        spread = upward_scatter(baseline.samples)
        together = flagged and self._is_far_out(observation, findings, baseline)
        if together:
            spread = 0.0
        target = self._target(baseline, spread, level, state)
        falls = now is not None and target < now
        if falls or flagged:
            level = max(level, median(state.recent))
            target = self._target(baseline, spread, level, state)
        if not _LOWEST <= target <= _HIGHEST:
            return NO_CHANGE, state
        if not within_reach:
            return told, replace(state, threshold=target)
        if now is None:
            why = f"the norm's baseline is armed after {len(baseline.samples)} samples"
        elif near and target > self.thresholds.raise_ratio * now:
            why = f"the norm's level has risen to {level:.4g}"
        elif together and now > self.thresholds.raise_ratio * target:
            why = f"norm and loss are far out together, and usual is {level:.4g}"
        elif looks and now > self.thresholds.lower_ratio * target:
            why = f"the norm's level has fallen to {level:.4g}"
        else:
            return NO_CHANGE, state
        evidence = {
            "median": baseline.median,
            "spread": spread,
            "samples": len(baseline.samples),
            "threshold": target,
        }
        return (
            Decision(
                actions=(SetSkipThreshold(target),),
                reason=f"{why}: updates above {target:.4g} are poisoned",
                evidence=evidence,
            ),
            replace(
                state,
                threshold=target,
                since_move=0,
                moved=True,
                rose=now is not None and target > now,
            ),
        )

    def _target(
        self, baseline: Baseline, spread: float, level: float, state: SkipUpdateState
    ) -> float:
        """Return where the threshold should stand for a norm of this level."""
        ratio = max(self.thresholds.ratio, state.passes)
        largest = max(ratio, _LARGEST_RATIO)
        if math.isinf(spread):
            high = sorted(baseline.samples)[int(_HIGH * len(baseline.samples))]
            return max(largest * level, _OVER_HIGH * high)
        tail = self.thresholds.deviations * spread
        return level * (largest if tail >= math.log(largest) else max(ratio, math.exp(tail)))

    def _is_far_out(
        self, observation: Observation, findings: Sequence[Finding], baseline: Baseline
    ) -> bool:
        """Return whether norm and loss of this step are far out together."""
        norm = observation.grad_norm
        if norm is None or norm <= self.thresholds.ratio * baseline.median:
            return False
        return any(found.kind is FindingKind.LOSS_SPIKE for found in findings)

    def _open(
        self, observation: Observation, baseline: Baseline | None, state: SkipUpdateState
    ) -> tuple[Decision, SkipUpdateState]:
        count = state.skips.bit_count()
        usual = "unknown" if baseline is None else f"{baseline.median:.4g}"
        text = (
            f"{count} of the last {_WINDOW} updates were skipped, because their gradient norms "
            f"(now {observation.grad_norm}) were above {state.threshold}; usual is {usual}. That "
            "is no single bad batch: the level of the norm has changed (batch size, data, "
            "schedule), or the weights are damaged. The guard is open for "
            f"{self.thresholds.rest} steps; look at the data and at the learning rate."
        )
        openings = state.openings + 1
        return (
            Decision(
                actions=(
                    SetSkipThreshold(math.inf),
                    Advise(id=f"skip-guard-open-{openings}", message=text),
                ),
                reason=f"{count} of {_WINDOW} updates were skipped (limit: "
                f"{self.limits.max_skips})",
                evidence={
                    "skipped": count,
                    "limit": self.limits.max_skips,
                    "grad_norm": observation.grad_norm,
                    "skip_threshold": state.threshold,
                },
            ),
            SkipUpdateState(
                open_for=self.thresholds.rest,
                openings=openings,
                moved=True,
                recent=state.recent,
                passes=state.passes,
            ),
        )

    def _let_pass(
        self, observation: Observation, baseline: Baseline, state: SkipUpdateState
    ) -> tuple[Decision, SkipUpdateState]:
        """Raise the threshold above what it has skipped too often to be single bad batches."""
        typical, count = median(state.skipped), round(state.often)
        passes = _NEAR * typical
        lifts = 0.0 < passes <= _LARGEST_RATIO
        text = diagnose_frequent_skips(observation, count, typical, passes if lifts else None)
        reason = f"{count} updates were skipped in {BUDGET_WINDOW} steps"
        evidence = {"skipped": count, "limit": self.limits.max_often, "ratio": typical}
        state = replace(state, often=0.0)
        if not lifts:
            advice = Advise(id="skip-often", message=text)
            return Decision(actions=(advice,), reason=reason, evidence=evidence), state
        state = replace(state, passes=passes, openings=state.openings + 1)
        target = self._target(baseline, upward_scatter(baseline.samples), baseline.median, state)
        if not _LOWEST <= target <= _HIGHEST:
            return NO_CHANGE, state
        advice = Advise(id=f"skip-guard-raised-{state.openings}", message=text)
        return (
            Decision(
                actions=(SetSkipThreshold(target), advice),
                reason=reason,
                evidence={**evidence, "threshold": target},
            ),
            replace(state, threshold=target, since_move=0, rose=True),
        )

    def _warn(
        self,
        observation: Observation,
        threshold: float,
        baseline: Baseline | None,
        state: SkipUpdateState,
    ) -> Decision:
        """Return what the user should know about a threshold of their own."""
        count, last = state.skips.bit_count(), (1 << self.thresholds.stop_after) - 1
        usual = None if baseline is None else baseline.median
        ends = state.skips & last == last
        if not ends and count < self.limits.max_skips:
            return NO_CHANGE
        skipped = f"{count} of the last {_WINDOW} updates"
        if ends:
            skipped = f"{self.thresholds.stop_after} updates in a row"
        text = diagnose_skipping(observation, skipped, threshold, usual)
        return Decision(
            actions=(
                RequestStop(id="every-update-skipped", diagnosis=text)
                if ends
                else Advise(id="skip-threshold", message=text),
            ),
            reason=f"{skipped} were skipped by the run's own threshold",
            evidence={"skipped": count, "skip_threshold": threshold, "median": usual},
        )

    def _tell(
        self,
        observation: Observation,
        findings: Sequence[Finding],
        baseline: Baseline,
        state: SkipUpdateState,
    ) -> Decision:
        """Return what would have been asked for, if this update would have been skipped."""
        norm, threshold = observation.grad_norm, state.threshold
        if threshold is None or norm is None or not threshold < norm < math.inf:
            return NO_CHANGE
        agrees = observation.loss is None or any(
            found.kind is FindingKind.LOSS_SPIKE for found in findings
        )
        if not agrees or observation.update_skipped:
            return NO_CHANGE
        return Decision(
            actions=(SetSkipThreshold(threshold),),
            reason=f"the update of norm {norm:.4g} is poisoned: usual is {baseline.median:.4g}",
            evidence={
                "median": baseline.median,
                "samples": len(baseline.samples),
                "threshold": threshold,
                "grad_norm": norm,
            },
        )


def _follow(
    observation: Observation, feedback: Feedback, state: SkipUpdateState, rest: int
) -> SkipUpdateState:
    """Return the state with this step counted, and with what became of the last request."""
    norm, threshold, baseline = observation.grad_norm, state.threshold, feedback.grad_norm
    by_guard = (
        bool(observation.update_skipped)
        and norm is not None
        and threshold is not None
        and threshold < norm < math.inf
    )
    open_for = state.open_for
    last = feedback.knobs.get(_KNOB)
    if last is not None and last.verdict == "undone" and last.step == observation.step:
        open_for = rest
    # The step's own report holds; without one, what was granted last.
    acting = observation.skip_threshold
    if acting is None and last is not None:
        acting = last.granted
    if state.moved and acting is not None and not math.isnan(acting):
        threshold = acting if math.isfinite(acting) else None
    return SkipUpdateState(
        threshold,
        min(state.since_move + 1, _LONG),
        ((state.skips << 1) | int(by_guard)) & _MASK,
        open_for,
        state.openings,
        state.moved,
        push(state.recent, norm, _RECENT)
        if norm is not None and math.isfinite(norm)
        else state.recent,
        state.rose,
        _FORGET * state.often + int(by_guard),
        push(state.skipped, norm / baseline.median, _SKIPPED)
        if by_guard and norm is not None and baseline is not None and baseline.median > 0
        else state.skipped,
        state.passes,
    )
