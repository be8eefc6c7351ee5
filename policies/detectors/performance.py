"""Who waits for whom: starved device, under-fed device, slow steps, full memory.

Theory of operation. Data share and utilization are taken over `sustained` steps, so that one slow
batch or one sample of a coarse utilization counter decides nothing. The share is the sum of the
waiting times over the sum of the step times. A record that stands for several steps (a log with
an interval) counts as that many.

A device with low utilization is **starved** if the pipeline makes it wait, and **under-fed** only
if it does not: the two look alike on the device and need opposite answers.

A **step-time spike** is judged like any outlier, with a higher threshold; the first steps after a
start (compilation) are never in the baseline, since it takes `early_after` samples to judge at
all and medians forget them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mindtune.policies.detectors.spike import SpikeState, judge_sample
from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Evidence, Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.windows import Window, push

__all__ = ["PerformanceState", "judge_performance"]

_MIN_STEPS = 8


@dataclass(frozen=True, slots=True)
class PerformanceState:
    """Newest times and utilizations."""

    step_times: SpikeState = field(default_factory=SpikeState)
    waits: tuple[float, ...] = ()
    """Seconds waited for data, newest last."""
    totals: tuple[float, ...] = ()
    """Seconds of the same steps."""
    waited_sum: float = 0.0
    total_sum: float = 0.0
    covered: int = 0
    """Steps that the waits stand for, up to `sustained`."""
    utilization: Window = field(default_factory=Window)
    last_step: int = -1
    mfu_reported: bool = False


def judge_performance(
    observation: Observation, state: PerformanceState, thresholds: DetectorThresholds
) -> tuple[tuple[Finding, ...], PerformanceState]:
    """Return the findings about time, utilization and memory, and the next state."""
    findings: list[Finding] = []
    first = state.last_step < 0
    step_time, wait = observation.step_time_s, observation.data_time_s
    step_times, waits, totals = state.step_times, state.waits, state.totals
    waited_sum, total_sum, covered = state.waited_sum, state.total_sum, state.covered
    if step_time is not None and math.isfinite(step_time) and step_time > 0:
        judgement, step_times = judge_sample(
            step_time, step_times, thresholds, score=thresholds.step_time_score
        )
        if judgement.flagged:
            findings.append(
                _finding(
                    observation,
                    FindingKind.STEP_TIME_SPIKE,
                    Severity.INFO,
                    f"the step took {step_time:.4g} s against {judgement.median:.4g} s.",
                    {
                        "step_time_s": step_time,
                        "median": judgement.median,
                        "score": judgement.score,
                        "threshold": judgement.threshold,
                        "consecutive": judgement.consecutive,
                    },
                )
            )
        # The first step of a run holds its compilation: it would hide any waiting.
        if not first and wait is not None and math.isfinite(wait) and wait >= 0:
            waits = push(waits, wait, thresholds.sustained)
            totals = push(totals, step_time, thresholds.sustained)
            gap = max(1, observation.step - state.last_step)
            covered = min(covered + gap, thresholds.sustained)
            # Summed anew: a running sum would drift.
            waited_sum, total_sum = sum(waits), sum(totals)
    measured = 0 < total_sum < math.inf and covered >= _MIN_STEPS
    share = waited_sum / total_sum if measured else None
    if share is not None and share > thresholds.data_share:
        findings.append(_stall(observation, share, covered, thresholds))
    utilization = state.utilization
    busy = observation.device_utilization
    if busy is not None and math.isfinite(busy):
        utilization = utilization.push(busy, thresholds.sustained)
        starved = share is not None and share > thresholds.data_share
        if len(utilization) == thresholds.sustained and not starved:
            findings.extend(_under_fed(observation, utilization.median(), share, thresholds))
    findings.extend(_memory(observation, thresholds))
    impossible = _impossible(observation, state)
    findings.extend(impossible)
    following = PerformanceState(
        step_times,
        waits,
        totals,
        waited_sum,
        total_sum,
        covered,
        utilization,
        observation.step,
        state.mfu_reported or bool(impossible),
    )
    return tuple(findings), following


def _stall(
    observation: Observation, share: float, covered: int, thresholds: DetectorThresholds
) -> Finding:
    starved = share > thresholds.starved_share
    return _finding(
        observation,
        FindingKind.DATA_STALL,
        Severity.CRITICAL if starved else Severity.WARNING,
        f"{share:.0%} of the time of the last {covered} steps was spent waiting for data (limit "
        f"{thresholds.data_share:.0%}).",
        {
            "share": share,
            "threshold": thresholds.data_share,
            "starved": int(starved),
            "window": covered,
        },
    )


def _under_fed(
    observation: Observation, busy: float, share: float | None, thresholds: DetectorThresholds
) -> tuple[Finding, ...]:
    if busy >= thresholds.low_utilization:
        return ()
    wait = "its data wait is not measured" if share is None else f"it waits {share:.0%} for data"
    return (
        _finding(
            observation,
            FindingKind.LOW_UTILIZATION,
            Severity.WARNING,
            f"the device was busy {busy:.0%} of the last {thresholds.sustained} steps (limit "
            f"{thresholds.low_utilization:.0%}) although {wait}: the batch is too small for it.",
            {
                "utilization": busy,
                "threshold": thresholds.low_utilization,
                "data_share": share,
                "window": thresholds.sustained,
            },
        ),
    )


def _memory(observation: Observation, thresholds: DetectorThresholds) -> tuple[Finding, ...]:
    total = observation.device_memory_total_bytes
    used = observation.memory_allocated_bytes
    if used is None:
        used = observation.device_memory_used_bytes
    if used is None or total is None or total <= 0 or used <= thresholds.memory_share * total:
        return ()
    share = used / total
    return (
        _finding(
            observation,
            FindingKind.MEMORY_PRESSURE,
            Severity.WARNING,
            f"{share:.0%} of the device memory is in use (limit {thresholds.memory_share:.0%}).",
            {"share": share, "threshold": thresholds.memory_share, "used_bytes": used},
        ),
    )


def _impossible(observation: Observation, state: PerformanceState) -> tuple[Finding, ...]:
    mfu = observation.mfu
    if mfu is None or state.mfu_reported or (math.isfinite(mfu) and 0 <= mfu <= 1):
        return ()
    return (
        _finding(
            observation,
            FindingKind.MFU_INVALID,
            Severity.WARNING,
            f"an MFU of {mfu:.4g} is impossible: the peak or the count of FLOPs is wrong.",
            {"mfu": mfu},
        ),
    )


def _finding(
    observation: Observation,
    kind: FindingKind,
    severity: Severity,
    message: str,
    evidence: Evidence,
) -> Finding:
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=kind,
        severity=severity,
        message=message,
        evidence=evidence,
    )
