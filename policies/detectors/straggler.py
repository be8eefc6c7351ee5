"""One rank that the others wait for.

Theory of operation. In each step the slowest rank is named, with its own time over that of the
median rank. Some rank is always the slowest; a straggler is the same one in three quarters of the
last `straggler_window` such reports, with a median ratio of `straggler_ratio` or more. NVRx
calls a rank slow whose best time over its own is below 0.75, DLRover one that takes twice the
median.
"""

from __future__ import annotations

from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import median

__all__ = ["StragglerState", "judge_straggler"]

_SAME = 0.75
_MOST_RANKS = 1 << 31


@state_class(frozen=True, slots=True)
class StragglerState:
    """The newest reports, oldest first."""

    ranks: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()

    def contradiction(self) -> str | None:
        """Return why no run can have stored these reports; None if one can."""
        if len(self.ranks) != len(self.ratios):
            return f"there are {len(self.ranks)} ranks for {len(self.ratios)} ratios"
        return None


def judge_straggler(
    observation: Observation, state: StragglerState, thresholds: DetectorThresholds
) -> tuple[tuple[Finding, ...], StragglerState]:
    """Return the finding that one rank keeps the others waiting, and the next state.

    Args:
        observation: The step; its ratio, if measured, is a finite number above 0.
        state: State before the step.
        thresholds: When to report.
    """
    rank, ratio = observation.straggler_rank, observation.straggler_ratio
    if rank is None or ratio is None or not 0 <= rank < _MOST_RANKS:
        return (), state
    rank = int(rank)  # a log gives 3.0
    size = thresholds.straggler_window
    ranks = (*state.ranks, rank)[-size:]
    ratios = (*state.ratios, ratio)[-size:]
    following = StragglerState(ranks, ratios)
    if ratio < thresholds.straggler_ratio or ranks.count(rank) < _SAME * size:
        return (), following
    own = tuple(each for each, slowest in zip(ratios, ranks, strict=True) if slowest == rank)
    typical = median(own)
    if typical < thresholds.straggler_ratio:
        return (), following
    grave = typical >= thresholds.straggler_critical
    finding = Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.STRAGGLER,
        severity=Severity.CRITICAL if grave else Severity.WARNING,
        message=f"rank {rank} was the slowest in {len(own)} of the last {len(ranks)} reports and "
        f"took {typical:.2f} times as long as the median rank (limit "
        f"{thresholds.straggler_ratio:.2f}): all others wait for it.",
        evidence={
            "rank": rank,
            "ratio": typical,
            "threshold": thresholds.straggler_ratio,
            "count": len(own),
            "window": len(ranks),
        },
    )
    return (finding,), following
