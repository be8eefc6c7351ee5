"""What the policies saw and did about a fault, from the records of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mindtune.controller.contract import DecisionRecord
from mindtune.policies.engine import build_engine
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation

__all__ = ["SKIP_THRESHOLD", "SeenFault", "false_actions", "findings_of", "seen_fault",
           "steps_rewound"]  # fmt: skip

SKIP_THRESHOLD = "SetSkipThreshold"
"""Action that changes nothing before an update exceeds it."""
_HARMLESS = frozenset({"Advise", SKIP_THRESHOLD})


@dataclass(frozen=True, kw_only=True)
class SeenFault:
    """How a fault showed in the findings."""

    detected_step: int | None
    """Step whose signals led to the first finding that names it."""
    other_findings: dict[str, int]


def findings_of(steps: Sequence[Observation]) -> list[Finding]:
    """Return what the detectors find in a recorded run: the same as in the run itself."""
    engine = build_engine({}, mode="observe")
    state = engine.init(RunFacts(reachable=frozenset()))
    found: list[Finding] = []
    for observation in steps:
        result = engine.step(observation, state)
        state = result.state
        found += result.findings
    return found


def seen_fault(
    findings: Sequence[Finding],
    *,
    fault_step: int | None,
    expected: Collection[FindingKind],
    hung: bool,
) -> SeenFault:
    """Return when a fault was named, and what else was found.

    Args:
        findings: All of the run, in the order of its steps.
        fault_step: Step from which the fault acts; None: there is none.
        expected: Kinds that name it.
        hung: Whether the watchdog raised a hang, which is a finding of no step.
    """
    detected: int | None = None
    others: dict[str, int] = {}
    for finding in findings:
        right = finding.kind in expected
        # A shift of the level is declared many steps after the one that it begins with.
        if fault_step is not None and right and finding.last_step >= fault_step:
            detected = finding.last_step if detected is None else detected
        elif finding.severity is not Severity.INFO:
            others.setdefault(finding.kind.value, finding.step)
    if hung and FindingKind.HANG in expected:
        detected = fault_step
    return SeenFault(detected_step=detected, other_findings=dict(sorted(others.items())))


def false_actions(
    decisions: Sequence[DecisionRecord],
    steps: Sequence[Observation],
    *,
    fault_step: int | None,
    justified: Collection[str],
) -> dict[str, int]:
    """Count the granted actions that the fault does not justify, by kind.

    Advice changes nothing, and neither does a skip threshold that skips no update: of it, the
    updates count that it skipped without a cause.

    Args:
        decisions: Of the run.
        steps: Its steps.
        fault_step: Step from which the fault acts; None: there is none.
        justified: Kinds of action that are an answer to it.
    """
    counted: Counter[str] = Counter()
    for record in decisions:
        if record.verdict != "granted" or record.action in _HARMLESS:
            continue
        before = fault_step is None or record.step < fault_step
        if before or record.action not in justified:
            counted[record.action] += 1
    for step in steps:
        skipped = bool(step.update_skipped) and not step.overflow
        before = fault_step is None or step.step < fault_step
        if skipped and (before or SKIP_THRESHOLD not in justified):
            counted[SKIP_THRESHOLD] += 1
    return dict(sorted(counted.items()))


def steps_rewound(decisions: Sequence[DecisionRecord]) -> int:
    """Return by how many steps the rewinds of a run went back."""
    return sum(
        max(0, record.step - int(record.acted))
        for record in decisions
        if record.action == "Rewind" and record.verdict == "granted" and record.acted is not None
    )
