"""What can be seen in the signals, judged once per step for all policies.

`update` is pure: it maps an observation and a state to findings and the next state. Findings are
given per step, for as long as the fault is visible; `incidents.merge` joins them for a reader.
"""

from __future__ import annotations

from dataclasses import field

from mindtune.policies.detectors.clipping import ClippingState, judge_clipping
from mindtune.policies.detectors.cold_start import ColdStartState, judge_cold_start
from mindtune.policies.detectors.course import CourseState, judge_course
from mindtune.policies.detectors.gradient import GradientState, judge_gradient
from mindtune.policies.detectors.leap import LeapState, judge_leap
from mindtune.policies.detectors.memory import MemoryState, judge_memory
from mindtune.policies.detectors.non_finite import LARGEST, NonFiniteState, judge_non_finite
from mindtune.policies.detectors.outliers import judge_outlier
from mindtune.policies.detectors.overflow import OverflowState, judge_overflow
from mindtune.policies.detectors.performance import PerformanceState, judge_performance
from mindtune.policies.detectors.periodic import PeriodicState, judge_period
from mindtune.policies.detectors.progress import ProgressState, judge_progress
from mindtune.policies.detectors.rate_jump import RateJumpState, judge_rate_jump
from mindtune.policies.detectors.readings import ReadingState, judge_readings
from mindtune.policies.detectors.scale_range import ScaleRangeState, judge_scale_range
from mindtune.policies.detectors.spike import SpikeState, judge_sample
from mindtune.policies.detectors.straggler import StragglerState, judge_straggler
from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.detectors.trend import TrendState, judge_trend
from mindtune.policies.detectors.untrained import UntrainedState, judge_untrained
from mindtune.policies.detectors.zero_loss import ZeroLossState, judge_zero_loss
from mindtune.policies.facts import GradNormPriorLike
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation, comparable
from mindtune.policies.state import ADDED
from mindtune.policies.state_class import state_class

__all__ = ["DetectorState", "DetectorThresholds", "update"]

_DEFAULT = DetectorThresholds()


@state_class(frozen=True, slots=True)
class DetectorState:
    """State of all detectors."""

    readings: ReadingState = field(default_factory=ReadingState)
    non_finite: NonFiniteState = field(default_factory=NonFiniteState)
    overflow: OverflowState = field(default_factory=OverflowState)
    scale_range: ScaleRangeState = field(default_factory=ScaleRangeState)
    loss: SpikeState = field(default_factory=SpikeState)
    loss_spikes: PeriodicState = field(default_factory=PeriodicState)
    cold_start: ColdStartState = field(default_factory=ColdStartState)
    leap: LeapState = field(default_factory=LeapState)
    rate_jump: RateJumpState = field(default_factory=RateJumpState)
    trend: TrendState = field(default_factory=TrendState)
    progress: ProgressState = field(default_factory=ProgressState)
    loss_level: float | None = None
    """Median of the loss's baseline."""
    grad_norm: SpikeState = field(default_factory=SpikeState)
    norm_spikes: PeriodicState = field(default_factory=PeriodicState)
    gradient: GradientState = field(default_factory=GradientState)
    course: CourseState = field(default_factory=CourseState)
    clipping: ClippingState = field(default_factory=ClippingState)
    performance: PerformanceState = field(default_factory=PerformanceState)
    slow_steps: PeriodicState = field(default_factory=PeriodicState)
    memory: MemoryState = field(default_factory=MemoryState)
    straggler: StragglerState = field(default_factory=StragglerState)
    last_step: int = -1
    hidden_reported: bool = False
    """Whether it was reported that steps are missing in between."""
    zero_loss: ZeroLossState = field(default_factory=ZeroLossState, metadata={ADDED: True})
    untrained: UntrainedState = field(default_factory=UntrainedState, metadata={ADDED: True})


