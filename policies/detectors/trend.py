"""Where the loss is heading after the start: divergence and frozen loss.

Theory of operation. A **divergence** is a loss that is flagged as an outlier and rises: the median
of the last 8 losses is `diverged_score` robust deviations above the baseline, and the newer half
of them stands above the highest of the older half's flagged losses, so that a jump that the run is
recovering from is none. Or the loss climbs without a break: the medians of 3 rise 5 times in a row
by `climb_steps` typical steps from loss to loss, none of which makes more than half of the climb,
and have left the middle of the baseline.

A **frozen** loss is exactly the same non-zero number again and again. With updates being skipped
it is a dead run (weights that no longer change); otherwise it may be a coarse log.

Only finite losses come here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from mindtune.policies.detectors.spike import Judgement
from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.windows import median, push

__all__ = ["TrendState", "judge_trend"]

_RECENT = 8
_CLIMBING = 6
_LARGEST_SHARE = 0.5
_CLIMB_SCORE = 3.0


@dataclass(frozen=True, slots=True)
class TrendState:
    """Newest losses."""

    recent: tuple[float, ...] = ()
    """Newest finite losses."""
    distances: tuple[float, ...] = ()
    """Newest distances from loss to loss."""
    medians: tuple[float, ...] = ()
    """Newest medians of 3."""
    equal: int = 0
    """Losses in a row that equal the one before."""
    idle: int = 0
    """Of these, how many came with a skipped update or an overflow."""


def judge_trend(
    observation: Observation,
    loss: float,
    judgement: Judgement,
    state: TrendState,
    thresholds: DetectorThresholds,
) -> tuple[tuple[Finding, ...], TrendState]:
    """Return the findings about a finite loss, and the next state.

    Args:
        observation: The step.
        loss: Its loss.
        judgement: The verdict over it as a spike.
        state: State before it.
        thresholds: When to report.
    """
    findings: tuple[Finding, ...] = ()
    equal, idle = 0, 0
    if state.recent and loss == state.recent[-1] and loss != 0:
        equal = state.equal + 1
        idle = state.idle + int(bool(observation.update_skipped or observation.overflow))
        if equal + 1 >= thresholds.frozen:
            findings = (_frozen(observation, loss, equal + 1, idle),)
    recent = push(state.recent, loss, _RECENT)
    if len(recent) < 3:
        distances = (*state.distances, *(abs(loss - last) for last in state.recent[-1:]))
        return findings, TrendState(recent, distances, (), equal, idle)
    distances = push(state.distances, abs(loss - state.recent[-1]), _RECENT)
    a, b, c = recent[-3:]
    medians = push(state.medians, max(min(a, b), min(max(a, b), c)), _CLIMBING)
    if judgement.flagged and len(recent) == _RECENT:
        found = _divergence(observation, recent, judgement, thresholds)
    elif judgement.score >= _CLIMB_SCORE and len(medians) == _CLIMBING:
        found = _climb(observation, medians, distances, thresholds)
    else:
        found = ()
    return findings + found, TrendState(recent, distances, medians, equal, idle)


def _divergence(
    observation: Observation,
    recent: tuple[float, ...],
    judgement: Judgement,
    thresholds: DetectorThresholds,
) -> tuple[Finding, ...]:
    half = _RECENT // 2
    older, newer = max(recent[:half]), median(recent[half:])
    # One deviation, as the spike score counts it.
    deviation = (recent[-1] - judgement.median) / judgement.score
    limit = judgement.median + thresholds.diverged_score * deviation
    if newer <= older * thresholds.climb or median(recent) <= limit:
        return ()
    return (
        Finding(
            step=observation.step,
            last_step=observation.step,
            kind=FindingKind.DIVERGENCE,
            severity=Severity.CRITICAL,
            message=f"the loss stands at {newer:.4g} against {judgement.median:.4g} before, and "
            f"rises (at most {older:.4g} until {half} steps ago).",
            evidence={
                "cold_start": 0,
                "loss": newer,
                "median": judgement.median,
                "threshold": thresholds.diverged_score,
                "window": _RECENT,
            },
        ),
    )


def _climb(
    observation: Observation,
    medians: tuple[float, ...],
    distances: tuple[float, ...],
    thresholds: DetectorThresholds,
) -> tuple[Finding, ...]:
    steps = [later - earlier for earlier, later in pairwise(medians)]
    rise = medians[-1] - medians[0]
    if (
        min(steps) <= 0
        or max(steps) > _LARGEST_SHARE * rise
        or rise < thresholds.climb_steps * median(distances)
        or rise < (thresholds.climb - 1.0) * abs(medians[0])
    ):
        return ()
    return (
        Finding(
            step=observation.step,
            last_step=observation.step,
            kind=FindingKind.DIVERGENCE,
            severity=Severity.CRITICAL,
            message=f"the loss climbs without a break, from {medians[0]:.4g} to "
            f"{medians[-1]:.4g} in {len(medians)} medians of 3.",
            evidence={
                "cold_start": 0,
                "loss": medians[-1],
                "median": medians[0],
                "threshold": thresholds.climb_steps,
                "window": len(medians),
            },
        ),
    )


def _frozen(observation: Observation, loss: float, count: int, idle: int) -> Finding:
    dead = idle >= count - 1
    cause = " while every update was skipped: the weights no longer change" if dead else ""
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.FROZEN_LOSS,
        severity=Severity.CRITICAL if dead else Severity.WARNING,
        message=f"the loss has been exactly {loss!r} for {count} steps{cause}.",
        evidence={"loss": loss, "count": count, "skipped": idle},
    )
