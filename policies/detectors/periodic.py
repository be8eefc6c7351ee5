"""Spikes that return after the same number of steps.

Theory of operation. What returns at a fixed distance has a cause that counts steps: a shard of
bad data, an evaluation that disturbs the state, one micro-batch position of a parallel split. The
steps in which spikes began are kept. With each new one, its distances to the two before it are
tried as the period: the spikes one, two, ... periods ago must be there. That this is chance has
the probability p^k for the k of them beyond the first, with p the share of steps that hold a spike
which the period does not explain; below `_CHANCE` the period is reported, usually with the fifth
spike. Long periods may jitter by a step.
"""

from __future__ import annotations

from itertools import pairwise

from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import median

__all__ = ["PeriodicState", "judge_period"]

_KEPT = 20
_LEAST = 5
_CHANCE = 1e-7
_UNKNOWN = 200
_JITTER = 32


@state_class(frozen=True, slots=True)
class PeriodicState:
    """Steps in which spikes of one signal began."""

    onsets: tuple[int, ...] = ()
    """Newest last."""

    def contradiction(self) -> str | None:
        """Return why no run can have stored these steps; None if one can."""
        if any(later <= earlier for earlier, later in pairwise(self.onsets)):
            return "onsets must rise from step to step"
        return None


def judge_period(
    observation: Observation, signal: str, interval: int, state: PeriodicState
) -> tuple[tuple[Finding, ...], PeriodicState]:
    """Return the finding that a spike which begins in this step is one of a series.

    Args:
        observation: The step.
        signal: Name of the signal; a slow step is a note only, since saving and collecting garbage
            are periodic by nature.
        interval: Steps from record to record.
        state: Spikes before this one.
    """
    step = observation.step
    if state.onsets and step <= state.onsets[-1]:
        return (), state
    onsets = (*state.onsets, step)[-_KEPT:]
    following = PeriodicState(onsets)
    for earlier in onsets[-2:-4:-1]:
        series = _series(onsets, step - earlier)
        if len(series) >= _LEAST and _chance(onsets, series, interval) < _CHANCE:
            return (_finding(observation, signal, series),), following
    return (), following


def _series(onsets: tuple[int, ...], period: int) -> tuple[int, ...]:
    """Return the onsets that lie one, two, ... periods before the newest, without a gap."""
    jitter = min(1, period // _JITTER)
    series = [onsets[-1]]
    for onset in reversed(onsets[:-1]):
        distance = series[-1] - onset
        if abs(distance - period) <= jitter:
            series.append(onset)
        elif distance > period + jitter:
            break
    return tuple(reversed(series))


def _chance(onsets: tuple[int, ...], series: tuple[int, ...], interval: int) -> float:
    """Return the probability that spikes without a period make such a series."""
    first, last = series[0], series[-1]
    inside = sum(1 for onset in onsets if onset >= first)
    records = (last - first) / max(1, interval)
    share = min(1.0, (inside - len(series) + 1) / (records + _UNKNOWN))
    gaps = {later - earlier for earlier, later in pairwise(series)}
    places = 1 if len(gaps) == 1 else 3
    return float(min(1.0, places * share) ** (len(series) - 2))


def _finding(observation: Observation, signal: str, series: tuple[int, ...]) -> Finding:
    gaps = tuple(float(later - earlier) for earlier, later in pairwise(series))
    period = round(median(gaps))
    micro = observation.num_microbatches
    multiple = micro is not None and micro > 1 and period % micro == 0
    cause = (
        f": a multiple of the {micro} micro-batches of a step, so look at how the batch is split "
        "over pipeline stages and ranks"
        if multiple
        else ": what counts steps is the cause (data shards, an evaluation, a save)"
    )
    return Finding(
        step=series[0],
        last_step=observation.step,
        kind=FindingKind.PERIODIC_SPIKES,
        severity=Severity.INFO if signal == "step_time_s" else Severity.WARNING,
        message=f"{len(series)} spikes of {signal} came every {period} steps{cause}.",
        evidence={
            "signal": signal,
            "period": period,
            "count": len(series),
            "num_microbatches": micro,
            "multiple_of_microbatches": int(multiple),
        },
    )
