"""The second stage: decides which requests are granted, and answers for what was granted.

Theory of operation. `review` comes first in a step. It reads from the observation whether the last
grant of each knob took effect; a knob that still reports another value after its settling time is
found ineffective and left alone for `_BLOCKED_FOR` steps, twice as long each time. Once the
outcome of a grant can be judged, its record is completed, and a raise that made things worse is
taken back: that grant carries the verdict `undone`, needs no budget and no cool-down, and closes
the knob for its step.

`request` then takes the policies' decisions in the order of their priority (that of the table of
policies: what protects the weights goes before what makes the run faster). A set-point passes, in
this order: the knob is the policy's own, the number is finite, nobody wrote the knob in this step,
it differs from the acting value once it is cut to the largest factor per move and to the bounds,
the knob has obeyed, the cool-down is over, budget is left, and the knob is within reach. What
fails is recorded as refused with the reason; the same refusal is not recorded again within
`_REPEAT_AFTER` steps. Events pass once per id.

In observe mode everything is counted alike and recorded as observed, and nothing is given out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mindtune.policies.arbiter_state import ArbiterState, KnobState, Pending
from mindtune.policies.decisions import (
    KNOBS,
    Action,
    Advise,
    Decision,
    RequestStop,
    Rewind,
    SetPoint,
)
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.ledger import BATCH, KnobTable, Ledger
from mindtune.policies.limits import BUDGET_WINDOW, KnobLimits
from mindtune.policies.outcomes import follow, judge
from mindtune.policies.policy import KnobFeedback
from mindtune.policies.records import ActionRecord
from mindtune.policies.settings import Mode
from mindtune.policies.signals import Observation

__all__ = ["Arbitration"]

_REPEAT_AFTER = 64
_BLOCKED_FOR, _MOST_DOUBLINGS = 256, 8
# Knobs are float32 on the device.
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
        self._ledger = Ledger(table, facts, observation, state)
        self.findings: list[Finding] = []
        """Knobs that were found ineffective in this step."""

    @property
    def feedback(self) -> Mapping[str, KnobFeedback]:
        """What became of the last request on each knob."""
        return {
            knob: entry.feedback
            for knob, entry in self._ledger.knobs.items()
            if entry.feedback is not None
        }

    def finish(self) -> tuple[tuple[Action, ...], tuple[ActionRecord, ...], ArbiterState]:
        """Return what the actuators must apply, the records, and the next state."""
        return self._ledger.close()

    def review(self) -> None:
        """Complete, undo or block what was granted earlier."""
        for knob, entry in self._ledger.state.knobs.items():
            if entry.pending is not None:
                self._review(knob, entry, entry.pending)

    def _review(self, knob: str, entry: KnobState, before: Pending) -> None:
        ledger = self._ledger
        _, limits = ledger.table[knob]
        pending = follow(before, limits, ledger.observation, ledger.acting(knob))
        if pending.effective and not before.effective:
            pending = replace(pending, record=replace(pending.record, acted=ledger.raw(knob)))
            ledger.records.append(pending.record)
            feedback = _with_effect(entry.feedback, effective=True)
            entry = replace(entry, feedback=feedback, blocks=0)
        due = ledger.clock >= pending.since + limits.check_after + limits.settle
        if pending.mismatches >= limits.settle:
            self._block(knob, entry, pending)
        elif pending.judged and due:
            outcome = judge(pending, limits)
            if outcome.undo and pending.before is not None:
                self._undo(knob, entry, pending, pending.before, outcome.text)
            else:
                ledger.records.append(replace(pending.record, outcome=outcome.text))
                ledger.store(knob, replace(entry, pending=None))
        elif not pending.judged and (pending.effective or due):
            ledger.store(knob, replace(entry, pending=None))
        elif pending is not before:
            ledger.store(knob, replace(entry, pending=pending))

    def _undo(
        self, knob: str, entry: KnobState, pending: Pending, value: float, reason: str
    ) -> None:
        ledger = self._ledger
        ledger.records.append(replace(pending.record, outcome=f"undone: {reason}"))
        ledger.grant(
            ledger.table[knob][0],
            knob,
            value,
            "undone",
            reason,
            {"undoes_step": pending.record.step},
            replace(entry, pending=None, last_grant=ledger.clock),
        )

    def _block(self, knob: str, entry: KnobState, pending: Pending) -> None:
        """Leave a knob alone that reports another value than the one it was set to."""
        ledger = self._ledger
        owner, limits = ledger.table[knob]
        raw = ledger.raw(knob)
        text = (
            f"{knob} was set to {pending.record.requested}, but {limits.settle} steps later the "
            f"training step still reports {raw}"
        )
        ledger.records.append(replace(pending.record, acted=raw, outcome=f"ineffective: {text}"))
        self.findings.append(
            Finding(
                step=pending.record.step,
                last_step=ledger.observation.step,
                kind=FindingKind.KNOB_INEFFECTIVE,
                severity=Severity.WARNING,
                message=f"{text}: it does not obey.",
                evidence={"knob": knob, "requested": pending.record.requested, "acted": raw},
            )
        )
        ledger.store(
            knob,
            replace(
                entry,
                pending=None,
                blocked_until=ledger.clock + (_BLOCKED_FOR << min(entry.blocks, _MOST_DOUBLINGS)),
                blocks=entry.blocks + 1,
                feedback=_with_effect(entry.feedback, effective=False),
            ),
        )
        if knob == BATCH and pending.before is not None:
            ledger.follow_batch(pending.before, owner)
        advice = Advise(
            id=f"ineffective-{knob}",
            message=f"{text}: it does not read this knob. Train with mindtune's TrainStep, or "
            f"set the policy {owner} to observe.",
        )
        ledger.add_event(owner, "act", advice, f"{knob} does not obey", {})

    def request(self, policy: str, mode: Mode, decision: Decision) -> None:
        """Grant, observe or refuse what a policy asks for."""
        for action in decision.actions:
            if isinstance(action, (Rewind, RequestStop, Advise)):
                self._ledger.add_event(policy, mode, action, decision.reason, decision.evidence)
            else:
                self._request(policy, mode, action, decision)

    def _request(self, policy: str, mode: Mode, action: SetPoint, decision: Decision) -> None:
        ledger = self._ledger
        knob, wanted = action.knob, float(action.value)
        owner, limits = ledger.table.get(knob, ("", None))
        wish = _Wish(policy, mode, knob, wanted, decision)
        if owner != policy or limits is None:
            self._refuse(wish, "foreign", f"{knob} is not a knob of this policy")
            return
        if not math.isfinite(wanted) and wanted != limits.off:
            self._refuse(wish, "invalid", f"{knob} must be a finite number")
            return
        if knob in ledger.written:
            self._refuse(wish, "conflict", f"{knob} was already written in this step")
            return
        entry, acting = ledger.entry(knob), ledger.acting(knob)
        value = _cut(wanted, acting, limits)
        if acting is not None and math.isclose(value, acting, rel_tol=_SAME):
            return
        code, rule = self._obstacle(entry, limits, mode, knob)
        if code:
            self._refuse(wish, code, rule)
            return
        reason = decision.reason
        if value != wanted:
            reason = f"{reason} (asked for {wanted:g}, cut to the limits)"
        spent = (*ledger.spent(entry), ledger.clock)
        entry = replace(entry, last_grant=ledger.clock, grants=spent, refusal="")
        if mode == "act":
            ledger.grant(policy, knob, value, "granted", reason, decision.evidence, entry)
            return
        ledger.written.add(knob)
        ledger.records.append(
            ledger.record(policy, knob, value, "observed", reason, decision.evidence, entry)
        )
        feedback = KnobFeedback(
            step=ledger.observation.step,
            requested=value,
            granted=None,
            verdict="observed",
            reason="observe mode",
        )
        ledger.store(knob, replace(entry, feedback=feedback))

    def _obstacle(
        self, entry: KnobState, limits: KnobLimits, mode: Mode, knob: str
    ) -> tuple[str, str]:
        """Return kind and text of what stands in the way, or empty strings."""
        ledger = self._ledger
        if ledger.clock < entry.blocked_until:
            return "ineffective", f"{knob} did not obey before"
        if entry.last_grant is not None and ledger.clock - entry.last_grant < limits.cooldown:
            since = ledger.clock - entry.last_grant
            return "cooldown", f"{since} of {limits.cooldown} steps of cool-down have passed"
        if len(ledger.spent(entry)) >= limits.budget:
            return "budget", f"{limits.budget} moves in {BUDGET_WINDOW} steps are spent"
        if mode == "act" and knob not in ledger.facts.reachable:
            return "unreachable", f"no actuator in this run can turn {knob}"
        return "", ""

    def _refuse(self, wish: _Wish, code: str, rule: str) -> None:
        ledger, knob, decision = self._ledger, wish.knob, wish.decision
        entry = ledger.entry(knob)
        if entry.refusal != code or ledger.clock - entry.refusal_clock >= _REPEAT_AFTER:
            entry = replace(entry, refusal=code, refusal_clock=ledger.clock)
            ledger.records.append(
                ledger.record(
                    wish.policy,
                    knob,
                    wish.wanted,
                    "refused",
                    f"{rule}: {decision.reason}",
                    decision.evidence,
                    entry,
                )
            )
        if code in ("cooldown", "budget", "unreachable", "ineffective"):
            feedback = KnobFeedback(
                step=ledger.observation.step,
                requested=wish.wanted,
                granted=None,
                verdict="refused",
                reason=rule,
                effective=False if code == "ineffective" else None,
            )
            entry = replace(entry, feedback=feedback)
        if knob in KNOBS:
            ledger.store(knob, entry)
        if code not in ("unreachable", "budget"):
            return
        remedy = "train with mindtune's TrainStep, or set it by hand"
        if code == "budget":
            remedy = "look for the cause, which these moves did not cure"
        advice = Advise(
            id=f"{code}-{knob}",
            message=f"{wish.policy} would set {knob} to {wish.wanted:g}, because "
            f"{decision.reason}; but {rule}: {remedy}.",
        )
        ledger.add_event(
            wish.policy, wish.mode, advice, f"{rule}: {decision.reason}", decision.evidence
        )


@dataclass(frozen=True)
class _Wish:
    """A set-point on its way through the arbiter."""

    policy: str
    mode: Mode
    knob: str
    wanted: float
    decision: Decision


def _with_effect(feedback: KnobFeedback | None, *, effective: bool) -> KnobFeedback | None:
    return None if feedback is None else replace(feedback, effective=effective)


def _cut(wanted: float, acting: float | None, limits: KnobLimits) -> float:
    if wanted == limits.off:
        return wanted
    value = wanted
    if acting is not None and acting > 0 and acting != limits.off:
        value = min(max(value, acting / limits.max_factor), acting * limits.max_factor)
    return min(max(value, limits.low), limits.high)
