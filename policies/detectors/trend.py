"""Where the loss is heading after the start: divergence and frozen loss.

Theory of operation. A **divergence** is a loss that is flagged as an outlier and goes on rising:
the last 4 flagged losses rise without a break, by half of what the first of them stood above the
baseline; or the newer 4 of 8 flagged losses stand as much above the older 4. A jump that the run
is recovering from, or that leads to another level, does not rise. Or, before any sample is an
outlier, the loss climbs without a break: the medians of 3 rise 5 times in a row by `climb_steps`
typical steps from loss to loss, none of which makes more than half of the climb, and have left
the middle of the armed baseline.

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
_RISING = 4
_OF_EXCESS = 0.5
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
    if len(judgement.held) >= _RISING:
        found = _divergence(observation, judgement)
    elif judgement.armed and judgement.score >= _CLIMB_SCORE and len(medians) == _CLIMBING:
        found = _climb(observation, medians, distances, thresholds)
    else:
        found = ()
    return findings + found, TrendState(recent, distances, medians, equal, idle)


def _divergence(observation: Observation, judgement: Judgement) -> tuple[Finding, ...]:
    held, base = judgement.held, judgement.median
    newest = held[-_RISING:]
    unbroken = all(later > earlier for earlier, later in pairwise(newest))
    rises = unbroken and newest[-1] - newest[0] >= _OF_EXCESS * (newest[0] - base)
    if not rises and len(held) >= 2 * _RISING:
        older, newer = median(held[-2 * _RISING : -_RISING]), median(newest)
        rises = newer - older >= _OF_EXCESS * (older - base)
    if not rises:
        return ()
    return (
        Finding(
            step=observation.step,
            last_step=observation.step,
            kind=FindingKind.DIVERGENCE,
            severity=Severity.CRITICAL,
            message=f"the loss stands at {newest[-1]:.4g} against {base:.4g} before, is flagged "
            f"for {judgement.consecutive} steps and goes on rising.",
            evidence={
                "cold_start": 0,
                "loss": newest[-1],
                "median": base,
                "threshold": judgement.threshold,
                "consecutive": judgement.consecutive,
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
