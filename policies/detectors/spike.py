"""Outliers of one signal against its own recent past, and the shift of its level.

Theory of operation. A sample is scored against the median and the median absolute deviation of
the last `window` unflagged samples, z = (x - median) / max(1.4826 MAD, 0.05 |median|, 1e-12): the
floors keep a very quiet signal from flagging its own noise. The full threshold holds once
`arm_after` samples are there, a much higher one from `early_after` on. A flagged sample is held
apart and does not enter the baseline, so a burst cannot hide its own tail.

Flags are counted in a row and within a window, since a rule on flags in a row alone is evaded by
one good sample. A **row** is ended by a sample below half of the threshold: one in between is not
flagged, and is held all the same, or a level just above the threshold would never be a level.

Samples that are held `rebase_after` times in a row at low dispersion are no fault but a new level
(another batch size, another phase of the schedule): they become the baseline and the shift is
declared. Low is a quarter of the level or of the distance from the old one, whichever is more; up
to half of that, if the row does not climb. A disordered level is taken over too, after four times
as many.

A signal that goes to and fro (batches of two sources, tasks that take turns) has two levels, and
a median absolute deviation that is as small as that of one of them. A sixth of the newest samples
of the baseline above the limit says so: the deviation is that of the 95th percentile then. What
is flagged in a third of the rate window and never in a row for long is taken into the baseline.

A signal that is exactly zero in a fifth of its steps or more (loss and norm of a policy that
learns from advantages) has no meaningful median: its deviation is that of its 95th percentile from
there, and it is not judged while that is zero as well.

Only finite samples come here: non-finite ones are a class of their own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import field
from typing import NamedTuple

from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import MAD_TO_SIGMA, Window, median, push

__all__ = ["Judgement", "SpikeState", "judge_sample"]

_RELATIVE_FLOOR = 0.05
_ABSOLUTE_FLOOR = 1e-12
_RELEASE = 0.5
_ORDERLY, _FAIRLY_ORDERLY = 0.25, 0.5
# Halves of one level differ by 0.4 deviations, those of an even climb by 1.35.
_CLIMBS = 1.25
_DISORDERLY_FACTOR = 4
# Half of the steps that make a level.
_OFTEN, _SHORT = 1 / 3, 16
_TWO_LEVELS = 1 / 6
_MANY_ZEROS, _UPPER = 0.2, 0.95
# Twice the threshold: correlated noise, which makes rows of outliers by itself, stays below.
_GROSS = 2.0
# Share of the threshold within which samples are those of the earlier runs.
_FITS = 0.5
_REMEMBERED = 4096


@state_class(frozen=True, slots=True)
class SpikeState:
    """Baseline and flags of one signal."""

    window: Window = field(default_factory=Window)
    """Unflagged samples."""
    held: tuple[float, ...] = ()
    """Newest samples of the current row."""
    row: int = 0
    """Samples of the current row, flagged or not."""
    consecutive: int = 0
    """Flags of the current row."""
    flags: int = 0
    """One bit per sample, the newest lowest."""
    gross: int = 0
    """The same for samples above twice the threshold."""
    gross_row: int = 0
    """Samples in a row above twice the threshold."""
    seen: int = 0
    """Samples that have left the rate window, halved now and then."""
    marks: int = 0
    """Gross ones among them."""


class Judgement(NamedTuple):
    """Verdict over one sample."""

    flagged: bool
    score: float
    """Robust deviations above the median; 0 while there is no baseline."""
    median: float
    """Of the baseline; the sample itself while there is none."""
    deviation: float
    """Robust deviation of the baseline, floors included; 0 while there is none."""
    threshold: float
    consecutive: int
    """Flags in a row, this one included."""
    flags: int
    """Flags within the rate window, this one included."""
    shifted_from: float | None
    """Old median, if with this sample the level was declared to have shifted."""
    armed: bool
    """Whether the baseline is armed."""
    held: tuple[float, ...]
    """Newest samples of the row, this one included; empty outside of rows."""
    gross: int
    """Samples within the rate window that are above twice the threshold."""
    gross_row: int
    """Such samples in a row, this one included."""
    seen: int
    """Samples before the rate window."""
    marks: int
    """Gross ones among them."""

    @property
    def begins(self) -> bool:
        """Whether a row of outliers begins with this sample."""
        return self.flagged and self.consecutive == 1


def judge_sample(
    value: float,
    state: SpikeState,
    thresholds: DetectorThresholds,
    *,
    score: float,
    prior: tuple[float, float] | None = None,
) -> tuple[Judgement, SpikeState]:
    """Return the verdict over a finite sample, and the next state.

    Args:
        value: The sample.
        state: State before it.
        thresholds: Sizes of the windows.
        score: Deviations that make a spike once the baseline is armed.
        prior: Median and MAD of earlier runs. Until the baseline is armed, the higher of the two
            medians and the wider of the two scatters count, and `score` holds with them as long
            as every sample lies within half of it of what those runs had: a run with another
            batch, rate or clip scatters differently, and few samples do not tell how.
    """
    window = state.window
    size = len(window.values)
    flags, gross = state.flags, state.gross
    seen, marks = state.seen + 1, state.marks
    if flags:
        mask = (1 << thresholds.rate_window) - 1
        marks += (gross << 1) >> thresholds.rate_window
        flags, gross = (flags << 1) & mask, (gross << 1) & mask
    if seen >= _REMEMBERED:
        seen, marks = seen >> 1, marks >> 1
    center, deviation = value, 0.0
    as_before = False
    judged = size >= thresholds.early_after
    armed = size >= thresholds.arm_after
    if judged:
        center = window.median()
        deviation = window.mad(center)
        if prior is not None and not armed:
            center = max(center, prior[0])
            # Where the run's norms are higher, they scatter as much more.
            growth = center / prior[0] if prior[0] > 0 else 1.0
            usual = max(MAD_TO_SIGMA * growth * prior[1], _RELATIVE_FLOOR * abs(center))
            reach = _FITS * score * usual
            as_before = (
                center - reach <= window.ordered[0] and window.ordered[-1] <= center + reach
            )
            deviation = max(deviation, growth * prior[1])
        if window.ordered[0] <= 0.0 and _many_zeros(window.ordered):
            deviation = (window.ordered[int(_UPPER * size)] - center) / MAD_TO_SIGMA
            judged = deviation > 0.0
    limit = score if armed or as_before else max(score, thresholds.early_score)
    z = scale = 0.0
    if judged:
        scale = max(MAD_TO_SIGMA * deviation, _RELATIVE_FLOOR * abs(center), _ABSOLUTE_FLOOR)
        z = (value - center) / scale
        if z > limit and _has_two_levels(window, center + limit * scale, thresholds.rate_window):
            scale = max(scale, window.ordered[int(_UPPER * size)] - center)
            z = (value - center) / scale
    if z <= limit and (state.row == 0 or z <= _RELEASE * limit):
        count, most = (flags.bit_count(), gross.bit_count()) if flags else (0, 0)
        return (
            Judgement(
                False, z, center, scale, limit, 0, count, None, armed, (), most, 0, seen, marks
            ),
            SpikeState(
                window.push(value, thresholds.window), (), 0, 0, flags, gross, 0, seen, marks
            ),
        )
    flagged = z > limit
    row, consecutive, gross_row = state.row + 1, state.consecutive, 0
    if flagged:
        flags |= 1
        consecutive += 1
        if z > _GROSS * limit:
            gross |= 1
            gross_row = state.gross_row + 1
    held = push(state.held, value, thresholds.rebase_after)
    shifted_from = None
    if row <= _SHORT and flags.bit_count() > row + _OFTEN * thresholds.rate_window:
        window = window.push(value, thresholds.window)
    following = SpikeState(window, held, row, consecutive, flags, gross, gross_row, seen, marks)
    if row >= thresholds.rebase_after and _is_level(held, row, center, thresholds):
        shifted_from = center
        following = SpikeState(Window.of(held), seen=seen, marks=marks)
    judgement = Judgement(
        flagged,
        z,
        center,
        scale,
        limit,
        consecutive,
        flags.bit_count(),
        shifted_from,
        armed,
        held,
        gross.bit_count(),
        gross_row,
        seen,
        marks,
    )
    return judgement, following


def _many_zeros(ordered: tuple[float, ...]) -> bool:
    zeros = bisect_right(ordered, 0.0) - bisect_left(ordered, 0.0)
    return zeros >= _MANY_ZEROS * len(ordered)


def _has_two_levels(window: Window, limit: float, newest: int) -> bool:
    values = window.values
    if len(values) < 2 * newest or window.ordered[-1] <= limit:
        return False
    return sum(value > limit for value in values[-newest:]) >= _TWO_LEVELS * newest


def _is_level(
    held: tuple[float, ...], row: int, before: float, thresholds: DetectorThresholds
) -> bool:
    """Return whether the held samples are a level of their own, orderly or lasting."""
    if row >= _DISORDERLY_FACTOR * thresholds.rebase_after:
        return True
    level = Window.of(held)
    center = level.median()
    sigma = MAD_TO_SIGMA * level.mad(center)
    extent = max(abs(center), center - before)
    if sigma <= _ORDERLY * extent:
        return True
    half = len(held) // 2
    climb = median(held[half:]) - median(held[:half])
    return sigma <= _FAIRLY_ORDERLY * extent and climb <= _CLIMBS * sigma
