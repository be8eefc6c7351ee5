"""Where the loss goes in the long run: a slow drift upwards, or nowhere.

Theory of operation. Losses that are no outliers are taken together in blocks of 8, each with its
median, so that noise from batch to batch averages out.

A slow **drift** is a divergence that no single step shows: over 8 blocks (64 steps) nearly every
median is above most before it (at least 23 of the 28 pairs agree, as in Mann and Kendall's
test), no block makes more than half of the rise, and the rise is `drift` of the level as well as
`_NOISE` times the deviation of a single loss. Since the loss of small batches wanders, it must
also be twice the largest rise in as many steps that the run has made before (forgotten over some
ten thousand steps, and not counting the drift itself), and end above the 192 steps before it. One
that goes on until the loss stands `_LOST` above its lowest level is critical.

A **creep** is slower still: over 9 groups of 64 steps nearly every median is above all before it,
no group makes more than half of the rise, and it is `_CREEP` of the level and four times that
largest rise in 64 steps. It is critical from `_GRAVE` times that on.

In a run that is too young for a drift an **ascent** is looked for: the medians of 4 blocks rise
one after the other, from the lowest of all, by `_ASCENT` of the level and `_ASCENT_NOISE`
deviations of a single loss.

A creep, and a loss that stands `_LOST` above its lowest level, tell something in runs alone that
had learnt before (the level has come down by `_LEARNT` from its first one), and whose loss leaps
by less than `_WILD` of its level from step to step: of two networks that are trained against each
other, one may well rise.

A **plateau** is the opposite: the level of the newer half of `plateau` steps (the mean of its
medians) is not below that of the older half by `plateau_fall` or 3 standard errors, 1.5 of which
may hide a fall. Most runs end in one; it is a note, given once until the loss clearly falls again.
"""

from __future__ import annotations

import math
from dataclasses import field
from itertools import combinations, pairwise
from statistics import fmean

from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state import ADDED
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import median, push

__all__ = ["ProgressState", "judge_progress"]

_BLOCK = 8
_CLIMB = 8
_KEPT = _CLIMB + 64
_AGREE = 18  # 23 pairs rise and 5 fall
_LARGEST_SHARE = 0.5
_NOISE = 2.0
_NEAR_ZERO_NOISE = 10.0
_OF_EARLIER = 2.0
_FORGET = 0.999
_RECENT = 24
_GRAVE = 2.0
_GROUP, _GROUPS = 8, 9
_CREEPS = 32  # 34 pairs rise and 2 fall
_CREEP, _LEARNT, _WILD, _OF_WANDER = 0.25, 0.1, 0.1, 4.0
_LOST = 0.5
_BLOCKS_OF_ASCENT, _ASCENT, _ASCENT_NOISE = 4, 0.3, 6.0
_REMEMBERED = 2 * _CLIMB
_CLEARLY = 3.0
_CLEAR_ERRORS, _HIDDEN_ERRORS = 3.0, 1.5
# The median distance of two independent normal samples is 0.954 deviations.
_DISTANCE_TO_SIGMA = 1.0 / 0.954
# Deviation of the difference of two medians of n samples: 1.2533 sqrt(2 / n).
_MEDIAN_ERROR = 1.2533 * 2**0.5


@state_class(frozen=True, slots=True)
class ProgressState:
    """Medians of blocks of losses."""

    block: tuple[float, ...] = ()
    """Losses of the present block."""
    medians: tuple[float, ...] = ()
    """Of the newest blocks, oldest first."""
    scatters: tuple[float, ...] = ()
    """Median distance from loss to loss in the newest blocks."""
    wander: float = 0.0
    """Largest rise over the blocks of a climb, slowly forgotten."""
    flat: bool = False
    """Whether the present plateau was reported."""
    first: float | None = field(default=None, metadata={ADDED: True})
    """Median of the first block."""
    lowest: float = field(default=math.inf, metadata={ADDED: True})
    """Lowest median of a block."""
    drifts: int = field(default=0, metadata={ADDED: True})
    """Blocks for which a drift that was seen still counts as going on."""


