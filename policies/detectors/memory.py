"""Memory that is nearly used up, or will be.

Theory of operation. The framework's own figure counts first: a pool that was reserved in advance
fills the device without being used. Memory is under **pressure** above `memory_share` of the
device, and about to run out above `memory_full`, if it has risen there lately: a run that has been
as full as that since its first `_START` steps, or for `_PROVEN` steps, has shown that it fits
(many are tuned to fill the device), and gets the warning alone. **Growth** is looked for in the
peaks of blocks of 4 and of 32 steps, since memory swings within a step and from batch to batch: 8
peaks in a row rise, by 4 times what the memory typically swings within a block, and the newer half
by at least `_STEADY` of what the older one did: a pool that fills up and then stays is no leak.
The rate is that of the newer half: the older one may hold steps before the leak began. Growth that
will reach the limit within `memory_horizon` steps is reported with the number of steps left, and
as critical within `memory_soon`.
"""

from __future__ import annotations

from dataclasses import field
from itertools import pairwise

from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state import ADDED
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import median, push

__all__ = ["GrowthState", "MemoryState", "judge_memory"]

_FAST, _SLOW = 4, 32
_PEAKS = 8
_OF_SWING = 4.0
_STEADY = 0.6
_START, _PROVEN = 16, 64
# Share of the device by which a peak counts as a new one.
_RISE = 0.002


@state_class(frozen=True, slots=True)
class GrowthState:
    """Peaks of blocks of one length."""

    count: int = 0
    """Samples of the present block."""
    low: float = 0.0
    """Least memory in it, in bytes."""
    high: float = 0.0
    """Most memory in it."""
    peaks: tuple[float, ...] = ()
    """Most memory of the blocks before."""
    swings: tuple[float, ...] = ()
    """Most less least memory of these."""
    ends: tuple[int, ...] = ()
    """Steps in which these ended."""
    rate: float = 0.0
    """Bytes per step of steady growth, as of the last block; 0: none."""

    def contradiction(self) -> str | None:
        """Return why no run can have stored these blocks; None if one can."""
        if not len(self.peaks) == len(self.swings) == len(self.ends):
            return (
                f"there are {len(self.peaks)} peaks, {len(self.swings)} swings and "
                f"{len(self.ends)} ends of the same blocks"
            )
        return None


@state_class(frozen=True, slots=True)
class MemoryState:
    """Growth on two time scales."""

    fast: GrowthState = field(default_factory=GrowthState)
    slow: GrowthState = field(default_factory=GrowthState)
    seen: int = field(default=0, metadata={ADDED: True})
    """Readings so far, counted up to `_START`."""
    peak: float = field(default=0.0, metadata={ADDED: True})
    """Most memory so far, in bytes."""
    fits: int = field(default=_PROVEN, metadata={ADDED: True})
    """Readings since it rose, after the start, counted up to `_PROVEN`."""


def judge_memory(
    observation: Observation, state: MemoryState, thresholds: DetectorThresholds
) -> tuple[tuple[Finding, ...], MemoryState]:
    """Return the finding that memory is short or growing towards its limit, and the next state.

    Args:
        observation: The step; its figures of memory, if measured, are possible ones.
        state: State before the step.
        thresholds: When to report.
    """
    total = observation.device_memory_total_bytes
    used = observation.memory_allocated_bytes
    if used is None:
        used = observation.device_memory_used_bytes
    if used is None or total is None:
        return (), state
    step = observation.step
    rose = used > state.peak + _RISE * total and state.seen >= _START
    following = MemoryState(
        _grow(float(used), step, state.fast, _FAST),
        _grow(float(used), step, state.slow, _SLOW),
        min(state.seen + 1, _START),
        max(state.peak, float(used)),
        0 if rose else min(state.fits + 1, _PROVEN),
    )
    rate = max(following.fast.rate, following.slow.rate)
    left = (total - used) / rate if rate > 0 else None
    share = used / total
    growing = left is not None and left <= thresholds.memory_horizon
    if share <= thresholds.memory_share and not growing:
        return (), following
    soon = left is not None and left <= thresholds.memory_soon
    critical = (share >= thresholds.memory_full and following.fits < _PROVEN) or soon
    text = f"{share:.0%} of the device memory is in use (limit {thresholds.memory_share:.0%})"
    if growing and left is not None:
        text += (
            f" and it grows by {rate:.4g} bytes a step: it is used up in about {left:.0f} steps"
        )
    finding = Finding(
        step=step,
        last_step=step,
        kind=FindingKind.MEMORY_PRESSURE,
        severity=Severity.CRITICAL if critical else Severity.WARNING,
        message=f"{text}.",
        evidence={
            "share": share,
            "threshold": thresholds.memory_share,
            "used_bytes": used,
            "bytes_per_step": rate if growing else 0.0,
            "steps_left": round(left) if growing and left is not None else None,
        },
    )
    return (finding,), following


def _grow(used: float, step: int, state: GrowthState, width: int) -> GrowthState:
    low = used if state.count == 0 else min(state.low, used)
    high = used if state.count == 0 else max(state.high, used)
    count = state.count + 1
    if count < width:
        return GrowthState(count, low, high, state.peaks, state.swings, state.ends, state.rate)
    peaks = push(state.peaks, high, _PEAKS)
    swings = push(state.swings, high - low, _PEAKS)
    ends = (*state.ends, step)[-_PEAKS:]
    return GrowthState(0, 0.0, 0.0, peaks, swings, ends, _rate(peaks, swings, ends))


def _rate(peaks: tuple[float, ...], swings: tuple[float, ...], ends: tuple[int, ...]) -> float:
    """Return the bytes per step of steady growth over the blocks, or 0."""
    if len(peaks) < _PEAKS or any(later <= earlier for earlier, later in pairwise(peaks)):
        return 0.0
    if any(later <= earlier for earlier, later in pairwise(ends)):
        return 0.0
    if peaks[-1] - peaks[0] < _OF_SWING * median(swings):
        return 0.0
    half = _PEAKS // 2
    older = (peaks[half - 1] - peaks[0]) / (ends[half - 1] - ends[0])
    newer = (peaks[-1] - peaks[half]) / (ends[-1] - ends[half])
    return newer if newer >= _STEADY * older else 0.0
