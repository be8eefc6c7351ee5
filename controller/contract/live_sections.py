"""Sections of a run's config that say who is told and how long a silence may last."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mindtune.controller.contract.base import ContractModel
from mindtune.controller.live.watchdog import WatchdogLimits
from mindtune.controller.units import Duration
from mindtune.policies.findings import FindingKind

__all__ = ["ALERT_KINDS", "AlertKind", "AlertsSection", "ProfilerSection", "WatchdogSection"]

AlertKind = Literal["findings", "actions", "stop", "hang", "end"]
"""What an alert is about; `end` includes crashes."""

ALERT_KINDS: tuple[AlertKind, ...] = ("findings", "actions", "stop", "hang", "end")

_ADDRESS = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
_RULE = (
    "must be a list of env:NAME, each an environment variable that holds an apprise URL, but got "
)
_REMEDY = (
    "; export the URL, as in MINDTUNE_ALERT_URL=slack://..., and write env:MINDTUNE_ALERT_URL"
)


class AlertsSection(ContractModel):
    """Who is told what while a run goes on; without `urls` nobody is.

    A URL of a chat or webhook is a secret, so it is only ever named; a refusal never repeats it.
    """

    SHOWS_VALUES: ClassVar[bool] = False

    urls: list[str] = Field(default_factory=list)
    """Each env:NAME, the environment variable with an apprise URL."""
    min_severity: Literal["info", "warning", "critical"] = "warning"
    """Least severity of a finding; actions, stop, hang and end have none."""
    min_interval: Duration = 600.0
    """Least time between two alerts of one title; what comes meanwhile is told as a digest."""
    max_per_hour: int = Field(default=20, ge=1)
    """Most alerts in an hour; stop, hang and end go out all the same. A DingTalk robot takes 20 a
    minute and is silenced for ten minutes after that, the tightest limit of those we know."""
    on: list[AlertKind] = Field(default_factory=lambda: list(ALERT_KINDS))
    """What alerts are about."""

    @model_validator(mode="before")
    @classmethod
    def _readable(cls, content: object) -> object:
        if isinstance(content, AlertsSection):
            return content
        if not isinstance(content, dict):
            raise ValueError(  # noqa: TRY004 - pydantic takes ValueError
                f"must be a mapping of keys such as urls, but got {_kind(content)}{_REMEDY}"
            )
        # A bare `on` is a boolean in YAML 1.1, also as a key.
        return {("on" if key is True else key): value for key, value in content.items()}

    @field_validator("urls", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        addresses = [value] if isinstance(value, str) else value
        if not isinstance(addresses, list):
            raise ValueError(f"{_RULE}{_kind(value)}{_REMEDY}")  # noqa: TRY004 - as above
        for address in addresses:
            if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
                raise ValueError(
                    f"{_RULE}{_kind(address)}, which is not shown since it may be a secret"
                    f"{_REMEDY}"
                )
        return list(dict.fromkeys(addresses))


def _kind(value: object) -> str:
    """Say what a value is, without the value."""
    return "a literal text" if isinstance(value, str) else type(value).__name__


class WatchdogSection(ContractModel):
    """Longest silences of a run, in seconds, by phase."""

    enabled: bool = True
    compile_s: float = Field(default=WatchdogLimits.compile_s, gt=0)
    train_min_s: float = Field(default=WatchdogLimits.train_min_s, gt=0)
    train_factor: float = Field(default=WatchdogLimits.train_factor, gt=0)
    eval_s: float = Field(default=WatchdogLimits.eval_s, gt=0)
    save_s: float = Field(default=WatchdogLimits.save_s, gt=0)
    exit_on_hang: bool = False
    """End the process with code 3 on a hang, so that a launcher can start it again."""

    def limits(self) -> WatchdogLimits:
        """Return the limits as the watchdog takes them."""
        limits: dict[str, Any] = self.model_dump(exclude={"enabled", "exit_on_hang"})
        return WatchdogLimits(**limits)


class ProfilerSection(ContractModel):
    """When MindSpore's profiler is opened for a few steps.

    An empty file `profile.request` in the run's folder always asks for it. No finding does unless
    it is named here: on a device, a window costs seconds of training.
    """

    findings: list[FindingKind] = Field(default_factory=list)
    """Kinds of findings that open it, such as step_time_spike, data_stall, low_utilization."""
    steps: int = Field(default=5, ge=1, le=100)
    """Steps of a window."""
    max_windows: int = Field(default=3, ge=0, le=1000)
    """Most windows of a run, resumes included; 0: none, whoever asks."""
    gap: int = Field(default=200, ge=1)
    """Least steps from one window to the next that a finding opens."""
