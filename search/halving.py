"""Which running trial is not worth its further steps: successive halving on the steps of a trial.

Theory of operation. A trial is judged at two rungs, a ninth and a third of its measured steps
(successive halving by 3, Jamieson and Talwalkar, AISTATS 2016). Who survives runs on in the same
process, so that a rung costs no second start. Unlike there, no fixed share is dropped: with a
handful of trials, each chosen by a model, half of them may be good. Dropped is what cannot catch
up with the best trial any more although all that is still to come goes as well as it can:

- the median step becomes as fast as the fastest tenth of the steps seen;
- a start that is still getting faster gets faster by as much once more;
- no further step is bad, and none is slower than the others;

and if even that value lies below the best by more than noise: `MARGIN` and `_NOISES` deviations
of what is compared, at the first rung twice as much.

Measured on simulated trials of 12 and 30 steps, 1200 per kind of noise (quiet, drift, heavy tails,
slow start, launches that differ, bursts, all but bursts at once; tests/search/
test_search_halving.py). False stops, where the value at the end would have been at least the
best's: none of about 330 per kind, under bursts of other work 0.2 %. Saved steps of trials that
take twice as long as the best: 63 % to 76 %, under bursts 41 %; 76 % is what the rungs allow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MARGIN", "Bar", "Ceiling", "Hopeless", "ceiling", "hopeless", "rungs"]

MARGIN = 0.1
"""Least share by which the optimistic value must lie below the best: two deviations of a launch
in the noisier of the published tables, whose repeats differ by 2 - 5 %."""
_MAX_MARGIN = 0.5
"""However loud the machine: below half of the best, a trial is out."""
_NOISES = 2.0 * math.sqrt(2.0)
"""Two deviations of a difference of two equally noisy values."""
_ETA = 3
_MIN_STEPS = 5
_FASTEST = 10
"""Of so many steps the fastest counts as possible; of twice as many the second fastest."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The best trial so far, as what a running one is compared with."""

    step_time_s: float
    """Median."""
    stability: float
    mfu_exponent: float
    stability_exponent: float
    noise: float = 0.0
    """Relative deviation of the median of a third of a trial: `noise.part_noise`."""


@dataclass(frozen=True)
class Ceiling:
    """The best that may still come of a trial."""

    step_time_s: float
    """Median, if all that is still to come goes as well as it can."""
    bad: int
    """Bad steps that it has had already."""


@dataclass(frozen=True)
class Hopeless:
    """Why a trial cannot catch up."""

    steps: int
    """Of the rung that it was judged at."""
    share: float
    """Its optimistic value over the best's."""
    margin: float
    """By how much that may lie below 1."""
    step_time_s: float
    """The optimistic one."""


def rungs(measure_steps: int) -> tuple[int, ...]:
    """Return the counts of measured steps at which a trial is judged, rising."""
    wished = {max(_MIN_STEPS, math.ceil(measure_steps / _ETA**power)) for power in (2, 1)}
    return tuple(sorted(rung for rung in wished if rung < measure_steps))


def ceiling(
    step_times_s: Sequence[float], is_bad: Sequence[bool], *, measure_steps: int
) -> Ceiling | None:
    """Return the best that may still come of a trial; None before its first rung.

    It follows from the steps up to the last rung that was reached alone. The arguments are those
    of `hopeless`.
    """
    reached = [rung for rung in rungs(measure_steps) if rung <= len(step_times_s)]
    return _ceiling(step_times_s, is_bad, reached[-1]) if reached else None


def hopeless(
    step_times_s: Sequence[float], is_bad: Sequence[bool], bar: Bar, *, measure_steps: int
) -> Hopeless | None:
    """Return why a trial cannot catch up with the best, or None while it can.

    The answer follows from the steps up to a rung alone, whenever it is asked for.

    Args:
        step_times_s: Of the measured steps so far.
        is_bad: Of the same steps, whether they were non-finite, overflowed or skipped.
        bar: The best trial so far.
        measure_steps: Steps that are to be measured in all.
    """
    steps = rungs(measure_steps)
    for rung in steps:
        if len(step_times_s) < rung:
            return None
        possible = _ceiling(step_times_s, is_bad, rung)
        stability = 1.0 - possible.bad / measure_steps
        steadiness = stability / bar.stability if bar.stability > 0 else 1.0
        speed = bar.step_time_s / possible.step_time_s
        share = speed**bar.mfu_exponent * steadiness**bar.stability_exponent
        margin = max(MARGIN, _NOISES * bar.noise) * (1 if rung == steps[-1] else 2)
        margin = min(_MAX_MARGIN, margin)
        if share < 1.0 - margin:
            return Hopeless(rung, share, margin, possible.step_time_s)
    return None


def _ceiling(step_times_s: Sequence[float], is_bad: Sequence[bool], rung: int) -> Ceiling:
    return Ceiling(_possible(step_times_s[:rung]), sum(is_bad[:rung]))


def _possible(times: Sequence[float]) -> float:
    """Return the median step time that may still come of a trial."""
    fast = sorted(times)[len(times) // _FASTEST]
    half = len(times) // 2
    falls_by = statistics.median(times[half:]) / statistics.median(times[:half])
    return fast * min(1.0, falls_by)
