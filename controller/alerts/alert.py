"""One message to people: what happened, where, with which numbers, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from mindtune.controller.alerts.remedies import REMEDIES
from mindtune.controller.contract import AlertKind, DecisionRecord, RunResult
from mindtune.policies.findings import Finding, FindingKind, Severity

__all__ = ["Alert", "Level", "decision_alert", "doctor_alert", "end_alert", "finding_alert",
           "killed_alert", "stop_alert"]  # fmt: skip

Level = Literal["info", "success", "warning", "failure"]
"""The notify types of apprise, which services show as colours or icons."""

_LEVELS: Final[Mapping[Severity, Level]] = {
    Severity.INFO: "info",
    Severity.WARNING: "warning",
    Severity.CRITICAL: "failure",
}
_END_LEVELS: Final[Mapping[str, Level]] = {
    "ok": "success",
    "stopped": "warning",
    "interrupted": "warning",
}

_MAX_BYTES: Final = 1900
"""A WeCom robot takes 2048 bytes with the title, the least of the services in the README."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A message, equal in its title to all others of its kind.

    Chat systems fold messages of one title, so no title names a run, a step or a number.
    """

    kind: AlertKind
    title: str
    text: str
    level: Level
    step: int
    urgent: bool = False
    """The last word of a run, or that it stands still: no hourly limit holds it back."""

    def with_text(self, more: str) -> Alert:
        """Return the alert with a paragraph after its text."""
        return replace(self, text=f"{self.text}\n\n{more}")

    def short_text(self) -> str:
        """Return the text as far as every service takes it."""
        encoded = self.text.encode()
        if len(encoded) <= _MAX_BYTES:
            return self.text
        return encoded[: _MAX_BYTES - 3].decode(errors="ignore") + "..."


def finding_alert(finding: Finding, *, run: str, exits: bool) -> Alert:
    """Return the alert of a finding.

    Args:
        finding: What was found.
        run: Name and place of the run, for the first line.
        exits: Whether a hang ends the process.
    """
    hang = finding.kind is FindingKind.HANG
    ends = ["The process ends now, with exit code 3."] if hang and exits else []
    return Alert(
        kind="hang" if hang else "findings",
        title="[mindtune] hang" if hang else f"[mindtune] finding: {finding.kind.value}",
        text=_lines(
            run,
            f"step {finding.step}: {finding.kind.value} ({finding.severity.value})",
            finding.message,
            _numbers(finding.evidence),
            *ends,
            f"What to do: {REMEDIES[finding.kind]}",
        ),
        level=_LEVELS[finding.severity],
        step=finding.step,
        urgent=hang,
    )


def decision_alert(record: DecisionRecord, *, run: str) -> Alert:
    """Return the alert of an action that was carried out or undone."""
    left = "" if record.budget_left is None else f", {record.budget_left} more in its budget"
    change = "" if record.requested is None else f" {record.before} -> {record.requested}"
    undone = record.verdict == "undone"
    return Alert(
        kind="actions",
        title=f"[mindtune] {'undone' if undone else 'action'}: {record.action}",
        text=_lines(
            run,
            f"step {record.step}: {record.policy}: {record.action}{change}{left}",
            f"Reason: {record.reason}",
            _numbers(record.evidence),
            "What to do: nothing now; the change hurt and was taken back."
            if undone
            else "What to do: nothing now; the outcome is checked, and a change that hurts is "
            "undone. If it comes back often, look at the finding behind it.",
        ),
        level="warning",
        step=record.step,
    )


def stop_alert(diagnosis: str, *, step: int, run: str) -> Alert:
    """Return the alert of a run that a policy ends."""
    return Alert(
        kind="stop",
        title="[mindtune] stop",
        text=_lines(run, f"step {step}: the run is stopped.", diagnosis),
        level="failure",
        step=step,
        urgent=True,
    )


def end_alert(result: RunResult, *, run: str) -> Alert:
    """Return the alert of a run that is over, however it ended."""
    numbers = {
        "loss": result.final_loss,
        "validation loss": result.eval_loss,
        "MFU": result.mfu,
        "hours": result.wall_s / 3600.0,
    }
    found = ", ".join(f"{count} x {kind}" for kind, count in sorted(result.findings.items()))
    return Alert(
        kind="end",
        title="[mindtune] end",
        text=_lines(
            run,
            f"step {result.steps}: the run is over: {result.outcome}, {result.actions} actions",
            # The stack of an exception is in result.json; its first line says what it was.
            result.message.partition("\n")[0],
            _numbers(numbers),
            f"Findings: {found}" if found else "",
            "" if result.outcome == "ok" else "What to do: see result.json and the log.",
        ),
        level=_END_LEVELS.get(result.outcome, "failure"),
        step=result.steps,
        urgent=True,
    )


def killed_alert(*, run: str) -> Alert:
    """Return the alert of a run whose process is gone without having said a word."""
    return Alert(
        kind="end",
        title="[mindtune] end",
        text=_lines(
            run,
            "The process of rank 0 is gone: it was killed, ran out of memory, or crashed inside "
            "the framework.",
            "What to do: see the last lines of the log and of signals.csv, and the kernel's log "
            "for an out-of-memory kill; start again from the last checkpoint.",
        ),
        level="failure",
        step=0,
        urgent=True,
    )


def doctor_alert(host: str) -> Alert:
    """Return the alert by which `mindtune doctor` tries an address."""
    return Alert(
        kind="end",
        title="[mindtune] test",
        text=f"A test from {host}: alerts of mindtune arrive here. What to do: nothing.",
        level="info",
        step=0,
    )


def _lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)


def _numbers(evidence: Mapping[str, object]) -> str:
    shown = [f"{name} {_spell(value)}" for name, value in _known(evidence.items())]
    return f"Numbers: {', '.join(shown)}" if shown else ""


def _known(items: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
    return [(name, value) for name, value in items if value is not None]


def _spell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
