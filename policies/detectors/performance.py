"""Who waits for whom: starved device, under-fed device, slow steps.

Theory of operation. Data share and utilization are taken over `sustained` steps, so that one slow
batch or one sample of a coarse utilization counter decides nothing. The share is the sum of the
waiting times over the sum of the step times, the longest wait of `_MANY` or more left out. A
record that stands for several steps (a log with an interval) counts as that many.

A device with low utilization is **starved** if the pipeline makes it wait, and **under-fed** only
if it does not: the two look alike on the device and need opposite answers. Utilization is low when
three quarters of the readings are below the limit: one that swings around it is not under-fed.

A **step-time spike** is judged like any outlier, with a higher threshold; the first steps after a
start (compilation) are never in the baseline, since it takes `early_after` samples to judge at
all and medians forget them. One is a note. Slow steps that last become the new baseline, and that
shift is a warning, unless the batch has changed: then times start anew.
"""

from __future__ import annotations

import math
from dataclasses import field

from mindtune.policies.detectors.spike import Judgement, SpikeState, judge_sample
from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Evidence, Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import Window, push

__all__ = ["PerformanceState", "judge_performance"]

_MIN_STEPS = 8
_MANY = 8
_MOST = 0.75


@state_class(frozen=True, slots=True)
class PerformanceState:
    """Newest times and utilizations."""

    step_times: SpikeState = field(default_factory=SpikeState)
    waits: tuple[float, ...] = ()
    """Seconds waited for data, newest last."""
    totals: tuple[float, ...] = ()
    """Seconds of the same steps."""
    share: float | None = None
    """Share of the waits in these times; None while too few steps are measured."""
    covered: int = 0
    """Steps that the waits stand for, up to `sustained`."""
    utilization: Window = field(default_factory=Window)
    last_step: int = -1
    batch: float | None = None
    """Global batch of the step times."""

    def contradiction(self) -> str | None:
        """Return why no run can have stored these times; None if one can."""
        if len(self.waits) != len(self.totals):
            return f"there are {len(self.waits)} waits for {len(self.totals)} totals"
        return None


def judge_performance(
    observation: Observation, state: PerformanceState, thresholds: DetectorThresholds
) -> tuple[tuple[Finding, ...], bool, PerformanceState]:
    """Return the findings about time and load, whether slow steps begin, and the next state.

    Args:
        observation: The step; its times and utilization, if measured, are possible ones.
        state: State before the step.
        thresholds: When to report.
    """
    findings: tuple[Finding, ...] = ()
    begins = False
    step_time, wait = observation.step_time_s, observation.data_time_s
    step_times, waits, totals = state.step_times, state.waits, state.totals
    share, covered, batch = state.share, state.covered, state.batch
    samples = observation.global_batch_size
    if samples is not None and samples > 0:  # neither 0 nor NaN
        if batch is not None and samples != batch:
            step_times = SpikeState()
        batch = samples
    if step_time is not None:
        judgement, step_times = judge_sample(
            step_time, step_times, thresholds, score=thresholds.step_time_score
        )
        begins = judgement.begins
        if judgement.held:
            findings = _slow(observation, step_time, judgement)
        # The first step of a run holds its compilation: it would hide any waiting.
        if state.last_step >= 0 and wait is not None:
            waits = push(waits, min(wait, step_time), thresholds.sustained)
            totals = push(totals, step_time, thresholds.sustained)
            gap = max(1, observation.step - state.last_step)
            covered = min(covered + gap, thresholds.sustained)
            share = _share(waits, totals) if covered >= _MIN_STEPS else None
    starved = share is not None and share > thresholds.data_share
    if starved and share is not None:
        findings += (_stall(observation, share, covered, thresholds),)
    utilization = state.utilization
    busy = observation.device_utilization
    if busy is not None:
        utilization = utilization.push(busy, thresholds.sustained)
        if len(utilization.values) == thresholds.sustained and not starved:
            findings += _under_fed(observation, utilization, share, thresholds)
    following = PerformanceState(
        step_times,
        waits,
        totals,
        share,
        covered,
        utilization,
        observation.step,
        batch,
    )
    return findings, begins, following


def _share(waits: tuple[float, ...], totals: tuple[float, ...]) -> float | None:
    """Return the share of time that was waited, without the longest wait of many."""
    # Summed anew: a running sum would drift.
    waited, total = sum(waits), sum(totals)
    if len(waits) >= _MANY:
        longest = max(waits)
        waited -= longest
        total -= totals[waits.index(longest)]
    return waited / total if 0 < total < math.inf else None


def _slow(observation: Observation, step_time: float, judgement: Judgement) -> tuple[Finding, ...]:
    lasts = judgement.shifted_from is not None
    if not judgement.flagged and not lasts:
        return ()
    stays = f", and has stayed there for {len(judgement.held)} steps" if lasts else ""
    return (
        _finding(
            observation,
            FindingKind.STEP_TIME_SPIKE,
            Severity.WARNING if lasts else Severity.INFO,
            f"the step took {step_time:.4g} s against {judgement.median:.4g} s{stays}.",
            {
                "step_time_s": step_time,
                "median": judgement.median,
                "score": judgement.score,
                "threshold": judgement.threshold,
                "consecutive": judgement.consecutive,
                "lasts": int(lasts),
            },
        ),
    )


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
    observation: Observation, busy: Window, share: float | None, thresholds: DetectorThresholds
) -> tuple[Finding, ...]:
    if busy.ordered[int(_MOST * len(busy))] >= thresholds.low_utilization:
        return ()
    level = busy.median()
    wait = "its data wait is not measured" if share is None else f"it waits {share:.0%} for data"
    return (
        _finding(
            observation,
            FindingKind.LOW_UTILIZATION,
            Severity.WARNING,
            f"the device was busy {level:.0%} of the last {thresholds.sustained} steps (limit "
            f"{thresholds.low_utilization:.0%}) although {wait}: the batch is too small for it.",
            {
                "utilization": level,
                "threshold": thresholds.low_utilization,
                "data_share": share,
                "window": thresholds.sustained,
            },
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
