"""What the outliers of loss and gradient norm amount to: a note, a burst, another level.

Theory of operation. A single outlier is a note: real norms have heavy tails, and one bad batch
harms little. What makes a **burst** is gross outliers (above twice the threshold) that chance
alone would not make: with p the share of them that this run has had before, n in a row have the
probability p^n, and n within the rate window of W samples (pW)^n exp(-pW) / n!. Below `_CHANCE`
they belong together, and the finding is a warning. The share counts as `_SHARE` at least: that
makes it the third one in a row or the sixth within 48. It counts as `_SHARE_AROUND_ZERO` where the
signal scatters around zero or over its whole height, since nothing keeps such a scatter as it is:
the fifth in a row, the twelfth within 48.
"""

from __future__ import annotations

import math

from mindtune.policies.detectors.spike import Judgement
from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation

__all__ = ["judge_outlier"]

# Student's t with 3 degrees of freedom is above 12 robust deviations in 0.04 % of its samples, a
# log-normal norm with a deviation of 1 in 0.7 %.
_SHARE = 0.003
_SHARE_AROUND_ZERO = 0.03
_AROUND_ZERO = 3.0
_UNKNOWN = 400
_CHANCE = 1e-7


def judge_outlier(
    observation: Observation,
    kind: FindingKind,
    name: str,
    value: float,
    judgement: Judgement,
    thresholds: DetectorThresholds,
) -> tuple[Finding, ...]:
    """Return the findings about one sample: a spike, and the shift of the level if it is declared.

    Args:
        observation: The step.
        kind: Kind of a spike of this signal.
        name: Name of the signal for a reader.
        value: The sample.
        judgement: The verdict over it.
        thresholds: Size of the rate window.
    """
    findings: tuple[Finding, ...] = ()
    if judgement.flagged:
        findings = (_spike(observation, kind, name, value, judgement, thresholds),)
    if judgement.shifted_from is None:
        return findings
    held = len(judgement.held)
    shift = Finding(
        step=max(1, observation.step - held + 1),
        last_step=observation.step,
        kind=FindingKind.LEVEL_SHIFT,
        severity=Severity.INFO,
        message=f"the {name} has moved from a level of {judgement.shifted_from:.4g} to {value:.4g}"
        f" and stays there for {held} steps: this is its new baseline.",
        evidence={
            "signal": "loss" if kind is FindingKind.LOSS_SPIKE else "grad_norm",
            "value": value,
            "median": judgement.shifted_from,
            "consecutive": held,
        },
    )
    return (*findings, shift)


def _spike(
    observation: Observation,
    kind: FindingKind,
    name: str,
    value: float,
    judgement: Judgement,
    thresholds: DetectorThresholds,
) -> Finding:
    burst = _chance(judgement, thresholds.rate_window) < _CHANCE
    together = ", too many for chance: a burst" if burst else ""
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=kind,
        severity=Severity.WARNING if burst else Severity.INFO,
        message=f"the {name} {value:.4g} is {judgement.score:.1f} robust deviations above its "
        f"median {judgement.median:.4g} (limit {judgement.threshold:g}), {judgement.consecutive} "
        f"in a row and {judgement.flags} in {thresholds.rate_window}{together}.",
        evidence={
            "value": value,
            "median": judgement.median,
            "score": judgement.score,
            "threshold": judgement.threshold,
            "consecutive": judgement.consecutive,
            "count": judgement.flags,
            "burst": int(burst),
        },
    )


def _chance(judgement: Judgement, window: int) -> float:
    """Return the probability of outliers as frequent as these, were they independent."""
    around_zero = abs(judgement.median) < _AROUND_ZERO * judgement.deviation
    least = _SHARE_AROUND_ZERO if around_zero else _SHARE
    share = max(least, (judgement.marks + 1) / (judgement.seen + _UNKNOWN))
    row = share**judgement.gross_row if judgement.gross_row else 1.0
    expected = share * window
    count = judgement.gross
    if count <= expected:
        return row
    log_rate = count * math.log(expected) - expected - math.lgamma(count + 1)
    return min(row, math.exp(log_rate))
