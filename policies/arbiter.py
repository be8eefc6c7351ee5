"""The second stage: decides which requests are granted, and answers for what was granted.

Theory of operation. `review` comes first in a step. It reads from the observation whether the
last grant of each knob took effect; a knob that still reports another value after its settling
time is found ineffective and left alone for `_BLOCKED_FOR` steps. Once the outcome of a grant can
be judged, its record is completed, and a raise that made things worse is taken back: that grant
carries the verdict `undone`, needs no budget and no cool-down, and closes the knob for its step.

`request` then takes the policies' decisions in the order of their priority (that of the table of
policies: loss scale, gradient norm, batch size; what protects the weights goes before what makes
the run faster). A set-point passes, in this order: the knob is the policy's own, the number is
finite, nobody wrote the knob in this step, it differs from the acting value once it is cut to the
largest factor per move and to the bounds, the knob has obeyed, the cool-down is over, budget is
left, and the knob is within reach. What fails is recorded as refused with the reason; the same
refusal is not recorded again within `_REPEAT_AFTER` steps. Events pass once per id.

In observe mode everything is counted alike and recorded as observed, and nothing is given out.

The learning rate has two writers by design: the gradient-norm policy's factor, and the factor by
which the rate follows the batch. Policies see and ask for the former alone; what is given out is
one set-point, their product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mindtune.policies.arbiter_state import ArbiterState, KnobState, Pending
from mindtune.policies.coupling import learning_rate_factor
from mindtune.policies.decisions import (
    KNOBS,
    Action,
    Advise,
    Decision,
    Event,
    RequestStop,
    Rewind,
    SetBatchSize,
    SetLearningRateScale,
    SetMicroBatch,
    SetPoint,
)
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Evidence, Finding, FindingKind, Severity
from mindtune.policies.limits import BUDGET_WINDOW, KnobLimits
from mindtune.policies.outcomes import baseline_of, follow, judge, tokens_per_second
from mindtune.policies.policy import KnobFeedback, Verdict
from mindtune.policies.records import ActionRecord
from mindtune.policies.settings import Mode
from mindtune.policies.signals import Observation
from mindtune.policies.windows import push

__all__ = ["Arbitration", "KnobTable"]

KnobTable = Mapping[str, tuple[str, KnobLimits]]
"""Knob -> the policy that may turn it, and what it is held to."""

_LR = SetLearningRateScale.knob
_BATCH = SetBatchSize.knob
_RECENT = 16
_MAX_EVENTS = 64
_REPEAT_AFTER = 64
_BLOCKED_FOR = 256
_SAME = 1e-6


class Arbitration:
    """The arbiter's work on one step: `review`, then `request` per policy, then `finish`.

    Args:
        table: Owners and limits of the knobs.
        facts: Facts of the run.
        observation: The step's signals as reported.
        state: The arbiter's state after the step before; it is not changed.
    """

    def __init__(
        self, table: KnobTable, facts: RunFacts, observation: Observation, state: ArbiterState
    ) -> None:
        self._table = table
        self._facts = facts
        self._observation = observation
        self._state = state
        self._clock = state.clock + max(1, observation.step - state.last_step)
        self._knobs = state.knobs
        self._base_batch = state.base_batch
        self._batch_factor = state.batch_factor
        self._events = state.events
        self._written: set[str] = set()
        self._set_points: dict[str, SetPoint] = {}
        self._granted_events: list[Event] = []
        self._records: list[ActionRecord] = []
        self.findings: list[Finding] = []
        """Knobs that were found ineffective in this step."""

    @property
    def feedback(self) -> Mapping[str, KnobFeedback]:
        """What became of the last request on each knob."""
        return {
            knob: entry.feedback
            for knob, entry in self._knobs.items()
            if entry.feedback is not None
        }

    def review(self) -> None:
        """Complete, undo or block what was granted earlier."""
        for knob, entry in self._state.knobs.items():
            if entry.pending is not None:
                self._review(knob, entry, entry.pending)

    def _review(self, knob: str, entry: KnobState, before: Pending) -> None:
        _, limits = self._table[knob]
        acting = self._acting(knob)
        pending = follow(before, limits, self._observation, acting)
        if pending.effective and not before.effective:
            pending = replace(pending, record=replace(pending.record, acted=self._raw(knob)))
            self._records.append(pending.record)
            entry = replace(entry, feedback=_with_effect(entry.feedback, effective=True))
        if pending.mismatches >= limits.settle:
            self._block(knob, entry, pending)
        elif not pending.judged:
            if pending.effective:
                self._store(knob, replace(entry, pending=None))
            elif pending is not before:
                self._store(knob, replace(entry, pending=pending))
        elif self._clock >= pending.since + limits.check_after + limits.settle:
            outcome = judge(pending, limits)
            if outcome.undo and pending.before is not None:
                self._complete(pending, f"undone: {outcome.text}")
                self._undo(knob, entry, pending, pending.before, outcome.text)
            else:
                self._complete(pending, outcome.text)
                self._store(knob, replace(entry, pending=None))
        elif pending is not before:
            self._store(knob, replace(entry, pending=pending))

    def _complete(self, pending: Pending, outcome: str) -> None:
        self._records.append(replace(pending.record, outcome=outcome))

    def _block(self, knob: str, entry: KnobState, pending: Pending) -> None:
        """Leave a knob alone that reports another value than the one it was set to."""
        owner, limits = self._table[knob]
        raw = self._raw(knob) or 0.0
        text = (
            f"{knob} was set to {pending.value:g}, but {limits.settle} steps later the training "
            f"step still reports {raw:g}"
        )
        self._records.append(replace(pending.record, acted=raw, outcome=f"ineffective: {text}"))
        step = self._observation.step
        self.findings.append(
            Finding(
                step=pending.record.step,
                last_step=step,
                kind=FindingKind.KNOB_INEFFECTIVE,
                severity=Severity.WARNING,
                message=f"{text}; it does not obey.",
                evidence={"knob": knob, "requested": pending.value, "acted": raw},
            )
        )
        self._store(
            knob,
            replace(
                entry,
                pending=None,
                blocked_until=self._clock + _BLOCKED_FOR,
                feedback=_with_effect(entry.feedback, effective=False),
            ),
        )
        if knob == _BATCH and pending.before is not None:
            self._follow_batch(pending.before, owner)
        advice = Advise(
            id=f"ineffective-{knob}",
            message=f"{text}: it does not read this knob. Train with mindtune's TrainStep, or "
            f"set the policy {owner} to observe.",
        )
        self._event(owner, "act", advice, f"{knob} does not obey", {})

    def _undo(
        self, knob: str, entry: KnobState, pending: Pending, value: float, reason: str
    ) -> None:
        owner, _ = self._table[knob]
        self._grant(
            knob,
            replace(entry, pending=None),
            policy=owner,
            value=value,
            verdict="undone",
            reason=reason,
            evidence={"undoes_step": pending.record.step},
            judged=False,
        )

    def request(self, policy: str, mode: Mode, decision: Decision) -> None:
        """Grant, observe or refuse what a policy asks for."""
        for action in decision.actions:
            if isinstance(action, (Rewind, RequestStop, Advise)):
                self._event(policy, mode, action, decision.reason, decision.evidence)
            else:
                self._set_point(policy, mode, action, decision)

    def _event(
        self, policy: str, mode: Mode, event: Event, reason: str, evidence: Evidence
    ) -> None:
        if event.id in self._events:
            return
        self._events = (*self._events[-_MAX_EVENTS + 1 :], event.id)
        self._records.append(
            ActionRecord(
                step=self._observation.step,
                policy=policy,
                action=type(event).__name__,
                requested=event.id,
                verdict="granted" if mode == "act" else "observed",
                reason=reason,
                evidence={**evidence, "text": _text(event)},
            )
        )
        if mode == "act":
            self._granted_events.append(event)

    def _set_point(self, policy: str, mode: Mode, action: SetPoint, decision: Decision) -> None:
        knob, wanted = action.knob, float(action.value)
        owner, limits = self._table.get(knob, ("", None))
        if owner != policy or limits is None or not math.isfinite(wanted):
            rule = "is not this policy's knob" if owner != policy else "must be a finite number"
            self._refuse(policy, knob, wanted, "invalid", f"{knob} {rule}", decision)
            return
        entry = self._knobs.get(knob, _UNTOUCHED)
        acting = self._acting(knob)
        if knob in self._written:
            self._refuse(
                policy, knob, wanted, "conflict", f"{knob} was already written this step", decision
            )
            return
        value = _cut(wanted, acting, limits)
        if acting is not None and abs(value - acting) <= _SAME * abs(acting):
            return
        code, rule = self._obstacle(entry, limits, mode, knob)
        if code:
            self._refuse(policy, knob, wanted, code, rule, decision)
            return
        reason = decision.reason
        if value != wanted:
            reason = f"{reason} (asked for {wanted:g}, cut to the limits)"
        entry = replace(
            entry,
            last_grant=self._clock,
            grants=(*self._spent(entry), self._clock),
            refusal="",
        )
        if mode == "act":
            self._grant(
                knob,
                entry,
                policy=policy,
                value=value,
                verdict="granted",
                reason=reason,
                evidence=decision.evidence,
                judged=True,
            )
        else:
            self._observe(knob, entry, policy, value, reason, decision.evidence)

    def _obstacle(
        self, entry: KnobState, limits: KnobLimits, mode: Mode, knob: str
    ) -> tuple[str, str]:
        """Return kind and text of what stands in the way, or empty strings."""
        if self._clock < entry.blocked_until:
            return "ineffective", f"{knob} did not obey before"
        if entry.last_grant is not None and self._clock - entry.last_grant < limits.cooldown:
            since = self._clock - entry.last_grant
            return "cooldown", f"{since} of {limits.cooldown} steps of cool-down have passed"
        if len(self._spent(entry)) >= limits.budget:
            return "budget", f"{limits.budget} moves in {BUDGET_WINDOW} steps are spent"
        if mode == "act" and knob not in self._facts.reachable:
            return "unreachable", f"no actuator in this run can turn {knob}"
        return "", ""

    def _spent(self, entry: KnobState) -> tuple[int, ...]:
        return tuple(clock for clock in entry.grants if self._clock - clock < BUDGET_WINDOW)

    def _refuse(
        self, policy: str, knob: str, wanted: float, code: str, rule: str, decision: Decision
    ) -> None:
        entry = self._knobs.get(knob, _UNTOUCHED)
        feedback = KnobFeedback(
            step=self._observation.step,
            requested=wanted,
            granted=None,
            verdict="refused",
            reason=rule,
        )
        repeated = entry.refusal == code and self._clock - entry.refusal_clock < _REPEAT_AFTER
        if not repeated:
            entry = replace(entry, refusal=code, refusal_clock=self._clock)
            self._records.append(
                self._record(
                    policy,
                    knob,
                    wanted,
                    "refused",
                    f"{rule}: {decision.reason}",
                    decision.evidence,
                    entry,
                )
            )
        if knob in KNOBS and code != "conflict":
            self._store(knob, replace(entry, feedback=feedback))
        if code in ("unreachable", "budget"):
            advice = Advise(
                id=f"{code}-{knob}",
                message=f"{policy} would set {knob} to {wanted:g} because {decision.reason}, but "
                f"{rule}; set it by hand"
                + (" or train with mindtune's TrainStep." if code == "unreachable" else "."),
            )
            self._event(policy, "act", advice, f"{rule}: {decision.reason}", {})

    def _observe(
        self,
        knob: str,
        entry: KnobState,
        policy: str,
        value: float,
        reason: str,
        evidence: Evidence,
    ) -> None:
        self._written.add(knob)
        self._records.append(
            self._record(policy, knob, value, "observed", reason, evidence, entry)
        )
        feedback = KnobFeedback(
            step=self._observation.step,
            requested=value,
            granted=None,
            verdict="observed",
            reason="observe mode",
        )
        self._store(knob, replace(entry, feedback=feedback))

    def _grant(
        self,
        knob: str,
        entry: KnobState,
        *,
        policy: str,
        value: float,
        verdict: Verdict,
        reason: str,
        evidence: Evidence,
        judged: bool,
    ) -> None:
        _, limits = self._table[knob]
        record = self._record(policy, knob, value, verdict, reason, evidence, entry)
        baseline, spread = baseline_of(limits.check, self._state)
        self._records.append(record)
        self._written.add(knob)
        self._store(
            knob,
            replace(
                entry,
                feedback=KnobFeedback(
                    step=self._observation.step,
                    requested=value,
                    granted=value,
                    verdict=verdict,
                    reason=reason,
                ),
                pending=Pending(
                    record=record,
                    since=self._clock,
                    value=value,
                    before=self._acting(knob),
                    judged=judged,
                    baseline=baseline,
                    spread=spread,
                ),
            ),
        )
        self._give_out(knob, value)
        if knob == _BATCH:
            self._follow_batch(value, policy)

    def _give_out(self, knob: str, value: float) -> None:
        action = KNOBS[knob]
        if issubclass(action, (SetBatchSize, SetMicroBatch)):
            self._set_points[knob] = action(round(value))
        else:
            self._set_points[knob] = action(value * self._unit(knob))

    def _follow_batch(self, batch: float, policy: str) -> None:
        """Let the learning rate follow the batch."""
        base = self._base_batch or self._acting(_BATCH)
        if base is None:
            return
        factor = learning_rate_factor(self._facts.optimizer_family, batch / base)
        self._base_batch = base
        if factor == self._batch_factor or _LR not in self._facts.reachable:
            return
        own = self._own_learning_rate_scale()
        old, self._batch_factor = self._batch_factor, factor
        self._set_points[_LR] = SetLearningRateScale(own * factor)
        self._records.append(
            ActionRecord(
                step=self._observation.step,
                policy=policy,
                action=SetLearningRateScale.__name__,
                requested=own * factor,
                before=own * old,
                verdict="granted",
                reason=f"the learning rate follows the batch ({self._facts.optimizer_family}): "
                f"{base:g} to {batch:g} samples",
                evidence={"batch_factor": factor, "base_batch": base},
            )
        )

    def _own_learning_rate_scale(self) -> float:
        entry = self._knobs.get(_LR)
        if entry is not None and entry.pending is not None:
            return entry.pending.value
        acting = self._observation.learning_rate_scale
        if acting is not None and math.isfinite(acting):
            return acting / self._state.batch_factor
        if entry is not None and entry.feedback is not None and entry.feedback.granted is not None:
            return entry.feedback.granted
        return 1.0

    def finish(self) -> tuple[tuple[Action, ...], tuple[ActionRecord, ...], ArbiterState]:
        """Return what the actuators must apply, the records, and the next state."""
        observation, state = self._observation, self._state
        losses, throughputs = state.losses, state.throughputs
        if observation.loss is not None and math.isfinite(observation.loss):
            losses = push(losses, observation.loss, _RECENT)
        rate = tokens_per_second(observation)
        if rate is not None:
            throughputs = push(throughputs, rate, _RECENT)
        following = ArbiterState(
            clock=self._clock,
            last_step=observation.step,
            losses=losses,
            throughputs=throughputs,
            base_batch=self._base_batch,
            batch_factor=self._batch_factor,
            knobs=self._knobs,
            events=self._events,
        )
        grants = (*self._set_points.values(), *self._granted_events)
        return grants, tuple(self._records), following

    def _record(
        self,
        policy: str,
        knob: str,
        value: float,
        verdict: Verdict,
        reason: str,
        evidence: Evidence,
        entry: KnobState,
    ) -> ActionRecord:
        budget_left = None
        if knob in self._table:
            budget_left = max(0, self._table[knob][1].budget - len(self._spent(entry)))
        return ActionRecord(
            step=self._observation.step,
            policy=policy,
            action=KNOBS[knob].__name__,
            requested=value * self._unit(knob),
            before=self._raw(knob),
            verdict=verdict,
            reason=reason,
            evidence=evidence,
            budget_left=budget_left,
        )

    def _unit(self, knob: str) -> float:
        """Return what a policy's own value is multiplied by on its way out."""
        return self._batch_factor if knob == _LR else 1.0

    def _raw(self, knob: str) -> float | None:
        value: float | None = getattr(self._observation, knob, None)
        return value if value is not None and math.isfinite(value) else None

    def _acting(self, knob: str) -> float | None:
        """Return the acting value in the policy's own unit."""
        raw = self._raw(knob)
        return raw / self._state.batch_factor if raw is not None and knob == _LR else raw

    def _store(self, knob: str, entry: KnobState) -> None:
        self._knobs = {**self._knobs, knob: entry}


_UNTOUCHED = KnobState()


def _text(event: Event) -> str:
    if isinstance(event, Advise):
        return event.message
    return event.diagnosis if isinstance(event, RequestStop) else event.reason


def _with_effect(feedback: KnobFeedback | None, *, effective: bool) -> KnobFeedback | None:
    return None if feedback is None else replace(feedback, effective=effective)


def _cut(wanted: float, acting: float | None, limits: KnobLimits) -> float:
    value = wanted
    if acting is not None and acting > 0:
        value = min(max(value, acting / limits.max_factor), acting * limits.max_factor)
    return min(max(value, limits.low), limits.high)
