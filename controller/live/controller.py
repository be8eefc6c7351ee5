"""The controller of one run, without any framework: observe, decide, act, record.

Per optimizer step it hands one observation to the engine (detectors, policies, arbiter), turns the
knobs that the engine granted, and writes down what was seen and decided. Whether a knob obeyed is
seen by the engine in the next observation, which carries the values that acted. Every rank runs a
controller of its own on equal observations, so all come to equal decisions; only the one with a
recorder writes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from mindtune.controller.alerts.run_alerts import RunAlerts
from mindtune.controller.contract import DecisionRecord
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.actuators import Actuators
from mindtune.controller.live.snapshots import Snapshots
from mindtune.controller.live.state import ControllerState
from mindtune.controller.records.recorder import Recorder
from mindtune.policies.decisions import (
    GUARDS,
    Action,
    Advise,
    RequestStop,
    Rewind,
    SetBatchSize,
    SetLearningRateScale,
)
from mindtune.policies.engine import Engine, EngineState, StepResult
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Finding, Severity
from mindtune.policies.signals import Observation

__all__ = ["LiveController"]

_LOGGER = logging.getLogger(__name__)

_LEVELS: Final = {
    Severity.INFO: logging.INFO,
    Severity.WARNING: logging.WARNING,
    Severity.CRITICAL: logging.ERROR,
}

_SEVERITIES: Final = tuple(_LEVELS)
_INCIDENT_GAP: Final = 32


class LiveController:
    """Closes the loop of one run.

    Args:
        engine: Detectors, policies and arbiter.
        actuators: What turns the knobs.
        recorder: Where everything is written down; None on all ranks but the first, and where no
            records are kept.
        snapshots: Earlier states to return to; None: there are none.
        alerts: What tells people; None on all ranks but the first, and where nobody is told.
    """

    def __init__(
        self,
        engine: Engine,
        actuators: Actuators,
        *,
        recorder: Recorder | None = None,
        snapshots: Snapshots | None = None,
        alerts: RunAlerts | None = None,
    ) -> None:
        self._engine = engine
        self._actuators = actuators
        self._recorder = recorder
        self._snapshots = snapshots
        self._alerts = alerts
        self.engine_state: EngineState | None = None
        """State of detectors, policies and arbiter; None before `start`."""
        self.finding_counts: Counter[str] = Counter()
        """Incidents by kind of finding."""
        self.num_actions = 0
        """Actions that were granted and carried out; advice and guards (`decisions.GUARDS`) change
        nothing and are not counted."""
        self.stop_diagnosis: str | None = None
        """Why a policy ends the run; None while none does."""
        self.copied_state = False
        """Whether the last step's decisions copied the weights or brought an earlier copy back,
        which takes time."""
        self._incidents: dict[str, tuple[int, int]] = {}
        self._told: set[str] = set()

    def take_over(self, facts: RunFacts) -> None:
        """Put to rest what manages the acting policies' knobs otherwise, before the first step."""
        self._actuators.take_over(self._engine.owned_knobs(facts))

    def restore(self, saved: ControllerState) -> None:
        """Set again what a saved run had set, as far as somebody will move it."""
        self._actuators.restore(self._engine.restorable(saved.engine, saved.knobs))

    def start(self, facts: RunFacts, *, saved: Mapping[str, Any] | None = None) -> bool:
        """Begin with what holds for the whole run, or go on with a saved state of the engine.

        Returns:
            Whether all of a saved state could be read; what could not is in the log.
        """
        self.take_over(facts)
        if saved is None:
            self.engine_state = self._engine.init(facts)
            return True
        restored = self._engine.from_json(saved, facts)
        self.engine_state = restored.state
        if restored.message is not None:
            _LOGGER.warning("%s", restored.message)
        return restored.message is None

    def step(self, observation: Observation, *, recorded: Observation | None = None) -> StepResult:
        """Decide on one optimizer step and carry it out.

        Args:
            observation: What was measured, equal on all ranks.
            recorded: The row to write, where this rank knows more than all ranks agree on.

        Returns:
            What was found, granted and recorded.
        """
        assert self.engine_state is not None, "start comes before the first step"  # noqa: S101
        result = self._engine.step(observation, self.engine_state)
        self.engine_state = result.state
        alarm = self._take_findings(result.findings)
        self.copied_state = False
        refusals, returned = self._carry_out(result.grants, observation)
        self._record(result, refusals, returned)
        if self._snapshots is not None and not returned:
            self.copied_state = self._snapshots.note(observation.step, healthy=result.healthy)
        if self._recorder is not None:
            self._recorder.observation(
                recorded or observation, alarm=alarm or bool(result.records)
            )
        return result

    def report(self, finding: Finding) -> None:
        """Take in a finding that no observation shows, such as a hang; any thread may call."""
        if not self._take_findings((finding,)):
            return
        self._tell(
            finding.step,
            source="sensors",
            advice=Advise(f"{finding.kind.value}-{finding.step}", finding.message),
        )

    def report_once(self, finding: Finding) -> None:
        """Take in a finding of a kind that is told once in a run."""
        if not self.finding_counts[finding.kind.value]:
            self.report(finding)

    def advise(self, step: int, advice: Advise, *, source: str) -> None:
        """Tell the user something once: in the log and as a decision record."""
        if advice.id not in self._told:
            _LOGGER.warning("step %d: %s: %s", step, source, advice.message)
            self._tell(step, source=source, advice=advice)

    def _take_findings(self, findings: Iterable[Finding]) -> bool:
        """Count and log new incidents, and those that grow worse; tell whether one is an alarm.

        A detector says every step that something goes on; it is one incident as long as it does
        not pause for `_INCIDENT_GAP` steps.
        """
        alarm = False
        for finding in findings:
            kind = finding.kind.value
            rank = _SEVERITIES.index(finding.severity)
            known = self._incidents.get(kind)
            goes_on = known is not None and finding.step - known[0] <= _INCIDENT_GAP
            worst = max(rank, known[1]) if known is not None and goes_on else rank
            self._incidents[kind] = (finding.last_step, worst)
            if known is not None and goes_on and rank <= known[1]:
                continue
            if not goes_on:
                self.finding_counts[kind] += 1
            alarm = alarm or finding.severity is not Severity.INFO
            if self._alerts is not None:
                # Before the log, which a run that hangs may not take any more.
                self._alerts.finding(finding)
            _LOGGER.log(
                _LEVELS[finding.severity], "step %d: %s: %s", finding.step, kind, finding.message
            )
        return alarm

    def _carry_out(
        self, grants: Iterable[Action], observation: Observation
    ) -> tuple[dict[Action, str], dict[Action, int]]:
        """Do what was granted.

        Returns:
            What could not be done, with the reasons, and the steps that were returned to.
        """
        acting_scale = observation.learning_rate_scale or 0.0
        refusals: dict[Action, str] = {}
        returned: dict[Action, int] = {}
        # The batch comes first: the learning rate may follow it.
        for action in sorted(grants, key=lambda action: not isinstance(action, SetBatchSize)):
            match action:
                case RequestStop(diagnosis=diagnosis):
                    self.stop_diagnosis = self.stop_diagnosis or diagnosis
                case Advise(id=name, message=message):
                    if name not in self._told:
                        self._told.add(name)
                        _LOGGER.warning("step %d: advice: %s", observation.step, message)
                    continue
                case Rewind():
                    try:
                        returned[action] = self._rewind()
                    except ConfigError as error:
                        refusals[action] = str(error)
                        if self.engine_state is not None:
                            self.engine_state = self.engine_state.without_rewind()
                        continue
                case SetLearningRateScale(value) if value > acting_scale and _has_batch(refusals):
                    refusals[action] = "the batch, which it may follow, could not be resized"
                    continue
                case _:
                    try:
                        self._actuators.apply(action)
                    except ConfigError as error:
                        refusals[action] = str(error)
                        continue
            self.num_actions += not isinstance(action, GUARDS)
        return refusals, returned

    def _rewind(self) -> int:
        """Return to the newest healthy state; the result is its step."""
        if self._snapshots is None:
            raise ConfigError(
                "this run keeps no earlier states to return to; restart from a checkpoint."
            )
        step = self._snapshots.rewind()
        self.copied_state = True
        return step

    def _record(
        self, result: StepResult, refusals: dict[Action, str], returned: dict[Action, int]
    ) -> None:
        """Log what was granted and write all records, with what the actuators made of them."""
        refused: dict[tuple[str, object], str] = {
            (type(action).__name__, _requested(action)): why for action, why in refusals.items()
        }
        steps = {_requested(action): step for action, step in returned.items()}
        for entry in result.records:
            record = DecisionRecord(
                step=entry.step,
                policy=entry.policy,
                action=entry.action,
                requested=entry.requested,
                before=entry.before,
                acted=entry.acted,
                verdict=entry.verdict,
                reason=entry.reason,
                evidence=dict(entry.evidence),
                outcome=entry.outcome,
                budget_left=entry.budget_left,
            )
            why = refused.get((entry.action, entry.requested))
            if why is not None and entry.verdict == "granted":
                record = record.model_copy(update={"verdict": "refused", "reason": why})
            self._log(record)
            if entry.action == Rewind.__name__ and entry.requested in steps:
                step = steps[entry.requested]
                record = record.model_copy(update={"acted": float(step)})
                _LOGGER.warning("step %d: returned to the state of step %d", entry.step, step)
            if self._recorder is not None:
                self._recorder.decision(record)
            if self._alerts is not None:
                self._alerts.decision(record, diagnosis=self.stop_diagnosis)

    def _log(self, record: DecisionRecord) -> None:
        """One line per action that was granted, undone or could not be carried out."""
        if record.acted is not None or record.outcome is not None:
            # The record was written before; it only completes now.
            if record.outcome is not None:
                _LOGGER.info(
                    "step %d: %s: %s: outcome: %s",
                    record.step,
                    record.policy,
                    record.action,
                    record.outcome,
                )
            return
        if record.action == Advise.__name__ and record.verdict == "granted":
            # It was logged when it was carried out.
            return
        level = logging.INFO if record.verdict == "observed" else logging.WARNING
        _LOGGER.log(
            level,
            "step %d: %s: %s %s -> %s %s: %s",
            record.step,
            record.policy,
            record.action,
            record.before,
            record.requested,
            record.verdict,
            record.reason,
        )

    def _tell(self, step: int, *, source: str, advice: Advise) -> None:
        """Write down an advice of the controller's own, and everything before it."""
        self._told.add(advice.id)
        if self._recorder is not None:
            self._recorder.decision(
                DecisionRecord(
                    step=step,
                    policy=source,
                    action=Advise.__name__,
                    requested=advice.id,
                    verdict="granted",
                    reason=advice.message,
                )
            )
            self._recorder.flush()


def _has_batch(actions: Iterable[Action]) -> bool:
    return any(isinstance(action, SetBatchSize) for action in actions)


def _requested(action: Action) -> float | int | str:
    match action:
        case RequestStop(id=name) | Advise(id=name) | Rewind(id=name):
            return name
        case _:
            return action.value
