"""What a log shows that is too short for the detectors, once it has ended.

The detectors wait for steps that may still come. Where a log holds a handful of records and no
more, all of them together are the evidence: if each one after the first (which compiles) waits for
data longer than it computes, the run is starved as far as anyone can tell.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation

__all__ = ["BRIEF", "judge_brief_log"]

BRIEF = 8
"""Records from which the detectors judge waiting by themselves."""
_LEAST = 2


def judge_brief_log(
    observations: Sequence[Observation], thresholds: DetectorThresholds
) -> tuple[Finding, ...]:
    """Return what all records of a short log agree in.

    Args:
        observations: All of a run's records, fewer than `BRIEF`.
        thresholds: Those of the detectors.
    """
    shares = []
    for observation in observations[1:]:
        if observation.phase in ("eval", "save"):
            continue
        # One that compiles waits for a small share of its time only.
        wait, step_time = observation.data_time_s, observation.step_time_s
        if wait is not None and step_time is not None and 0 <= wait <= step_time:
            shares.append(wait / step_time if step_time > 0 else 0.0)
    if len(shares) < _LEAST or min(shares) <= thresholds.data_share:
        return ()
    starved = min(shares) > thresholds.starved_share
    return (
        Finding(
            step=observations[1].step,
            last_step=observations[-1].step,
            kind=FindingKind.DATA_STALL,
            severity=Severity.CRITICAL if starved else Severity.WARNING,
            message=f"all {len(shares)} records after the first wait for data, for "
            f"{min(shares):.0%} to {max(shares):.0%} of the step (limit "
            f"{thresholds.data_share:.0%}); the log holds no more.",
            evidence={
                "share": min(shares),
                "threshold": thresholds.data_share,
                "starved": int(starved),
                "window": len(shares),
            },
        ),
    )
