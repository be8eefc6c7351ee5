"""What no step shows, but other records of a run, or all its ranks, tell at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mindtune.policies.diagnosis import History, RunContext
from mindtune.policies.findings import Finding, FindingKind, Severity

__all__ = ["judge_ending", "judge_last_step"]

_NON_FINITE = (FindingKind.NON_FINITE_LOSS, FindingKind.NON_FINITE_GRAD)


def judge_ending(history: History, context: RunContext) -> tuple[Finding, ...]:
    """Return what is found once a run has been read.

    Args:
        history: Its last segment.
        context: What its other records and its ranks tell.
    """
    first, last = history.first_step or history.last_step, history.last_step
    findings = []
    if context.idle_ranks is not None:
        kind = FindingKind.LOW_UTILIZATION
        findings.append(_found(first, last, kind, f"{context.idle_ranks}."))
    if context.hung:
        text = f"the run stood still after step {last}, as its watchdog has recorded."
        findings.append(_found(last, last, FindingKind.HANG, text))
    if context.outcome == "oom":
        text = f"the run ended after step {last} because memory ran out. {context.message}"
        findings.append(_found(last, last, FindingKind.MEMORY_PRESSURE, text.rstrip()))
    return tuple(findings)


def judge_last_step(incidents: Sequence[Finding], last_step: int) -> tuple[Finding, ...]:
    """Return incidents where a log that ends on a value that is not finite counts as faulty.

    Alone, such a step is no more than a warning, since a step after it may show that its update
    was skipped; where it is the last one, nothing does, and many programs end by it.

    Args:
        incidents: Those of its last segment.
        last_step: The last step of that.
    """
    return tuple(
        replace(incident, severity=Severity.CRITICAL)
        if incident.kind in _NON_FINITE
        and incident.last_step == last_step
        and incident.evidence.get("skipped") is None
        else incident
        for incident in incidents
    )


def _found(first: int, last: int, kind: FindingKind, message: str) -> Finding:
    return Finding(
        step=first, last_step=last, kind=kind, severity=Severity.CRITICAL, message=message
    )
