"""Readings that cannot be true: reported once each, and kept from every statistic.

A negative time, a utilization above 1, more memory in use than there is, a rate of infinity: each
says that a clock, a counter or a formula is wrong, and nothing about the run. The same holds for a
utilization that has been one and the same number for `stuck` steps while the device is not
saturated: real counters move. Non-finite losses and gradient norms are no such readings but
faults, judged elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mindtune.policies.detectors.non_finite import LARGEST
from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class

__all__ = ["ReadingState", "judge_readings"]

_ONE = 1.0 + 1e-6
_SATURATED = 0.95


@state_class(frozen=True, slots=True)
class ReadingState:
    """What was reported, and how long the utilization has stood still."""

    reported: tuple[str, ...] = ()
    """Signals of which an impossible reading was reported."""
    utilization: float = -1.0
    """Newest possible utilization."""
    still: int = 0
    """Steps in a row that repeated it."""


def judge_readings(
    observation: Observation, state: ReadingState, thresholds: DetectorThresholds
) -> tuple[tuple[Finding, ...], Observation, ReadingState]:
    """Return the findings, the observation without what cannot be true, and the next state."""
    wrong = _impossible(observation)
    busy = observation.device_utilization
    stuck: Finding | None = None
    if busy is not None and "device_utilization" not in wrong:
        if busy != state.utilization:
            state = ReadingState(state.reported, busy, 0)
        elif busy < _SATURATED:
            still = state.still + 1
            state = ReadingState(state.reported, busy, still)
            if still + 1 >= thresholds.stuck:
                observation = replace(observation, device_utilization=None)
            if still + 1 == thresholds.stuck:
                stuck = _stuck(observation, busy, still + 1)
    if not wrong:
        return (() if stuck is None else (stuck,)), observation, state
    findings = [] if stuck is None else [stuck]
    for name, rule in wrong.items():
        if name not in state.reported:
            findings.append(_wrong(observation, name, rule))
    names = (*state.reported, *(name for name in wrong if name not in state.reported))
    cleaned: dict[str, Any] = dict.fromkeys(wrong)
    state = ReadingState(names, state.utilization, state.still)
    return tuple(findings), replace(observation, **cleaned), state


def _impossible(o: Observation) -> dict[str, str]:
    """Return the signals that cannot be true, each with the rule that it breaks."""
    wrong: dict[str, str] = {}
    if o.step_time_s is not None and not 0 < o.step_time_s < LARGEST:
        wrong["step_time_s"] = "a step takes more than 0 s"
    if o.data_time_s is not None and not 0 <= o.data_time_s < LARGEST:
        wrong["data_time_s"] = "a wait takes 0 s or more"
    if o.tokens_per_s is not None and not 0 <= o.tokens_per_s < LARGEST:
        wrong["tokens_per_s"] = "a rate is a finite number, 0 or more"
    if o.mfu is not None and not 0 <= o.mfu <= 1:
        wrong["mfu"] = "it lies between 0 and 1: the peak or the count of FLOPs is wrong"
    if o.device_utilization is not None and not 0 <= o.device_utilization <= _ONE:
        wrong["device_utilization"] = "it lies between 0 and 1"
    if o.grad_norm is not None and o.grad_norm < 0 and o.grad_norm != -math.inf:
        wrong["grad_norm"] = "a norm is 0 or more"
    if o.learning_rate is not None and not 0 <= o.learning_rate < LARGEST:
        wrong["learning_rate"] = "a rate is a finite number, 0 or more"
    ratio = o.straggler_ratio
    if ratio is not None and not 0 < ratio < LARGEST:
        wrong["straggler_ratio"] = "a ratio of times is a finite number above 0"
    total: float | None = o.device_memory_total_bytes
    if total is not None and not 0 < total < LARGEST:
        wrong["device_memory_total_bytes"] = "a device has memory"
        total = None
    most = LARGEST if total is None else total
    if o.device_memory_used_bytes is not None and not 0 <= o.device_memory_used_bytes <= most:
        wrong["device_memory_used_bytes"] = "it lies between 0 and the memory of the device"
    if o.memory_allocated_bytes is not None and not 0 <= o.memory_allocated_bytes <= most:
        wrong["memory_allocated_bytes"] = "it lies between 0 and the memory of the device"
    return wrong


def _wrong(observation: Observation, name: str, rule: str) -> Finding:
    value = getattr(observation, name)
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.MFU_INVALID,
        severity=Severity.WARNING,
        message=f"{name} reads {value:.6g}, which is impossible: {rule}. Such readings are passed "
        "over, and figures made of them (MFU, throughput) are wrong.",
        evidence={"signal": name, "value": value, name: value},
    )


def _stuck(observation: Observation, busy: float, count: int) -> Finding:
    return Finding(
        step=observation.step - count + 1,
        last_step=observation.step,
        kind=FindingKind.MFU_INVALID,
        severity=Severity.WARNING,
        message=f"device_utilization has read exactly {busy:.4g} for {count} steps: the counter "
        "stands still, and says nothing about the load.",
        evidence={"signal": "device_utilization", "value": busy, "stuck": count},
    )
