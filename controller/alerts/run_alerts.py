"""The alerts of one run: what is worth telling, from what the controller takes in."""

from __future__ import annotations

import socket
from pathlib import Path

from mindtune.controller.alerts.alert import (
    Alert,
    decision_alert,
    end_alert,
    finding_alert,
    killed_alert,
    stop_alert,
)
from mindtune.controller.alerts.courier import Courier
from mindtune.controller.alerts.limits import AlertLimits
from mindtune.controller.alerts.outbox import Outbox
from mindtune.controller.contract import AlertsSection, DecisionRecord, RunResult
from mindtune.policies.decisions import GUARDS, Advise, RequestStop, Rewind
from mindtune.policies.findings import Finding, Severity

__all__ = ["RunAlerts", "check_alerts", "open_alerts"]


_NO_ACTIONS = frozenset({Advise.__name__, *(guard.__name__ for guard in GUARDS)})
"""Decisions that change nothing by themselves: advice, and thresholds that follow the run."""


class RunAlerts:
    """Tells people about a run; any thread may call, and no call waits but `close`.

    Args:
        section: Who is told what.
        run: Name and place of the run, the first line of every alert.
        outbox: Where alerts leave.
        exits_on_hang: Whether a hang ends the process.
    """

    def __init__(
        self, section: AlertsSection, *, run: str, outbox: Outbox, exits_on_hang: bool = False
    ) -> None:
        self._section = section
        self._run = run
        self._outbox = outbox
        self._exits_on_hang = exits_on_hang
        self._least = list(Severity).index(Severity(section.min_severity))
        self._said_why = False

    def finding(self, finding: Finding) -> None:
        """Tell about a new incident, or one that grew worse."""
        alert = finding_alert(finding, run=self._run, exits=self._exits_on_hang)
        if alert.kind == "hang" or list(Severity).index(finding.severity) >= self._least:
            self._put(alert)
            if alert.kind == "hang" and self._exits_on_hang and self._wants(alert):
                self._said_why = True

    def decision(self, record: DecisionRecord, *, diagnosis: str | None) -> None:
        """Tell about an action that was carried out or undone, and about a stop.

        Args:
            record: What was decided.
            diagnosis: Why a policy ends the run, if one does.
        """
        if record.verdict not in ("granted", "undone") or record.action in _NO_ACTIONS:
            return
        if record.action == RequestStop.__name__:
            self._put(stop_alert(diagnosis or record.reason, step=record.step, run=self._run))
        elif record.outcome is None and (record.acted is None or record.action == Rewind.__name__):
            # Later records of the same action only complete it; a return is complete at once.
            self._put(decision_alert(record, run=self._run))

    def end(self, result: RunResult) -> None:
        """Tell how the run ended; nothing after a hang that ends it and was told."""
        if not self._said_why:
            self._put(end_alert(result, run=self._run))

    def close(self) -> None:
        """Wait for what is on its way, `END_DEADLINE_S` seconds at most."""
        self._outbox.close()

    def _wants(self, alert: Alert) -> bool:
        return alert.kind in self._section.on

    def _put(self, alert: Alert) -> None:
        if self._wants(alert):
            self._outbox.put(alert)


def open_alerts(
    section: AlertsSection | None,
    *,
    folder: Path | None,
    exits_on_hang: bool = False,
    with_will: bool = False,
    planted: bool = False,
) -> RunAlerts | None:
    """Return the alerts of a run, or None where nobody is to be told.

    Args:
        section: Who is told what.
        folder: The run's folder, whose name is the run's; None where nothing is written.
        exits_on_hang: Whether a hang ends the process.
        with_will: Whether people are told if this process is killed.
        planted: Whether faults are planted in the run on purpose, which every alert then says.

    Raises:
        ConfigError: An address cannot be used.
    """
    if section is None or not section.urls:
        return None
    place = "no folder" if folder is None else str(folder.resolve())
    name = "a run" if folder is None else f"run {folder.resolve().name}"
    run = f"{name} on {socket.gethostname()} ({place})"
    if planted:
        run = f"NO REAL RUN, faults are planted on purpose: {run}"
    will = killed_alert(run=run) if with_will and "end" in section.on else None
    courier = Courier(section.urls, will=will)
    limits = AlertLimits(min_interval_s=section.min_interval, max_per_hour=section.max_per_hour)
    outbox = Outbox(courier, limits, run=run)
    return RunAlerts(section, run=run, outbox=outbox, exits_on_hang=exits_on_hang)


def check_alerts(section: AlertsSection | None) -> None:
    """Refuse addresses that no alert could be sent to, without sending anything.

    Raises:
        ConfigError: A variable is not set, or apprise can make nothing of what it holds.
    """
    if section is not None and section.urls:
        Courier(section.urls).close()
