"""Whether a config learns as well as the baseline, at equal samples.

The baseline runs from several seeds; their losses at equal samples span a band, and a leader
whose loss lies above the band converges worse. Lower loss is better. Losses are compared over a
window of samples that all runs have seen, never step by step: configs may differ in how many
samples a step takes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mindtune.search.errors import SearchError
from mindtune.search.student import student_quantile

__all__ = ["ConvergenceBand", "ConvergenceVerdict", "LossCurve", "baseline_band", "judge"]

WINDOW = 0.2
"""Last share of the common samples that is compared."""


@dataclass(frozen=True)
class LossCurve:
    """Loss over samples seen."""

    samples: tuple[float, ...]
    """Samples seen after each step, rising."""
    losses: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.losses) or not self.samples:
            raise SearchError(
                "a loss curve needs one loss per count of samples, but got "
                f"{len(self.losses)} and {len(self.samples)}."
            )

    def mean_between(self, low: float, high: float) -> float:
        """Return the mean loss over low < samples <= high; NaN if no step ends there."""
        inside = [
            loss
            for seen, loss in zip(self.samples, self.losses, strict=True)
            if low < seen <= high
        ]
        return statistics.fmean(inside) if inside else math.nan


@dataclass(frozen=True)
class ConvergenceBand:
    """What the baseline reaches, and how far its seeds lie apart."""

    samples: float
    """End of the window: the samples that every baseline run has seen."""
    mean: float
    upper: float
    """Largest loss that one more seed of the baseline would show (95 %)."""
    curves: tuple[LossCurve, ...]


@dataclass(frozen=True)
class ConvergenceVerdict:
    """Whether a config converges as the baseline does."""

    ok: bool | None
    """None: cannot be told, see `reason`."""
    loss: float | None
    upper: float | None
    samples: float
    """Samples at which the two were compared."""
    reason: str


def baseline_band(curves: Sequence[LossCurve], *, samples: float | None = None) -> ConvergenceBand:
    """Return the band of a baseline from its seeds.

    The upper edge is the one-sided 95 % prediction limit for one more run: mean + t * s *
    sqrt(1 + 1/n).

    Args:
        curves: One per seed, at least two.
        samples: Where to compare; None: where the shortest run ends.

    Raises:
        SearchError: with fewer than two curves, or with losses that are not finite.
    """
    if len(curves) < 2:
        raise SearchError(
            f"a convergence band needs at least 2 seeds of the baseline, but got {len(curves)}."
        )
    end = min(curve.samples[-1] for curve in curves)
    end = end if samples is None else min(samples, end)
    losses = [curve.mean_between((1 - WINDOW) * end, end) for curve in curves]
    if not all(map(math.isfinite, losses)):
        raise SearchError(f"the baseline's losses must be finite, but got {losses}.")
    mean, deviation = statistics.fmean(losses), statistics.stdev(losses)
    quantile = student_quantile(0.95, len(losses) - 1)
    upper = mean + quantile * deviation * math.sqrt(1 + 1 / len(losses))
    return ConvergenceBand(end, mean, upper, tuple(curves))


def judge(curve: LossCurve, band: ConvergenceBand) -> ConvergenceVerdict:
    """Return whether a run stays below the band's upper edge at equal samples."""
    if curve.samples[-1] < band.samples:
        # Compare where both are: an early part of the baseline's own curves.
        shorter = baseline_band(band.curves, samples=curve.samples[-1])
        if shorter.samples < band.samples:
            return judge(curve, shorter)
    loss = curve.mean_between((1 - WINDOW) * band.samples, band.samples)
    if math.isnan(loss) and not any(map(math.isnan, curve.losses)):
        return ConvergenceVerdict(
            None, None, band.upper, band.samples,
            f"no step of the run ends in the last {WINDOW:.0%} of {band.samples:g} samples",
        )  # fmt: skip
    if not math.isfinite(loss):
        return ConvergenceVerdict(
            False,
            loss,
            band.upper,
            band.samples,
            f"the loss is {loss} at {band.samples:g} samples",
        )
    ok = loss <= band.upper
    return ConvergenceVerdict(
        ok, loss, band.upper, band.samples,
        f"loss {loss:.4f} at {band.samples:g} samples is {'within' if ok else 'above'} the "
        f"baseline's {band.mean:.4f} with upper edge {band.upper:.4f} ({len(band.curves)} seeds)",
    )  # fmt: skip
