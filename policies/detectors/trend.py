"""Where the loss is heading: explosion in the cold start, divergence, frozen loss.

Theory of operation. All rules look at the median of 3 losses, which one outlier cannot move, and
measure a rise in typical steps from loss to loss (the median of the last 8), so that a noisy loss
needs more of it.

The **cold start** needs no baseline, since real runs die in their first ten steps. An explosion is
a median that stands `cold_rise` above the lowest one so far, by 1.3 typical steps, while the loss
still climbs within its 3 samples: a jump that the run is recovering from is none. Only a jump to
`massive_rise` needs no climb. After `cold_steps` losses, up to `cold_end`, the comparison is with
the median of the 8 losses before, and the rise must be 3.5 typical steps: for a stationary loss
that is more than 4 standard deviations of the difference.

A **divergence** later on is a loss that is flagged as an outlier and still rises: the median of
the last 8 losses is `diverged_score` robust deviations above the baseline, and the newer half of
them is above the older half. Or it climbs without a break, 5 medians in a row by `climb_steps`
typical steps, none of which makes more than half of the climb, and has left the middle of its
baseline. A spike that the run is recovering from does neither.

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
_KEPT = _RECENT + 3
_EARLY_STEPS_OF_RISE = 1.3
_LATE_STEPS_OF_RISE = 3.5
_ELEVATED = 1.02
_CLIMBING = 5
_LARGEST_SHARE = 0.5
_CLIMB_SCORE = 3.0


@dataclass(frozen=True, slots=True)
class TrendState:
    """Newest losses and what the cold start has seen."""

    recent: tuple[float, ...] = ()
    """Newest finite losses."""
    distances: tuple[float, ...] = ()
    """Newest distances from loss to loss."""
    medians: tuple[float, ...] = ()
    """Newest medians of 3."""
    seen: int = 0
    """Finite losses so far, counted up to the end of the cold start."""
    lowest: float | None = None
    """Lowest median so far, at first the first loss; None: no loss yet."""
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
    recent = push(state.recent, loss, _KEPT)
    lowest, seen = state.lowest, state.seen
    if len(recent) < 3:
        distances = state.distances
        if state.recent:
            distances = (*distances, abs(loss - state.recent[-1]))
        lowest = loss if lowest is None else lowest
        return findings, TrendState(recent, distances, (), seen + 1, lowest, equal, idle)
    distances = push(state.distances, abs(loss - state.recent[-1]), _RECENT)
    now = _median_of_3(recent[-3], recent[-2], recent[-1])
    medians = push(state.medians, now, _CLIMBING)
    if seen < thresholds.cold_end:
        seen += 1
        if lowest is None or now < lowest:
            lowest = now
        elif now > lowest:
            early = seen <= thresholds.cold_steps
            base = lowest if early or len(recent) < _KEPT else median(recent[:_RECENT])
            if _explodes(now, base, recent, distances, thresholds, early=early):
                findings = (*findings, _explosion(observation, now, base, thresholds))
    elif judgement.flagged and len(recent) == _KEPT:
        findings = (*findings, *_divergence(observation, recent, judgement, thresholds))
    if (
        not findings
        and judgement.score >= _CLIMB_SCORE
        and len(medians) == _CLIMBING
        and medians[0] < medians[1] < now
    ):
        findings = (*findings, *_climb(observation, medians, distances, thresholds))
    return findings, TrendState(recent, distances, medians, seen, lowest, equal, idle)


def _median_of_3(a: float, b: float, c: float) -> float:
    return max(min(a, b), min(max(a, b), c))


def _explodes(
    now: float,
    base: float,
    recent: tuple[float, ...],
    distances: tuple[float, ...],
    thresholds: DetectorThresholds,
    *,
    early: bool,
) -> bool:
    """Return whether the loss has risen above where it was, and not by one jump."""
    steps = _EARLY_STEPS_OF_RISE if early else _LATE_STEPS_OF_RISE
    if base <= 0 or now < thresholds.cold_rise * base or now - base < steps * median(distances):
        return False
    first, second, third = recent[-3:]
    if early and min(second, third) >= thresholds.massive_rise * base:
        return True
    return first >= _ELEVATED * base and max(second, third) >= thresholds.climb * first


def _climb(
    observation: Observation,
    medians: tuple[float, ...],
    distances: tuple[float, ...],
    thresholds: DetectorThresholds,
) -> tuple[Finding, ...]:
    """Return the finding that the loss climbs without a break."""
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


def _explosion(
    observation: Observation, now: float, lowest: float, thresholds: DetectorThresholds
) -> Finding:
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.DIVERGENCE,
        severity=Severity.CRITICAL,
        message=f"in the first steps the loss rose to {now:.4g} after {lowest:.4g}, "
        f"{now / lowest:.2f} times its own minimum (limit {thresholds.cold_rise:g}).",
        evidence={
            "cold_start": 1,
            "loss": now,
            "lowest": lowest,
            "threshold": thresholds.cold_rise,
            "learning_rate": observation.learning_rate,
        },
    )


def _divergence(
    observation: Observation,
    recent: tuple[float, ...],
    judgement: Judgement,
    thresholds: DetectorThresholds,
) -> tuple[Finding, ...]:
    half = _RECENT // 2
    recent = recent[-_RECENT:]
    older, newer = median(recent[:half]), median(recent[half:])
    # In units of the spike score: the judgement carries its scale implicitly.
    scale = (recent[-1] - judgement.median) / judgement.score
    if newer <= older or median(recent) <= judgement.median + thresholds.diverged_score * scale:
        return ()
    return (
        Finding(
            step=observation.step,
            last_step=observation.step,
            kind=FindingKind.DIVERGENCE,
            severity=Severity.CRITICAL,
            message=f"the loss stands at {newer:.4g} against {judgement.median:.4g} before, and "
            f"rises (median of {half} steps earlier: {older:.4g}).",
            evidence={
                "cold_start": 0,
                "loss": newer,
                "median": judgement.median,
                "threshold": thresholds.diverged_score,
                "window": _RECENT,
            },
        ),
    )


def _frozen(observation: Observation, loss: float, count: int, idle: int) -> Finding:
    dead = idle >= count - 1
    cause = "while every update was skipped: the weights no longer change" if dead else ""
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.FROZEN_LOSS,
        severity=Severity.CRITICAL if dead else Severity.WARNING,
        message=f"the loss has been exactly {loss!r} for {count} steps {cause}".strip() + ".",
        evidence={"loss": loss, "count": count, "skipped": idle},
    )
