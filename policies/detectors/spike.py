"""Outliers of one signal against its own recent past, and the shift of its level.

Theory of operation. A sample is scored against the median and the median absolute deviation of
the last `window` unflagged samples, z = (x - median) / max(1.4826 MAD, 0.05 |median|, 1e-12): the
floors keep a very quiet signal from flagging its own noise. The full threshold holds once
`arm_after` samples are there, a much higher one from `early_after` on. A flagged sample is held
apart and does not enter the baseline, so a burst cannot hide its own tail. Flags are counted in a
row and within a window, since a rule on consecutive flags alone is evaded by one good sample.

Samples that are held for `rebase_after` flags in a row at low dispersion are no fault but a new
level (another batch size, another phase of the schedule): they become the baseline and the shift
is declared. A disordered level is taken over too, after four times as many.

Only finite samples come here: non-finite ones are a class of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.windows import MAD_TO_SIGMA, Window, push

__all__ = ["Judgement", "SpikeState", "judge_sample"]

_RELATIVE_FLOOR = 0.05
_ABSOLUTE_FLOOR = 1e-12
# A level is orderly if its robust deviation is below a quarter of its median.
_ORDERLY = 0.25
_DISORDERLY_FACTOR = 4


@dataclass(frozen=True, slots=True)
class SpikeState:
    """Baseline and flags of one signal."""

    window: Window = field(default_factory=Window)
    """Unflagged samples."""
    held: tuple[float, ...] = ()
    """Newest flagged samples of the current row."""
    consecutive: int = 0
    """Flags in a row."""
    flags: int = 0
    """One bit per sample, the newest lowest."""


class Judgement(NamedTuple):
    """Verdict over one sample."""

    flagged: bool
    score: float
    """Robust deviations above the median; 0 while there is no baseline."""
    median: float
    """Of the baseline; the sample itself while there is none."""
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
    """Newest flagged samples of the row, this one included."""


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
        prior: Median and MAD that stand in until the baseline is armed.
    """
    window = state.window
    size = len(window)
    mask = (1 << thresholds.rate_window) - 1
    if size < thresholds.early_after:
        following = SpikeState(
            window.push(value, thresholds.window), (), 0, (state.flags << 1) & mask
        )
        return Judgement(False, 0.0, value, score, 0, 0, None, False, ()), following
    center = window.median()
    deviation = window.mad(center)
    armed = size >= thresholds.arm_after
    limit = score if armed else max(score, thresholds.early_score)
    if prior is not None and not armed and prior[0] > center:
        center, deviation = prior
    scale = max(MAD_TO_SIGMA * deviation, _RELATIVE_FLOOR * abs(center), _ABSOLUTE_FLOOR)
    z = (value - center) / scale
    if z <= limit:
        following = SpikeState(
            window.push(value, thresholds.window), (), 0, (state.flags << 1) & mask
        )
        return (
            Judgement(False, z, center, limit, 0, following.flags.bit_count(), None, armed, ()),
            following,
        )
    flags = ((state.flags << 1) | 1) & mask
    consecutive = state.consecutive + 1
    held = push(state.held, value, thresholds.rebase_after)
    shifted_from = None
    if consecutive >= thresholds.rebase_after and _is_level(held, consecutive, thresholds):
        shifted_from = center
        following = SpikeState(Window.of(held), (), 0, 0)
    else:
        following = SpikeState(window, held, consecutive, flags)
    return (
        Judgement(
            True, z, center, limit, consecutive, flags.bit_count(), shifted_from, armed, held
        ),
        following,
    )


def _is_level(held: tuple[float, ...], consecutive: int, thresholds: DetectorThresholds) -> bool:
    """Return whether the held samples are a level of their own, orderly or lasting."""
    if consecutive >= _DISORDERLY_FACTOR * thresholds.rebase_after:
        return True
    level = Window.of(held)
    center = level.median()
    return MAD_TO_SIGMA * level.mad(center) <= _ORDERLY * abs(center)
