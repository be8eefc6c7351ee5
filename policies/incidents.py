"""Joins the findings of single steps into what a reader calls one fault."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mindtune.policies.findings import Finding, FindingKind, Severity

__all__ = ["merge"]

_ORDER = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


def merge(findings: Iterable[Finding], *, gap: int = 1) -> tuple[Finding, ...]:
    """Return one finding per fault: the same kind in steps at most `gap` apart.

    An incident has the message and evidence of its gravest finding (the first of them), and lasts
    from its first to its last step. Where it joins several findings the evidence says how many
    (`findings`).

    Args:
        findings: In the order of their steps.
        gap: Largest distance in steps that still makes one fault, such as some times the interval
            of a log.
    """
    incidents: list[Finding] = []
    newest: dict[FindingKind, int] = {}
    counts: list[int] = []
    for finding in findings:
        index = newest.get(finding.kind)
        if index is None or finding.step > incidents[index].last_step + gap:
            newest[finding.kind] = len(incidents)
            counts.append(1)
            incidents.append(finding)
            continue
        counts[index] += 1
        earlier = incidents[index]
        graver = _ORDER[finding.severity] > _ORDER[earlier.severity]
        incidents[index] = replace(
            finding if graver else earlier,
            step=min(earlier.step, finding.step),
            last_step=max(earlier.last_step, finding.last_step),
        )
    return tuple(
        incident
        if count == 1
        else replace(incident, evidence={**incident.evidence, "findings": count})
        for incident, count in zip(incidents, counts, strict=True)
    )
