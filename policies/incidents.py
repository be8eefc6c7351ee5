"""Joins the findings of single steps into what a reader calls one fault."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mindtune.policies.findings import Finding, FindingKind, Severity

__all__ = ["Incidents", "merge"]

_ORDER = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


class Incidents:
    """One finding per fault, joined as they come: the same kind in steps at most `gap` apart.

    An incident has the message and evidence of its gravest finding (the first of them), and lasts
    from its first to its last step. Where it joins several findings the evidence says how many
    (`findings`).

    Args:
        gap: Largest distance in steps that still makes one fault, such as some times the interval
            of a log.
    """

    def __init__(self, *, gap: int = 1) -> None:
        self._gap = gap
        self._joined: list[Finding] = []
        self._counts: list[int] = []
        self._newest: dict[FindingKind, int] = {}

    def add(self, finding: Finding) -> None:
        """Take in the next finding, in the order of their steps."""
        index = self._newest.get(finding.kind)
        if index is None or finding.step > self._joined[index].last_step + self._gap:
            self._newest[finding.kind] = len(self._joined)
            self._counts.append(1)
            self._joined.append(finding)
            return
        self._counts[index] += 1
        earlier = self._joined[index]
        graver = _ORDER[finding.severity] > _ORDER[earlier.severity]
        self._joined[index] = replace(
            finding if graver else earlier,
            step=min(earlier.step, finding.step),
            last_step=max(earlier.last_step, finding.last_step),
        )

    def found(self) -> tuple[Finding, ...]:
        """Return the incidents so far."""
        return tuple(
            incident
            if count == 1
            else replace(incident, evidence={**incident.evidence, "findings": count})
            for incident, count in zip(self._joined, self._counts, strict=True)
        )


def merge(findings: Iterable[Finding], *, gap: int = 1) -> tuple[Finding, ...]:
    """Return one finding per fault; see `Incidents`.

    Args:
        findings: In the order of their steps.
        gap: As of `Incidents`.
    """
    incidents = Incidents(gap=gap)
    for finding in findings:
        incidents.add(finding)
    return incidents.found()
