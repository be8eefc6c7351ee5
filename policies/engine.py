"""The whole inner brain in one pure step: detectors, policies, arbiter.

`Engine.step` maps an observation and a state to findings, grants, records and the next state. It
holds no state itself, knows no clock and no randomness, so that a recorded run can be replayed
and all ranks decide alike from equal observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from mindtune.policies import detectors
from mindtune.policies.arbiter import Arbitration
from mindtune.policies.arbiter_state import ArbiterState
from mindtune.policies.baselines import baseline_of, rearmed
from mindtune.policies.decisions import Action, SetClipNorm, SetSkipThreshold
from mindtune.policies.detectors import DetectorState, DetectorThresholds
from mindtune.policies.errors import PolicyError
from mindtune.policies.facts import GradNormPriorLike, RunFacts
from mindtune.policies.findings import Finding
from mindtune.policies.health import HealthState, judge_health
from mindtune.policies.ledger import after_resume, without_rewind
from mindtune.policies.limits import KnobLimits
from mindtune.policies.policy import Feedback, Policy
from mindtune.policies.records import ActionRecord
from mindtune.policies.settings import Mode, PolicySettings, build
from mindtune.policies.signals import Observation, comparable
from mindtune.policies.state import STATE_SCHEMA, from_json, to_json
from mindtune.policies.state_class import state_class
from mindtune.policies.table import POLICIES

__all__ = ["Engine", "EngineState", "Restored", "StepResult", "build_engine"]

_DETECTORS = "detectors"
_USERS_AS_WELL = frozenset({SetClipNorm.knob, SetSkipThreshold.knob})
"""Knobs whose value may be the user's own, which their policies then leave alone."""

_Part = TypeVar("_Part")