def update(
    observation: Observation,
    state: DetectorState,
    thresholds: DetectorThresholds = _DEFAULT,
    prior: GradNormPriorLike | None = None,
) -> tuple[tuple[Finding, ...], DetectorState]:
    """Return what this step shows, and the next state.

    The times of steps that held a compilation, an evaluation or a save are passed over, and so
    are readings that cannot be true.

    Args:
        observation: The step.
        state: State after the step before.
        thresholds: When to report.
        prior: Gradient-norm statistics of earlier runs, until this run has its own.
    """
    findings, observation, readings = judge_readings(
        comparable(observation), state.readings, thresholds
    )
    found, non_finite = judge_non_finite(observation, state.non_finite)
    findings += found
    found, overflow = judge_overflow(observation, state.overflow, thresholds)
    findings += found
    found, scale_range = judge_scale_range(observation, state.scale_range, thresholds)
    findings += found
    step, last_step = observation.step, state.last_step
    interval = step - max(0, last_step)

    losses, loss_spikes, loss_level = state.loss, state.loss_spikes, state.loss_level
    cold_start, leap, trend, progress = state.cold_start, state.leap, state.trend, state.progress
    rate_jump, zero_loss = state.rate_jump, state.zero_loss
    untrained = state.untrained
    loss = _finite(observation.loss)
    loss_flagged = False
    if loss is not None:
        found, zero_loss = judge_zero_loss(observation, loss, interval, zero_loss, thresholds)
        findings += found
        judgement, losses = judge_sample(loss, losses, thresholds, score=thresholds.score)
        loss_level = judgement.median
        exploded, cold_start = judge_cold_start(observation, loss, cold_start, thresholds)
        leapt, leap = judge_leap(observation, loss, interval, judgement.armed, leap, thresholds)
        jumped, rate_jump = judge_rate_jump(observation, loss, judgement, rate_jump, thresholds)
        forgotten, untrained = judge_untrained(observation, loss, judgement, untrained)
        found, trend = judge_trend(observation, loss, judgement, trend, thresholds)
        if exploded and exploded[0].severity is Severity.INFO:
            # A note hides nothing that is worse.
            findings, exploded = findings + exploded, ()
        findings += exploded or leapt or jumped or forgotten or found
        loss_flagged = bool(judgement.held)
        if loss_flagged:
            kind = FindingKind.LOSS_SPIKE
            findings += judge_outlier(observation, kind, "loss", loss, judgement, thresholds)
            if judgement.begins:
                found, loss_spikes = judge_period(observation, "loss", interval, loss_spikes)
                findings += found
        else:
            found, progress = judge_progress(observation, loss, progress, thresholds)
            findings += found

    norms, norm_spikes = state.grad_norm, state.norm_spikes
    gradient, course, clipping = state.gradient, state.course, state.clipping
    norm = _finite(observation.grad_norm)
    if norm is not None:
        early = None
        if prior is not None and step <= prior.expires_after_steps:
            early = (prior.median, prior.mad)
        judgement, norms = judge_sample(
            norm, norms, thresholds, score=thresholds.score, prior=early
        )
        if judgement.held:
            kind = FindingKind.GRAD_NORM_SPIKE
            findings += judge_outlier(
                observation, kind, "gradient norm", norm, judgement, thresholds
            )
            if judgement.begins:
                found, norm_spikes = judge_period(observation, "grad_norm", interval, norm_spikes)
                findings += found
        found, gradient = judge_gradient(
            observation, norm, judgement, loss, loss_level, gradient, thresholds
        )
        findings += found
        found, norms, course = judge_course(
            observation, norm, judgement, norms, course, thresholds, loss_flagged=loss_flagged
        )
        findings += found
        found, clipping = judge_clipping(observation, judgement.median, clipping, thresholds)
        findings += found

    found, begins, performance = judge_performance(observation, state.performance, thresholds)
    findings += found
    slow_steps = state.slow_steps
    if begins:
        found, slow_steps = judge_period(observation, "step_time_s", interval, slow_steps)
        findings += found
    found, memory = judge_memory(observation, state.memory, thresholds)
    findings += found
    found, straggler = judge_straggler(observation, state.straggler, thresholds)
    findings += found
    hidden = last_step >= 0 and step > last_step + 1
    if hidden and not state.hidden_reported:
        findings += (_hidden(observation, last_step),)
    following = DetectorState(
        readings,
        non_finite,
        overflow,
        scale_range,
        losses,
        loss_spikes,
        cold_start,
        leap,
        rate_jump,
        trend,
        progress,
        loss_level,
        norms,
        norm_spikes,
        gradient,
        course,
        clipping,
        performance,
        slow_steps,
        memory,
        straggler,
        step,
        state.hidden_reported or hidden,
        zero_loss,
        untrained,
    )
    return findings, following


def _finite(value: float | None) -> float | None:
    # A whole number from a log becomes a float here, as it would be after a restart.
    return float(value) if value is not None and -LARGEST < value < LARGEST else None


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
