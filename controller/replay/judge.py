"""Runs a log through detectors and policies, and gathers what they say.

A segment that starts over (at or before the first step of all) is another training, with fresh
baselines; one that resumes goes on with the policies' memory, as a resumed run does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby, islice, pairwise

from mindtune.controller.contract import (
    DiagnosisRecord,
    FindingRecord,
    ReplayDecision,
    ReplayOutput,
    ReplayRun,
    SignalFigures,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers import LogStream
from mindtune.controller.replay.ending import judge_ending, judge_last_step
from mindtune.controller.replay.log_set import LogSet
from mindtune.controller.replay.unjudged import note, unjudged
from mindtune.policies.brief_log import BRIEF, judge_brief_log
from mindtune.policies.decisions import KNOBS
from mindtune.policies.diagnosis import Course, Diagnosis, History, RunContext, diagnose
from mindtune.policies.engine import Engine, EngineState
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.incidents import merge
from mindtune.policies.records import ActionRecord
from mindtune.policies.signals import SIGNAL_NAMES, Observation

__all__ = ["Witness", "replay"]

Witness = Callable[[Observation, tuple[Finding, ...]], None]
"""Told of each step as it is read, with what the detectors found in it."""

_FACTS = RunFacts(reachable=frozenset(KNOBS), can_rewind=True)
"""A log does not limit what could have been turned."""
_NEAR = 8
"""Records between two findings of a kind that still make one fault: detectors that judge blocks
report once per block of 8, and what comes back within as few steps has not been away."""
_INTERVAL_SAMPLE = 64
"""Steps by which the log interval of a segment is told."""
_NO_SIGNAL = frozenset({"step", "run", "phase"})
_TOLD_RUNS = 20
_CUT_SHORT = (
    "the compressed log breaks off: it is still being written or damaged, so its end, and what a "
    "damage has altered before it, cannot be judged."
)


@dataclass
class _Findings:
    """What has been collected so far."""

    signals: set[str] = field(default_factory=set)
    incidents: list[tuple[int, Finding]] = field(default_factory=list)
    decisions: list[ReplayDecision] = field(default_factory=list)
    diagnoses: list[DiagnosisRecord] = field(default_factory=list)
    runs: list[ReplayRun] = field(default_factory=list)

    def take_causes(
        self, run: int, history: History, incidents: tuple[Finding, ...], context: RunContext
    ) -> None:
        """Note the causes of what was found in a segment."""
        causes = diagnose(history, incidents, context)
        self.diagnoses += [_diagnosis(run, cause) for cause in causes]


def replay(
    log: LogStream | LogSet, engine: Engine, *, witness: Witness | None = None
) -> ReplayOutput:
    """Return what a log shows; it is read once, in bounded memory but for what is found.

    Args:
        log: What to read.
        engine: Detectors and policies.
        witness: Who besides looks at the steps; None: nobody.

    Raises:
        ConfigError: the log cannot be read, or has no step or no signal in it.
    """
    logs = LogSet.of(log) if isinstance(log, LogStream) else log
    collected = _collect(logs, engine, witness)
    runs = collected.runs
    if not runs:
        raise ConfigError(
            f"{logs.name} must hold at least one step, but the reader {logs.format} finds none "
            "in it; give another --format."
        )
    if not collected.signals:
        raise ConfigError(
            f"{logs.name} must tell of a signal such as the loss, but the reader {logs.format} "
            "finds steps and no number beside them; give another --format, and write numbers with "
            "a decimal point."
        )
    critical = any(finding.severity is Severity.CRITICAL for _, finding in collected.incidents)
    left_open = unjudged(collected.signals)
    return ReplayOutput(
        format=logs.format,
        records=logs.records,
        steps=sum(run.steps for run in runs),
        signals=[name for name in SIGNAL_NAMES if name in collected.signals],
        findings=[_finding(run, finding) for run, finding in collected.incidents],
        decisions=collected.decisions,
        verdict="faulty" if critical else "healthy",
        runs=runs,
        notes=[
            *logs.notes,
            *[_CUT_SHORT] * logs.is_cut,
            *_told_runs(runs),
            *note(left_open),
            *logs.how_read(),
        ],
        diagnoses=collected.diagnoses,
        unjudged=left_open,
    )


def _collect(logs: LogSet, engine: Engine, witness: Witness | None) -> _Findings:
    collected = _Findings()
    state: EngineState | None = None
    before: History | None = None
    incidents: tuple[Finding, ...] = ()
    run, first_step = 0, math.inf
    for run, group in groupby(logs, key=lambda observation: observation.run or 0):
        observations = iter(group)
        sample = list(islice(observations, _INTERVAL_SAMPLE))
        if state is None or sample[0].step <= first_step:
            state, before = engine.init(_FACTS), None
            first_step = sample[0].step
        if before is not None:
            before.resumed_from = None  # of a hundred segments only two are kept
        segment = _Segment(engine, state, run, collected, History(before), witness)
        found = segment.findings(chain(sample, observations))
        incidents = merge(found, gap=_NEAR * _interval(sample))
        stalls = any(incident.kind is FindingKind.DATA_STALL for incident in incidents)
        if len(sample) < BRIEF and not stalls:
            incidents += judge_brief_log(sample, engine.thresholds)
        collected.incidents += [(run, incident) for incident in incidents]
        collected.runs.append(segment.summary())
        collected.take_causes(run, segment.history, incidents, logs.context())
        state, before = segment.state, segment.history
    if before is not None:
        judged = judge_last_step(incidents, before.last_step)
        count = len(collected.incidents) - len(incidents)
        collected.incidents[count:] = [(run, incident) for incident in judged]
        ending = judge_ending(before, logs.context())
        if ending:
            collected.incidents += [(run, finding) for finding in ending]
            collected.diagnoses = [cause for cause in collected.diagnoses if cause.run != run]
            collected.take_causes(run, before, (*judged, *ending), logs.context())
    return collected


class _Segment:
    """The steps of one segment on their way through the engine."""

    def __init__(
        self,
        engine: Engine,
        state: EngineState,
        run: int,
        collected: _Findings,
        history: History,
        witness: Witness | None,
    ) -> None:
        self.run = run
        self.state = state
        self.history = history
        self._engine = engine
        self._collected = collected
        self._witness = witness
        self._unseen = [
            name
            for name in SIGNAL_NAMES
            if name not in _NO_SIGNAL and name not in collected.signals
        ]

    def findings(self, observations: Iterable[Observation]) -> Iterator[Finding]:
        """Yield the findings of each step; note signals and decisions on the way."""
        step, history = self._engine.step, self.history
        for observation in observations:
            self._note(observation)
            result = step(observation, self.state)
            self.state = result.state
            history.add(observation, result.findings)
            if self._witness is not None:
                self._witness(observation, result.findings)
            for record in result.records:
                if record.verdict == "observed":
                    self._collected.decisions.append(_decision(self.run, record))
            yield from result.findings

    def _note(self, observation: Observation) -> None:
        seen = [name for name in self._unseen if getattr(observation, name) is not None]
        if seen:
            self._collected.signals.update(seen)
            self._unseen = [name for name in self._unseen if name not in seen]

    def summary(self) -> ReplayRun:
        """Return what the segment was, once it was read."""
        history = self.history
        return ReplayRun(
            run=self.run,
            first_step=history.last_step if history.first_step is None else history.first_step,
            last_step=history.last_step,
            steps=history.steps,
            interval=history.interval,
            resumed=history.resumed_from is not None,
            skipped=history.skipped if history.measured("update_skipped") else None,
            signals={name: _figures(course) for name, course in history.courses()},
        )


def _figures(course: Course) -> SignalFigures:
    return SignalFigures(
        count=course.count,
        first=course.first,
        last=course.last,
        median=course.median,
        low=course.low,
        low_step=course.low_step,
        high=course.high,
        high_step=course.high_step,
        scatter=course.scatter,
        non_finite=course.non_finite,
    )


def _interval(sample: list[Observation]) -> int:
    """Return the usual distance of two steps that the log tells of."""
    gaps = [max(1, after.step - before.step) for before, after in pairwise(sample)]
    return statistics.median_low(gaps) if gaps else 1


def _finding(run: int, finding: Finding) -> FindingRecord:
    return FindingRecord(
        step=finding.step,
        last_step=finding.last_step,
        kind=finding.kind.value,
        severity=finding.severity.value,
        message=finding.message,
        evidence=dict(finding.evidence),
        run=run,
    )


def _decision(run: int, record: ActionRecord) -> ReplayDecision:
    text = record.evidence.get("text")
    return ReplayDecision(
        step=record.step,
        policy=record.policy,
        action=record.action,
        value=record.requested,
        reason=text if isinstance(text, str) and text else record.reason,
        run=run,
    )


def _diagnosis(run: int, entry: Diagnosis) -> DiagnosisRecord:
    return DiagnosisRecord(
        symptom=entry.symptom.value,
        cause=entry.cause,
        statement=entry.statement,
        confidence=entry.confidence.value,
        evidence_for=list(entry.evidence_for),
        evidence_against=list(entry.evidence_against),
        missing=list(entry.missing),
        next_steps=list(entry.next_steps),
        step=entry.step,
        last_step=entry.last_step,
        run=run,
    )


def _told_runs(runs: list[ReplayRun]) -> list[str]:
    """Say where the steps go back: nothing of them was left out."""
    told = [
        f"step {after.first_step} comes after step {before.last_step}: a restart, kept as segment "
        f"{after.run}."
        for before, after in pairwise(runs)
    ]
    if len(told) > _TOLD_RUNS:
        told = [*told[:_TOLD_RUNS], f"and {len(told) - _TOLD_RUNS} restarts more."]
    return told
