"""Where the loss is heading: explosion in the cold start, divergence, frozen loss.

Theory of operation. The **cold start** needs no baseline: real runs die in their first ten steps.
It keeps the minimum of the median of 3 losses. An explosion is a median of 3 that stands
`cold_rise` above that minimum while the loss still climbs within these 3: a single jump that the
run is recovering from is none, nor is a noisy plateau. Noise is taken out by asking for more than
twice the typical step from loss to loss.

A **divergence** is a loss that stands clearly above its baseline and still rises: the median of
the last 8 losses is `diverged_score` robust deviations above, and the newer half of them is above
the older half. A spike that the run is recovering from falls, and is none.

A **frozen** loss is exactly the same non-zero number again and again. With updates being skipped
it is a dead run (weights that no longer change); otherwise it may be a coarse log.

Only finite losses come here.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindtune.policies.detectors.spike import Judgement
from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.windows import median, push

__all__ = ["TrendState", "judge_trend"]

_RECENT = 8
_NOISE_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class TrendState:
    """Newest losses and what the cold start has seen."""

    recent: tuple[float, ...] = ()
    """Newest finite losses."""
    steps: tuple[float, ...] = ()
    """Newest distances from loss to loss."""
    seen: int = 0
    """Finite losses so far, counted up to the end of the cold start."""
    lowest: float | None = None
    """Lowest median of 3 so far; None: fewer than 3 losses."""
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
    distances = state.steps
    if state.recent:
        distances = push(distances, abs(loss - state.recent[-1]), _RECENT)
    recent = push(state.recent, loss, _RECENT)
    lowest, seen = state.lowest, state.seen
    if seen < thresholds.cold_steps:
        seen += 1
        if len(recent) >= 3:
            now = _median_of_3(recent[-3], recent[-2], recent[-1])
            if lowest is not None and _explodes(now, lowest, recent, distances, thresholds):
                findings = (*findings, _explosion(observation, now, lowest, thresholds))
            lowest = now if lowest is None else min(lowest, now)
    elif judgement.flagged and len(recent) == _RECENT:
        findings = (*findings, *_divergence(observation, recent, judgement, thresholds))
    return findings, TrendState(recent, distances, seen, lowest, equal, idle)


def _median_of_3(a: float, b: float, c: float) -> float:
    return max(min(a, b), min(max(a, b), c))


def _explodes(
    now: float,
    lowest: float,
    recent: tuple[float, ...],
    distances: tuple[float, ...],
    thresholds: DetectorThresholds,
) -> bool:
    """Return whether the loss has risen above its own minimum, and not by one jump."""
    rise = now - lowest
    if lowest <= 0 or now < thresholds.cold_rise * lowest:
        return False
    first, *later = recent[-3:]
    if max(later) < thresholds.climb * first or first < lowest:
        return False
    return rise > 0 and len(distances) >= 2


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
