"""Replays a log: what the detectors see in it, and what the policies would have done.

A log does not follow what a policy decides, so all policies observe: each decision is what the
policy would have asked for at that step of the run as it was, not a run that never happened. A
segment that starts over (at or before the first step of all) is another training, with fresh
baselines; one that resumes goes on with the policies' memory, as a resumed run does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby, islice, pairwise
from pathlib import Path
from typing import Any

from mindtune.controller.contract import (
    MINDFORMERS_KEY,
    ContractModel,
    FindingRecord,
    Learned,
    ReplayDecision,
    ReplayOutput,
    ReplayRun,
    parse,
    read_yaml,
)
from mindtune.controller.contract.study_file import PolicySection
from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers import LogStream
from mindtune.policies.decisions import KNOBS
from mindtune.policies.engine import Engine, EngineState, build_engine
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Finding, Severity
from mindtune.policies.incidents import merge
from mindtune.policies.records import ActionRecord
from mindtune.policies.settings import PolicySettings
from mindtune.policies.signals import SIGNAL_NAMES, Observation
from mindtune.policies.table import POLICIES

__all__ = ["load_engine", "replay"]

_FACTS = RunFacts(reachable=frozenset(KNOBS), can_rewind=True)
"""A log does not limit what could have been turned."""
_INTERVAL_SAMPLE = 64
"""Steps by which the log interval of a segment is told."""
_NO_SIGNAL = frozenset({"step", "run", "phase"})
_NEEDED_FOR = {
    ("loss",): "spikes, divergence, plateaus and a frozen loss",
    ("grad_norm",): "gradient spikes and clipping",
    ("overflow",): "overflows and storms of them",
    ("loss_scale",): "floor and runaway of the loss scale",
    ("step_time_s",): "slow and stalled steps",
    ("data_time_s",): "a starved data pipeline",
    ("device_utilization",): "an idle device",
    ("device_memory_used_bytes", "memory_allocated_bytes"): "memory pressure",
}
_TOLD_RUNS = 20
_CUT_SHORT = (
    "the compressed log breaks off: it is still being written or damaged, so its end, and what a "
    "damage has altered before it, cannot be judged."
)


class _PoliciesFile(ContractModel):
    """What `--policies` names."""

    policies: dict[str, PolicySection]
    learned: Learned = Learned()


def load_engine(policies: Path | None) -> Engine:
    """Return an engine whose policies all observe.

    Args:
        policies: YAML with a mapping by policy name, at its top or under `policies`, such as a
            best_config.yaml or a study file; None: defaults.

    Raises:
        ConfigError: the file is missing or not valid.
        PolicyError: a policy, limit or threshold is unknown or out of range.
    """
    told = _PoliciesFile(policies={}) if policies is None else _read_policies(policies)
    settings = {
        name: PolicySettings(
            enabled=section.enabled,
            mode="observe",
            limits=section.limits,
            thresholds=section.thresholds,
        )
        for name, section in told.policies.items()
    }
    return build_engine(settings, mode="observe", prior=told.learned.grad_norm)


def _read_policies(path: Path) -> _PoliciesFile:
    content: Any = read_yaml(path)
    if isinstance(content, dict) and isinstance(content.get(MINDFORMERS_KEY), dict):
        content = content[MINDFORMERS_KEY]
    if isinstance(content, dict) and "policies" not in content:
        known = {*POLICIES, "detectors"}
        if not known & set(content):
            raise ConfigError(
                f"{path} must hold settings by policy name ({', '.join(sorted(known))}), at its "
                f"top or under `policies`, but its keys are {', '.join(map(str, content))}."
            )
        content = {"policies": content}
    if isinstance(content, dict):
        content = {key: content[key] or {} for key in ("policies", "learned") if key in content}
    return parse(_PoliciesFile, content, source=str(path))


@dataclass
class _Story:
    """What has been collected so far."""

    signals: set[str] = field(default_factory=set)
    incidents: list[tuple[int, Finding]] = field(default_factory=list)
    decisions: list[ReplayDecision] = field(default_factory=list)
    runs: list[ReplayRun] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return sum(run.steps for run in self.runs)


def replay(log: LogStream, engine: Engine) -> ReplayOutput:
    """Return what a log shows; it is read once, in bounded memory but for what is found.

    Raises:
        ConfigError: the log cannot be read, or has no step or no signal in it.
    """
    story = _Story()
    state: EngineState | None = None
    first_step = math.inf
    for run, group in groupby(log, key=lambda observation: observation.run or 0):
        observations = iter(group)
        sample = list(islice(observations, _INTERVAL_SAMPLE))
        if state is None or sample[0].step <= first_step:
            state = engine.init(_FACTS)
            first_step = sample[0].step
        segment = _Segment(engine, state, run, story)
        found = segment.findings(chain(sample, observations))
        story.incidents += [(run, incident) for incident in merge(found, gap=_interval(sample))]
        story.runs.append(segment.summary())
        state = segment.state
    if not story.runs:
        raise ConfigError(
            f"{log.path} must hold at least one step, but the reader {log.format.name} finds none "
            "in it; give another --format."
        )
    if not story.signals:
        raise ConfigError(
            f"{log.path} must tell of a signal such as the loss, but the reader {log.format.name} "
            "finds steps and no number beside them; give another --format, and write numbers with "
            "a decimal point."
        )
    critical = any(finding.severity is Severity.CRITICAL for _, finding in story.incidents)
    signals = [name for name in SIGNAL_NAMES if name in story.signals]
    return ReplayOutput(
        format=log.format.name,
        records=log.records,
        steps=story.steps,
        signals=signals,
        findings=[_finding(run, finding) for run, finding in story.incidents],
        decisions=story.decisions,
        verdict="faulty" if critical else "healthy",
        runs=story.runs,
        notes=[
            *[_CUT_SHORT] * log.is_cut,
            *_told_runs(story.runs),
            *_missing(story.signals),
        ],
    )


class _Segment:
    """The steps of one segment on their way through the engine."""

    def __init__(self, engine: Engine, state: EngineState, run: int, story: _Story) -> None:
        self.state = state
        self._engine = engine
        self._run = run
        self._story = story
        self._unseen = [
            name for name in SIGNAL_NAMES if name not in _NO_SIGNAL and name not in story.signals
        ]
        self._steps = 0
        self._first: int | None = None
        self._last = 0

    def findings(self, observations: Iterable[Observation]) -> Iterator[Finding]:
        """Yield the findings of each step; note signals and decisions on the way."""
        for observation in observations:
            self._note(observation)
            result = self._engine.step(observation, self.state)
            self.state = result.state
            for record in result.records:
                if record.verdict == "observed":
                    self._story.decisions.append(_decision(self._run, record))
            yield from result.findings

    def _note(self, observation: Observation) -> None:
        self._steps += 1
        self._last = observation.step
        if self._first is None:
            self._first = observation.step
        seen = [name for name in self._unseen if getattr(observation, name) is not None]
        if seen:
            self._story.signals.update(seen)
            self._unseen = [name for name in self._unseen if name not in seen]

    def summary(self) -> ReplayRun:
        """Return what the segment was, once it was read."""
        return ReplayRun(
            run=self._run,
            first_step=self._last if self._first is None else self._first,
            last_step=self._last,
            steps=self._steps,
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


def _missing(signals: set[str]) -> list[str]:
    missing = [
        f"{purpose} (no {' or '.join(names)})"
        for names, purpose in _NEEDED_FOR.items()
        if not signals & set(names)
    ]
    return [f"this log does not tell, so nothing can be said of: {'; '.join(missing)}."] * bool(
        missing
    )