@state_class(frozen=True, kw_only=True)
class EngineState:
    """Everything that the engine remembers; JSON through `to_json` and `Engine.from_json`."""

    facts: RunFacts
    """Facts of the run; given again on a restart, not stored."""
    detectors: DetectorState
    policies: Mapping[str, Any]
    """Policy name -> its own state."""
    arbiter: ArbiterState
    health: HealthState = field(default_factory=HealthState)

    def to_json(self) -> dict[str, Any]:
        """Return the state as a document for `json.dumps(..., allow_nan=False)`."""
        return {
            "schema": STATE_SCHEMA,
            "detectors": to_json(self.detectors),
            "policies": {name: to_json(state) for name, state in self.policies.items()},
            "arbiter": to_json(self.arbiter),
            "health": to_json(self.health),
        }

    def without_rewind(self) -> EngineState:
        """Return the state where the rewind that was granted last could not be carried out."""
        return replace(self, arbiter=without_rewind(self.arbiter))


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A state read back."""

    state: EngineState
    message: str | None
    """Why parts of the stored state were not taken over; None if all were."""


@state_class(frozen=True)
class StepResult:
    """What one step leads to."""

    findings: tuple[Finding, ...]
    """What the detectors saw at this step."""
    grants: tuple[Action, ...]
    """What the actuators must apply now; empty in observe mode."""
    records: tuple[ActionRecord, ...]
    """Lines for decisions.jsonl, new ones and completed earlier ones."""
    state: EngineState
    """To be handed to the next step."""
    healthy: bool = False
    """Whether the weights after this step are worth returning to; see `health`. In the first
    `health.COLD_STEPS` steps none are: there the state from before the first step is the one to
    return to."""


@dataclass(frozen=True)
class _Seat:
    """One enabled policy and its mode."""

    policy: Policy
    mode: Mode


@dataclass(frozen=True)
class Engine:
    """Detectors, policies and arbiter; made by `build_engine`."""

    seats: tuple[_Seat, ...]
    thresholds: DetectorThresholds
    prior: GradNormPriorLike | None = None
    _table: dict[str, tuple[str, KnobLimits]] = field(init=False, repr=False, compare=False)
    _modes: tuple[Mode, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table = {
            knob: (seat.policy.name, limits)
            for seat in self.seats
            for knob, limits in seat.policy.knobs.items()
        }
        object.__setattr__(self, "_table", table)
        modes = tuple(dict.fromkeys(seat.mode for seat in self.seats))
        object.__setattr__(self, "_modes", modes)

    def init(self, facts: RunFacts) -> EngineState:
        """Return the state before the first step."""
        return EngineState(
            facts=facts,
            detectors=DetectorState(),
            policies={seat.policy.name: seat.policy.init() for seat in self.seats},
            arbiter=ArbiterState(),
        )

    def owned_knobs(self, facts: RunFacts) -> frozenset[str]:
        """Return the reachable knobs that an acting policy manages in this run.

        What manages such a knob otherwise (the training step's own loss-scale rule) must rest.
        """
        owned = {
            knob
            for seat in self.seats
            if seat.mode == "act"
            for knob in seat.policy.knobs
            if knob in facts.reachable
        }
        if facts.loss_scale_dynamic is False:
            owned.discard("loss_scale")
        return frozenset(owned)

    def step(self, observation: Observation, state: EngineState) -> StepResult:
        """Return what this step's signals lead to.

        A step that was seen already changes nothing. Where the step goes back, as after a rewind,
        the detectors start anew. In other phases than training the times are passed over.
        """
        last_step = state.arbiter.last_step
        if observation.step == last_step:
            return StepResult((), (), (), state)
        observation = comparable(observation)
        detector_state = state.detectors if observation.step > last_step else DetectorState()
        if state.arbiter.rewound_step == last_step:
            detector_state = rearmed(detector_state, self.thresholds)
        findings, detector_state = detectors.update(
            observation, detector_state, self.thresholds, self.prior
        )
        turn = Arbitration(self._table, state.facts, observation, state.arbiter)
        turn.review()
        findings = (*findings, *turn.findings)
        seen = _in_own_units(observation, state.arbiter.batch_factor)
        feedback = {
            mode: Feedback(
                knobs=turn.feedback,
                facts=state.facts if mode == "act" else _out_of_reach(state.facts),
                rewound_step=state.arbiter.rewound_step,
                grad_norm=baseline_of(detector_state.grad_norm, self.thresholds),
            )
            for mode in self._modes
        }
        policy_states: dict[str, Any] = {}
        for seat in self.seats:
            name = seat.policy.name
            decision, policy_states[name] = seat.policy.decide(
                seen, findings, feedback[seat.mode], state.policies[name]
            )
            if decision.actions:
                turn.request(name, seat.mode, decision)
        grants, records, arbiter_state = turn.finish()
        healthy, health = judge_health(observation, findings, state.health)
        following = EngineState(
            facts=state.facts,
            detectors=detector_state,
            policies=policy_states,
            arbiter=arbiter_state,
            health=health,
        )
        return StepResult(findings, grants, records, following, healthy)

    def _owned(self, arbiter: ArbiterState) -> ArbiterState:
        """Return the state where nobody waits for what a policy that is off now has set."""
        knobs = {
            knob: entry if knob in self._table else replace(entry, pending=None)
            for knob, entry in arbiter.knobs.items()
        }
        return replace(arbiter, knobs=knobs)

    def restorable(self, document: Any, knobs: Mapping[str, float]) -> dict[str, float]:
        """Return which values of a saved run are to be set again in the training step.

        All but those of guards (clip norm, skip threshold) whose policy does not act any more, or
        whose state cannot be read: it would take the saved value for the user's own and leave it
        where it is for ever.

        Args:
            document: What `EngineState.to_json` has written.
            knobs: Name of a knob -> its value in the saved run.
        """
        stored = document.get("policies") if isinstance(document, Mapping) else None
        parts = stored if isinstance(stored, Mapping) else {}
        return {
            knob: value
            for knob, value in knobs.items()
            if knob not in _USERS_AS_WELL or self._goes_on(self._table.get(knob), parts)
        }

    def _goes_on(self, owner: tuple[str, KnobLimits] | None, parts: Mapping[str, Any]) -> bool:
        """Return whether a knob's policy acts and goes on from its stored state."""
        for seat in self.seats:
            if owner is not None and seat.policy.name == owner[0] and seat.mode == "act":
                try:
                    from_json(type(seat.policy.init()), parts.get(owner[0]))
                except PolicyError:
                    return False
                return True
        return False

    def from_json(self, document: Any, facts: RunFacts) -> Restored:
        """Return the state that `EngineState.to_json` has written.

        What cannot be read starts afresh, part by part and with a message, since a run must not
        end for it, and budgets are kept where only the detectors have changed.
        """
        fresh = self.init(facts)
        if not isinstance(document, Mapping) or document.get("schema") != STATE_SCHEMA:
            version = document.get("schema") if isinstance(document, Mapping) else None
            return Restored(
                state=fresh,
                message=f"the stored policy state has schema {version!r}, this version reads "
                f"{STATE_SCHEMA}: detectors, policies and budgets start afresh.",
            )
        messages: list[str] = []

        def read(kind: type[_Part], part: Any, fresh_part: _Part, name: str) -> _Part:
            try:
                return from_json(kind, part)
            except PolicyError as error:
                messages.append(f"{name} ({error})")
                return fresh_part

        stored = document.get("policies")
        if not isinstance(stored, Mapping):
            stored = {}
            messages.append("all policies (their state is missing)")
        state = EngineState(
            facts=facts,
            detectors=read(
                DetectorState, document.get("detectors"), fresh.detectors, "the detectors"
            ),
            policies={
                name: read(type(part), stored[name], part, f"the policy {name}")
                if name in stored
                else part
                for name, part in fresh.policies.items()
            },
            arbiter=self._owned(
                after_resume(
                    read(ArbiterState, document.get("arbiter"), fresh.arbiter, "the budgets")
                )
            ),
            health=read(
                HealthState,
                document.get("health", to_json(fresh.health)),
                fresh.health,
                "the health",
            ),
        )
        if messages:
            return Restored(
                state=state,
                message="parts of the stored policy state cannot be read and start afresh: "
                + "; ".join(messages),
            )
        return Restored(state=state, message=None)


def build_engine(
    settings: Mapping[str, PolicySettings],
    *,
    mode: Mode,
    prior: GradNormPriorLike | None = None,
) -> Engine:
    """Return the engine of a run.

    Args:
        settings: Policy name -> settings; a policy that is not named has its defaults. The name
            `detectors` takes thresholds of the detectors.
        mode: Mode of the policies that have none of their own.
        prior: Gradient-norm statistics of earlier runs of this config.

    Raises:
        PolicyError: if a policy, limit or threshold is unknown or out of range.
    """
    unknown = [name for name in settings if name not in POLICIES and name != _DETECTORS]
    if unknown:
        raise PolicyError(
            f"there is no policy {', '.join(map(repr, unknown))}; allowed are "
            f"{', '.join((*POLICIES, _DETECTORS))}."
        )
    shared = settings.get(_DETECTORS, PolicySettings())
    if shared.limits:
        raise PolicyError(
            f"policies.{_DETECTORS} takes thresholds only, but got limits "
            f"{', '.join(shared.limits)}; give limits to a policy."
        )
    seats = tuple(
        _Seat(make(entry), entry.mode or mode)
        for name, make in POLICIES.items()
        if (entry := settings.get(name, PolicySettings())).enabled
    )
    thresholds = build(DetectorThresholds, shared.thresholds, f"policies.{_DETECTORS}.thresholds")
    return Engine(seats, thresholds, prior)


@lru_cache(maxsize=8)
def _out_of_reach(facts: RunFacts) -> RunFacts:
    """Return the facts as a policy in observe mode may see them."""
    return replace(facts, reachable=frozenset())


def _in_own_units(observation: Observation, batch_factor: float) -> Observation:
    """Return the observation without the part of the scale by which the rate follows the batch."""
    if batch_factor == 1.0 or observation.learning_rate_scale is None:
        return observation
    scale = observation.learning_rate_scale / batch_factor
    return replace(observation, learning_rate_scale=scale)
