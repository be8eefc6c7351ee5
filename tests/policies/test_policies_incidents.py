from __future__ import annotations

from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.incidents import merge


def at(
    step: int, kind: FindingKind, severity: Severity = Severity.INFO, message: str = ""
) -> Finding:
    return Finding(step=step, last_step=step, kind=kind, severity=severity, message=message)


SPIKE, OVERFLOW = FindingKind.LOSS_SPIKE, FindingKind.OVERFLOW


def test_steps_in_a_row_are_one_incident_with_its_gravest_message() -> None:
    findings = [
        at(5, SPIKE, message="first"),
        at(6, OVERFLOW),
        at(6, SPIKE, Severity.CRITICAL, "worst"),
        at(7, SPIKE, Severity.WARNING, "less"),
        at(9, SPIKE, message="another"),
    ]
    merged = merge(findings)
    assert [(f.step, f.last_step, f.kind, f.message) for f in merged] == [
        (5, 7, SPIKE, "worst"),
        (6, 6, OVERFLOW, ""),
        (9, 9, SPIKE, "another"),
    ]


def test_a_log_with_an_interval_gives_its_gap() -> None:
    findings = [at(step, SPIKE) for step in (100, 200, 300, 500)]
    assert [(f.step, f.last_step) for f in merge(findings, gap=100)] == [(100, 300), (500, 500)]
    assert len(merge(findings)) == 4


def test_nothing_gives_nothing() -> None:
    assert merge([]) == ()
