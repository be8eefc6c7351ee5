"""Where the loss is heading after the start: divergence and frozen loss.

Theory of operation. A **divergence** is a loss that is flagged as an outlier and goes on rising:
the last 4 flagged losses rise without a break, by half of what the first of them stood above the
baseline; or the newer 4 of 8 flagged losses stand as much above the older 4; or the medians of 4
groups of 8 rise one after the other, so far that noise does not make it. A jump that the run is
recovering from, or that leads to another level, does not rise. Or, before any sample is an
outlier, the loss climbs without a break: the medians of 3 rise 5 times in a row and 6 of 7 losses
as well, no rise makes more than half of the climb, and the loss has left the middle of the armed
baseline. The climb makes `climb_steps` distances from loss to loss as they were before it and 4
deviations of the baseline, or twice these distances and 3 deviations; 6 around zero, where a
deviation has no floor.

A **frozen** loss is the same non-zero number again and again, within the rounding of float32. With
updates being skipped, or norms that have become exactly 0, it is a dead run (weights that no
longer change). Otherwise it may be a coarse log: a number of at most 2 decimals must repeat twice
as often. While the norm moves from step to step, and updates act, batches and weights differ: then
the loss is only rounded (computed in bfloat16, say, which near 3 knows steps of 0.016).

Only finite losses come here.
"""

from __future__ import annotations

import math
from dataclasses import field
from itertools import pairwise

from mindtune.policies.detectors.spike import Judgement
from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state import ADDED
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import median, push

__all__ = ["TrendState", "judge_trend"]

_RECENT = 8
_RISING = 4
_OF_EXCESS = 0.5
_CLIMBING = 6
_GROUPS, _GROUP = 4, 8
_OF_DISTANCE = 3.0
"""Distances from loss to loss that the medians of 8 must rise: twelve times their own error of a
quarter, as far as losses are independent; neighbours that wander together make less of them."""
_LARGEST_SHARE = 0.5
_CLIMB_SCORE, _AROUND_ZERO = 3.0, 6.0
_CLIMB_RISE, _STEEP_RISE = 4.0, 3.0
_MOST_FALLS = 1
_DISTANCES = 32
_ROUNDING = 2.0**-23
_DECIMALS = 2
_COARSE = 2


@state_class(frozen=True, slots=True)
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
    """Of these, how many came with an update that was skipped or, after others, of norm 0."""
    norm: float = field(default=0.0, metadata={ADDED: True})
    """Newest gradient norm above 0."""


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
    norm, norm_before = observation.grad_norm, state.norm
    stands = bool(observation.update_skipped or observation.overflow)
    stands = stands or (norm == 0.0 and norm_before > 0.0)
    if norm is None or not 0.0 < norm < math.inf:
        norm = norm_before
    acts = not stands and norm_before not in (0.0, norm)
    if (
        not acts
        and state.recent
        and loss != 0
        and abs(loss - state.recent[-1]) <= _ROUNDING * abs(loss)
    ):
        equal = state.equal + 1
        idle = state.idle + int(stands)
        needed = thresholds.frozen
        if idle < equal and abs(loss - round(loss, _DECIMALS)) <= _ROUNDING * abs(loss):
            needed *= _COARSE
        if equal + 1 >= needed:
            findings = (_frozen(observation, loss, equal + 1, idle),)
    recent = push(state.recent, loss, _RECENT)
    if len(recent) < 3:
        distances = (*state.distances, *(abs(loss - last) for last in state.recent[-1:]))
        return findings, TrendState(recent, distances, (), equal, idle, norm)
    distances = push(state.distances, abs(loss - state.recent[-1]), _DISTANCES)
    a, b, c = recent[-3:]
    medians = push(state.medians, max(min(a, b), min(max(a, b), c)), _CLIMBING)
    found: tuple[Finding, ...] = ()
    if len(judgement.held) >= _RISING:
        found = _divergence(observation, judgement, distances, thresholds)
    elif judgement.armed and judgement.score >= _CLIMB_SCORE and len(medians) == _CLIMBING:
        falls = sum(later <= earlier for earlier, later in pairwise(recent))
        if falls <= _MOST_FALLS:
            before = distances[: -_CLIMBING - 1]
            found = _climb(observation, medians, before, judgement, thresholds)
    return findings + found, TrendState(recent, distances, medians, equal, idle, norm)


def _divergence(
    observation: Observation,
    judgement: Judgement,
    distances: tuple[float, ...],
    thresholds: DetectorThresholds,
) -> tuple[Finding, ...]:
    held, base = judgement.held, judgement.median
    newest = held[-_RISING:]
    unbroken = all(later > earlier for earlier, later in pairwise(newest))
    rises = unbroken and newest[-1] - newest[0] >= _OF_EXCESS * (newest[0] - base)
    if not rises and len(held) >= 2 * _RISING:
        older, newer = median(held[-2 * _RISING : -_RISING]), median(newest)
        rises = newer - older >= _OF_EXCESS * (older - base)
    loss = newest[-1]
    if not rises and len(held) >= _GROUPS * _GROUP and held[-_GROUPS * _GROUP] > base:
        rises = _keeps_rising(held[-_GROUPS * _GROUP :], distances, thresholds)
        loss = median(held[-_GROUP:])
    if not rises:
        return ()
    return (
        Finding(
            step=observation.step,
            last_step=observation.step,
            kind=FindingKind.DIVERGENCE,
            severity=Severity.CRITICAL,
            message=f"the loss stands at {loss:.4g} against {base:.4g} before, is flagged "
            f"for {judgement.consecutive} steps and goes on rising.",
            evidence={
                "cold_start": 0,
                "loss": loss,
                "median": base,
                "threshold": judgement.threshold,
                "consecutive": judgement.consecutive,
            },
        ),
    )


def _keeps_rising(
    held: tuple[float, ...], distances: tuple[float, ...], thresholds: DetectorThresholds
) -> bool:
    """Return whether a long row of flagged losses rises all the way."""
    groups = [median(held[i : i + _GROUP]) for i in range(0, _GROUPS * _GROUP, _GROUP)]
    rise = groups[-1] - groups[0]
    return (
        all(later > earlier for earlier, later in pairwise(groups))
        and rise >= _OF_DISTANCE * median(distances)
        and rise >= (thresholds.climb - 1.0) * abs(groups[0])
    )


def _climb(
    observation: Observation,
    medians: tuple[float, ...],
    before: tuple[float, ...],
    judgement: Judgement,
    thresholds: DetectorThresholds,
) -> tuple[Finding, ...]:
    steps = [later - earlier for earlier, later in pairwise(medians)]
    rise = medians[-1] - medians[0]
    deviation = judgement.deviation
    distance = thresholds.climb_steps * median(before)
    least = _STEEP_RISE if rise >= 2.0 * distance else _CLIMB_RISE
    if abs(judgement.median) < _AROUND_ZERO * deviation:
        least = _AROUND_ZERO
    if (
        min(steps) <= 0
        or max(steps) > _LARGEST_SHARE * rise
        or rise < max(distance, least * deviation)
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
    how = "of norm 0" if observation.grad_norm == 0.0 else "skipped"
    cause = f" while every update was {how}: the weights no longer change" if dead else ""
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.FROZEN_LOSS,
        severity=Severity.CRITICAL if dead else Severity.WARNING,
        message=f"the loss has been {loss:.9g} for {count} steps{cause}.",
        evidence={"loss": loss, "count": count, "skipped": idle},
    )
