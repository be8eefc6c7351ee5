"""What can be seen in the signals, judged once per step for all policies.

`update` is pure: it maps an observation and a state to findings and the next state. Findings are
given per step, for as long as the fault is visible; `incidents.merge` joins them for a reader.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mindtune.policies.detectors.clipping import ClippingState, judge_clipping
from mindtune.policies.detectors.cold_start import ColdStartState, judge_cold_start
from mindtune.policies.detectors.non_finite import NonFiniteState, judge_non_finite
from mindtune.policies.detectors.overflow import OverflowState, judge_overflow
from mindtune.policies.detectors.performance import PerformanceState, judge_performance
from mindtune.policies.detectors.spike import Judgement, SpikeState, judge_sample
from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.detectors.trend import TrendState, judge_trend
from mindtune.policies.facts import GradNormPriorLike
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation, comparable

__all__ = ["DetectorState", "DetectorThresholds", "update"]

_DEFAULT = DetectorThresholds()


@dataclass(frozen=True, slots=True)
class DetectorState:
    """State of all detectors."""

    loss: SpikeState = field(default_factory=SpikeState)
    grad_norm: SpikeState = field(default_factory=SpikeState)
    cold_start: ColdStartState = field(default_factory=ColdStartState)
    trend: TrendState = field(default_factory=TrendState)
    non_finite: NonFiniteState = field(default_factory=NonFiniteState)
    overflow: OverflowState = field(default_factory=OverflowState)
    performance: PerformanceState = field(default_factory=PerformanceState)
    clipping: ClippingState = field(default_factory=ClippingState)
    last_step: int = -1
    hidden_reported: bool = False
    """Whether it was reported that steps are missing in between."""


def update(
    observation: Observation,
    state: DetectorState,
    thresholds: DetectorThresholds = _DEFAULT,
    prior: GradNormPriorLike | None = None,
) -> tuple[tuple[Finding, ...], DetectorState]:
    """Return what this step shows, and the next state.

    The times of steps that held a compilation, an evaluation or a save are passed over.

    Args:
        observation: The step.
        state: State after the step before.
        thresholds: When to report.
        prior: Gradient-norm statistics of earlier runs, until this run has its own.
    """
    observation = comparable(observation)
    findings, non_finite = judge_non_finite(observation, state.non_finite)
    found, overflow = judge_overflow(observation, state.overflow, thresholds)
    findings += found
    losses, cold_start, trend = state.loss, state.cold_start, state.trend
    loss = observation.loss
    if loss is not None and math.isfinite(loss):
        judgement, losses = judge_sample(loss, losses, thresholds, score=thresholds.score)
        findings += _outlier(observation, FindingKind.LOSS_SPIKE, "loss", loss, judgement)
        exploded, cold_start = judge_cold_start(observation, loss, cold_start, thresholds)
        found, trend = judge_trend(observation, loss, judgement, trend, thresholds)
        findings += exploded or found
    norms = state.grad_norm
    norm = observation.grad_norm
    center: float | None = None
    if norm is not None and math.isfinite(norm):
        early = None
        if prior is not None and observation.step <= prior.expires_after_steps:
            early = (prior.median, prior.mad)
        judgement, norms = judge_sample(
            norm, norms, thresholds, score=thresholds.score, prior=early
        )
        center = judgement.median
        kind = FindingKind.GRAD_NORM_SPIKE
        findings += _outlier(observation, kind, "gradient norm", norm, judgement)
    found, performance = judge_performance(observation, state.performance, thresholds)
    findings += found
    found, clipping = judge_clipping(observation, center, state.clipping, thresholds)
    findings += found
    hidden = state.last_step >= 0 and observation.step > state.last_step + 1
    if hidden and not state.hidden_reported:
        findings += (_hidden(observation, state.last_step),)
    following = DetectorState(
        losses,
        norms,
        cold_start,
        trend,
        non_finite,
        overflow,
        performance,
        clipping,
        observation.step,
        state.hidden_reported or hidden,
    )
    return findings, following


def _outlier(
    observation: Observation, kind: FindingKind, name: str, value: float, judgement: Judgement
) -> tuple[Finding, ...]:
    if not judgement.flagged:
        return ()
    spike = Finding(
        step=observation.step,
        last_step=observation.step,
        kind=kind,
        severity=Severity.WARNING if judgement.consecutive > 1 else Severity.INFO,
        message=f"the {name} {value:.4g} is {judgement.score:.1f} robust deviations above its "
        f"median {judgement.median:.4g} (limit {judgement.threshold:g}), "
        f"{judgement.consecutive} in a row.",
        evidence={
            "value": value,
            "median": judgement.median,
            "score": judgement.score,
            "threshold": judgement.threshold,
            "consecutive": judgement.consecutive,
            "count": judgement.flags,
        },
    )
    if judgement.shifted_from is None:
        return (spike,)
    shift = Finding(
        step=observation.step - judgement.consecutive + 1,
        last_step=observation.step,
        kind=FindingKind.LEVEL_SHIFT,
        severity=Severity.INFO,
        message=f"the {name} has moved from a level of {judgement.shifted_from:.4g} to {value:.4g}"
        f" and stays there for {judgement.consecutive} steps: this is its new baseline.",
        evidence={
            "signal": name.replace(" ", "_").replace("gradient", "grad"),
            "value": value,
            "median": judgement.shifted_from,
            "consecutive": judgement.consecutive,
        },
    )
    return (spike, shift)


def _hidden(observation: Observation, last_step: int) -> Finding:
    return Finding(
        step=last_step + 1,
        last_step=observation.step,
        kind=FindingKind.HIDDEN_STEPS,
        severity=Severity.INFO,
        message=f"step {observation.step} came after step {last_step}: the steps between are not "
        "seen (a log interval, or data sinking), so rules on steps in a row count records.",
        evidence={"last_step": last_step, "step": observation.step},
    )
