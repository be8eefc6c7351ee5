"""The arbiter's books of one step: what acts, what is granted, what is recorded.

The learning rate has two writers by design: the gradient-norm policy's factor, and the factor by
which the rate follows the batch. Policies see and ask for the former alone (their own unit); what
is given out and recorded is one set-point, their product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mindtune.policies.arbiter_state import ArbiterState, KnobState, Pending
from mindtune.policies.coupling import learning_rate_factor
from mindtune.policies.decisions import (
    GUARDS,
    KNOBS,
    Action,
    Advise,
    Event,
    RequestStop,
    Rewind,
    SetBatchSize,
    SetLearningRateScale,
    SetMicroBatch,
    SetPoint,
)
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Evidence
from mindtune.policies.limits import BUDGET_WINDOW, KnobLimits
from mindtune.policies.outcomes import baseline_of, tokens_per_second
from mindtune.policies.policy import KnobFeedback, Verdict
from mindtune.policies.records import ActionRecord
from mindtune.policies.settings import Mode
from mindtune.policies.signals import Observation
from mindtune.policies.windows import push

__all__ = ["BATCH", "KnobTable", "Ledger", "after_resume", "without_rewind"]

KnobTable = Mapping[str, tuple[str, KnobLimits]]
"""Knob -> the policy that may turn it, and what it is held to."""

BATCH = SetBatchSize.knob
_LR = SetLearningRateScale.knob
_RECENT = 16
_MAX_EVENTS = 64
_MAX_HISTORY = 6
_STOP = "stop "
_RETURNED = "returned to an earlier state"
_UNTOUCHED = KnobState()


class Ledger:
    """Collects one step's grants and records; `close` gives them out with the next state.

    Args:
        table: Owners and limits of the knobs.
        facts: Facts of the run.
        observation: The step's signals as reported.
        state: The arbiter's state after the step before; it is not changed.
    """

    def __init__(
        self, table: KnobTable, facts: RunFacts, observation: Observation, state: ArbiterState
    ) -> None:
        self.table = table
        self.facts = facts
        self.observation = observation
        self.state = state
        gap = observation.step - state.last_step if state.last_step >= 0 else 1
        self.clock = state.clock + max(1, gap)
        self.knobs = state.knobs
        self.records: list[ActionRecord] = []
        self.written: set[str] = set()
        self._base_batch = state.base_batch
        self._batch_factor = state.batch_factor
        self._events = state.events
        self._rewound_step = state.rewound_step
        self._history = state.history
        self._set_points: dict[str, SetPoint] = {}
        self._granted_events: list[Event] = []

    def entry(self, knob: str) -> KnobState:
        """Return a knob's history."""
        return self.knobs.get(knob, _UNTOUCHED)

    def store(self, knob: str, entry: KnobState) -> None:
        """Replace a knob's history."""
        self.knobs = {**self.knobs, knob: entry}

    def spent(self, entry: KnobState) -> tuple[int, ...]:
        """Return the clocks of the grants that count against the budget now."""
        return tuple(clock for clock in entry.grants if self.clock - clock < BUDGET_WINDOW)

    def raw(self, knob: str) -> float | None:
        """Return the value that the step reports for a knob; None for none, or an odd one."""
        value: float | None = getattr(self.observation, knob, None)
        if value is None or math.isfinite(value):
            return value
        return value if knob in self.table and value == self.table[knob][1].off else None

    def acting(self, knob: str) -> float | None:
        """Return the same in the policy's own unit."""
        raw = self.raw(knob)
        return raw / self.state.batch_factor if raw is not None and knob == _LR else raw

    def add_event(
        self, policy: str, mode: Mode, event: Event, reason: str, evidence: Evidence
    ) -> None:
        """Record an event, and give it out in act mode; one that was recorded before is not."""
        key = f"{_STOP}{event.id}" if isinstance(event, RequestStop) else event.id
        if key in self._events:
            return
        self._events = (*self._events[-_MAX_EVENTS + 1 :], key)
        if isinstance(event, RequestStop) and self._history:
            told = f"{event.diagnosis} Last actions: {'; '.join(self._history)}."
            event = replace(event, diagnosis=told)
        self.records.append(
            ActionRecord(
                step=self.observation.step,
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
            if isinstance(event, Rewind):
                self._rewound_step = self.observation.step
                self._remember(f"{policy} {_RETURNED}")

    def record(
        self,
        policy: str,
        knob: str,
        value: float,
        verdict: Verdict,
        reason: str,
        evidence: Evidence,
        entry: KnobState,
    ) -> ActionRecord:
        """Return a record about a set-point; `value` is in the policy's own unit."""
        budget_left = None
        if knob in self.table:
            budget_left = max(0, self.table[knob][1].budget - len(self.spent(entry)))
        return ActionRecord(
            step=self.observation.step,
            policy=policy,
            action=KNOBS[knob].__name__,
            requested=value * self._unit(knob),
            before=self.raw(knob),
            verdict=verdict,
            reason=reason,
            evidence=evidence,
            budget_left=budget_left,
        )

    def grant(
        self,
        policy: str,
        knob: str,
        value: float,
        verdict: Verdict,
        reason: str,
        evidence: Evidence,
        entry: KnobState,
    ) -> None:
        """Give out a set-point, record it, and await its effect and, if granted, its outcome."""
        if entry.pending is not None and entry.pending.judged:
            superseded = f"not judged: superseded at step {self.observation.step}"
            self.records.append(replace(entry.pending.record, outcome=superseded))
        record = self.record(policy, knob, value, verdict, reason, evidence, entry)
        self.records.append(record)
        self.written.add(knob)
        if KNOBS[knob] not in GUARDS:
            old = "unknown" if record.before is None else f"{record.before:g}"
            self._remember(f"{policy} set {knob} from {old} to {value * self._unit(knob):g}")
        baseline, spread = baseline_of(self.table[knob][1].check, self.state, self.observation)
        feedback = KnobFeedback(
            step=self.observation.step,
            requested=value,
            granted=value,
            verdict=verdict,
            reason=reason,
        )
        before = self.acting(knob)
        stuck = entry.pending is not None and entry.pending.before == before
        pending = Pending(
            record=record,
            since=self.clock,
            value=value,
            before=before,
            judged=verdict == "granted",
            baseline=baseline,
            spread=spread,
            # A knob that is turned at every step and never moves does not obey either.
            mismatches=entry.pending.mismatches if stuck and entry.pending is not None else 0,
        )
        self.store(knob, replace(entry, feedback=feedback, pending=pending))
        action = KNOBS[knob]
        if issubclass(action, (SetBatchSize, SetMicroBatch)):
            self._set_points[knob] = action(round(value))
        else:
            self._set_points[knob] = action(value * self._unit(knob))
        if knob == BATCH:
            self.follow_batch(value, policy)

    def _remember(self, action: str) -> None:
        told = f"step {self.observation.step}: {action}"
        self._history = (*self._history[-_MAX_HISTORY + 1 :], told)

    def follow_batch(self, batch: float, policy: str) -> None:
        """Let the learning rate follow the batch that will act."""
        base = self._base_batch or self.acting(BATCH)
        if base is None:
            return
        self._base_batch = base
        factor = learning_rate_factor(self.facts.optimizer_family, batch / base)
        if factor == self._batch_factor or _LR not in self.facts.reachable:
            return
        own = self._own_learning_rate_scale()
        old, self._batch_factor = self._batch_factor, factor
        self._set_points[_LR] = SetLearningRateScale(own * factor)
        self.records.append(
            ActionRecord(
                step=self.observation.step,
                policy=policy,
                action=SetLearningRateScale.__name__,
                requested=own * factor,
                before=own * old,
                verdict="granted",
                reason=f"the learning rate follows the batch ({self.facts.optimizer_family}): "
                f"from {base:g} samples to {batch:g}",
                evidence={"batch_factor": factor, "base_batch": base},
            )
        )

    def _own_learning_rate_scale(self) -> float:
        entry = self.entry(_LR)
        if entry.pending is not None:
            return entry.pending.value
        acting = self.acting(_LR)
        if acting is not None:
            return acting
        last = entry.feedback
        return last.granted if last is not None and last.granted is not None else 1.0

    def _unit(self, knob: str) -> float:
        """Return what a policy's own value is multiplied by on its way out."""
        return self._batch_factor if knob == _LR else 1.0

    def close(self) -> tuple[tuple[Action, ...], tuple[ActionRecord, ...], ArbiterState]:
        """Return what the actuators must apply, the records, and the next state."""
        observation, state = self.observation, self.state
        losses, throughputs = state.losses, state.throughputs
        if observation.loss is not None and math.isfinite(observation.loss):
            losses = push(losses, observation.loss, _RECENT)
        rate = tokens_per_second(observation)
        if rate is not None:
            throughputs = push(throughputs, rate, _RECENT)
        following = ArbiterState(
            clock=self.clock,
            last_step=observation.step,
            losses=losses,
            throughputs=throughputs,
            base_batch=self._base_batch,
            batch_factor=self._batch_factor,
            knobs=self.knobs,
            events=self._events,
            history=self._history,
            rewound_step=self._rewound_step,
        )
        grants = (*self._set_points.values(), *self._granted_events)
        return grants, tuple(self.records), following


def after_resume(state: ArbiterState) -> ArbiterState:
    """Return the books that a resumed run goes on with: what ended it once may end it again."""
    return replace(state, events=tuple(key for key in state.events if not key.startswith(_STOP)))


def without_rewind(state: ArbiterState) -> ArbiterState:
    """Return the books where the rewind that was granted last could not be carried out."""
    told = [index for index, action in enumerate(state.history) if action.endswith(_RETURNED)]
    history = state.history
    if told:
        history = (*history[: told[-1]], *history[told[-1] + 1 :])
    return replace(state, rewound_step=None, history=history)


def _text(event: Event) -> str:
    if isinstance(event, Advise):
        return event.message
    return event.diagnosis if isinstance(event, RequestStop) else event.reason