def judge_progress(
    observation: Observation, loss: float, state: ProgressState, thresholds: DetectorThresholds
) -> tuple[tuple[Finding, ...], ProgressState]:
    """Return the findings at the end of a block, and the next state.

    Args:
        observation: The step.
        loss: Its loss: finite, and no outlier.
        state: State before the step.
        thresholds: When to report.
    """
    block = (*state.block, loss)
    if len(block) < _BLOCK:
        return (), ProgressState(
            block,
            state.medians,
            state.scatters,
            state.wander,
            state.flat,
            state.first,
            state.lowest,
            state.drifts,
        )
    level = median(block)
    first = level if state.first is None else state.first
    lowest = min(state.lowest, level)
    medians = push(state.medians, level, _KEPT)
    scatter = median(tuple(abs(later - earlier) for earlier, later in pairwise(block)))
    scatters = push(state.scatters, scatter, _CLIMB)
    sigma = _DISTANCE_TO_SIGMA * median(scatters)
    tame = sigma < _WILD * abs(level)
    learnt = tame and first - lowest > _LEARNT * abs(first)
    lost = learnt and level - lowest > _LOST * abs(lowest)
    findings = _drift(observation, medians, sigma, state.wander, thresholds, lost=lost)
    if not findings and len(medians) < _CLIMB + _RECENT:
        findings = _ascent(observation, medians, sigma, lowest, lost=lost)
    if not findings and learnt:
        findings = _creep(observation, medians, sigma, state.wander)
    drifts = _REMEMBERED if findings else max(0, state.drifts - 1)
    wander = state.wander * _FORGET
    if len(medians) >= 2 * _CLIMB and not drifts:
        # Of the blocks before the newest 8: a drift must not count against itself.
        wander = max(wander, medians[-_CLIMB - 1] - medians[-2 * _CLIMB])
    blocks = min(thresholds.plateau // _BLOCK, _KEPT)
    flat = state.flat
    if len(medians) >= blocks:
        fall, error = _fall(medians[-blocks:], sigma)
        least = max(thresholds.plateau_fall * abs(medians[-1]), _CLEAR_ERRORS * error)
        flat = fall <= (_CLEARLY * least if flat else least - _HIDDEN_ERRORS * error)
    if flat and not state.flat:
        findings += (_plateau(observation, medians[-blocks:], thresholds),)
    return findings, ProgressState((), medians, scatters, wander, flat, first, lowest, drifts)


def _drift(
    observation: Observation,
    medians: tuple[float, ...],
    sigma: float,
    wander: float,
    thresholds: DetectorThresholds,
    *,
    lost: bool,
) -> tuple[Finding, ...]:
    if len(medians) < _CLIMB + _RECENT:
        return ()
    climb, history = medians[-_CLIMB:], medians[:-_CLIMB]
    first, last = climb[0], climb[-1]
    rise = last - first
    if rise <= 0.0:
        return ()
    near_zero = abs(first) < _NEAR_ZERO_NOISE * sigma
    needed = _NEAR_ZERO_NOISE * sigma if near_zero else thresholds.drift * abs(first)
    if rise < max(needed, _NOISE * sigma, _OF_EARLIER * wander):
        return ()
    agree = sum(1 if later > earlier else -1 for earlier, later in combinations(climb, 2))
    largest = max(later - earlier for earlier, later in pairwise(climb))
    if agree < _AGREE or largest > _LARGEST_SHARE * rise or last <= max(history[-_RECENT:]):
        return ()
    grave = lost or rise >= _GRAVE * needed
    window = _CLIMB * _BLOCK
    message = (
        f"the loss drifts upwards, from {first:.4g} to {last:.4g} in {window} steps, and has left "
        "the range of the steps before."
    )
    return _rise(observation, "drift", message, (first, last), thresholds.drift, window, grave)


def _ascent(
    observation: Observation,
    medians: tuple[float, ...],
    sigma: float,
    lowest: float,
    *,
    lost: bool,
) -> tuple[Finding, ...]:
    newest = medians[-_BLOCKS_OF_ASCENT:]
    first, last = newest[0], newest[-1]
    if (
        len(newest) < _BLOCKS_OF_ASCENT
        or first > lowest
        or first < _NEAR_ZERO_NOISE * sigma
        or last - first < max(_ASCENT * abs(first), _ASCENT_NOISE * sigma)
        or any(later <= earlier for earlier, later in pairwise(newest))
    ):
        return ()
    steps = _BLOCKS_OF_ASCENT * _BLOCK
    message = (
        f"the loss goes up from its lowest level, from {first:.4g} to {last:.4g} in {steps} "
        "losses."
    )
    return _rise(observation, "ascent", message, (first, last), _ASCENT, steps, lost)


def _rise(
    observation: Observation,
    pattern: str,
    message: str,
    levels: tuple[float, float],
    threshold: float,
    window: int,
    grave: bool,
) -> tuple[Finding, ...]:
    """Return the finding of a loss that rises from the first of two levels to the second."""
    first, last = levels
    return (
        Finding(
            step=observation.step,
            last_step=observation.step,
            kind=FindingKind.DIVERGENCE,
            severity=Severity.CRITICAL if grave else Severity.WARNING,
            message=message,
            evidence={
                "cold_start": 0,
                "pattern": pattern,
                "loss": last,
                "median": first,
                "threshold": threshold,
                "window": window,
            },
        ),
    )


def _creep(
    observation: Observation,
    medians: tuple[float, ...],
    sigma: float,
    wander: float,
) -> tuple[Finding, ...]:
    if len(medians) < _GROUP * _GROUPS or medians[-1] <= medians[0]:
        return ()
    width = _GROUP * _GROUPS
    first, last = median(medians[:_GROUP]), median(medians[width - _GROUP : width])
    rise = last - first
    near_zero = abs(first) < _NEAR_ZERO_NOISE * sigma
    needed = _NEAR_ZERO_NOISE * sigma if near_zero else _CREEP * abs(first)
    if rise < max(needed, _OF_WANDER * wander):
        return ()
    groups = [median(medians[i : i + _GROUP]) for i in range(0, width, _GROUP)]
    agree = sum(1 if later > earlier else -1 for earlier, later in combinations(groups, 2))
    largest = max(later - earlier for earlier, later in pairwise(groups))
    if agree < _CREEPS or largest > _LARGEST_SHARE * rise:
        return ()
    grave = rise >= _GRAVE * needed
    steps = width * _BLOCK
    message = (
        f"the loss creeps upwards, from {first:.4g} to {last:.4g} in {steps} losses, nearly "
        "without a break."
    )
    return _rise(observation, "creep", message, (first, last), _CREEP, steps, grave)


def _fall(medians: tuple[float, ...], sigma: float) -> tuple[float, float]:
    """Return the fall from the older half to the newer one, and its standard error."""
    half = len(medians) // 2
    fall = fmean(medians[:half]) - fmean(medians[half:])
    return fall, _MEDIAN_ERROR * sigma / (half * _BLOCK) ** 0.5


def _plateau(
    observation: Observation, medians: tuple[float, ...], thresholds: DetectorThresholds
) -> Finding:
    half = len(medians) // 2
    older, newer = fmean(medians[:half]), fmean(medians[half:])
    rate = observation.learning_rate
    cause = " while the learning rate is 0" if rate == 0 else ""
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.PLATEAU,
        severity=Severity.INFO,
        message=f"the loss no longer falls{cause}: {newer:.4g} after {older:.4g} in the last "
        f"{len(medians) * _BLOCK} losses.",
        evidence={
            "loss": newer,
            "median": older,
            "threshold": thresholds.plateau_fall,
            "window": len(medians) * _BLOCK,
            "learning_rate": rate,
        },
    )
