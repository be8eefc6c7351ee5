"""Whether a config learns as well as the baseline, at equal samples.

The baseline runs from several seeds; their losses at equal samples span a band, and a leader
whose mean loss over its own seeds lies above the band converges worse. Where both ran from the
same seeds, three or all of the baseline's, the differences seed by seed are judged instead: what a
seed does to both of them, by its weights and its order of samples, cancels out. From fewer than
three seeds on either side little can be shown, and that is what is said. Lower loss is better, by
however much. Losses are compared over a window of samples that all runs have seen, never step by
step: configs may differ in how many samples a step takes.

A loss that ends not finite is never as good as the baseline's, whether there is a band or not;
one that only was not finite on the way, and was passed over, may be. A seed of the baseline that
ended so says nothing of where the others end and is left out of the band. What cannot be told is
None, with the reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindtune.search.errors import SearchError
from mindtune.search.student import student_quantile

__all__ = ["ConvergenceBand", "ConvergenceVerdict", "LossCurve", "baseline_band", "judge",
           "mean_loss", "never_finite"]  # fmt: skip

WINDOW = 0.2
"""Last share of the common samples that is compared."""
_ROUNDING = 1e-3
"""Least deviation, as a share of the loss. Seeds that a program ignores all end alike, but other
orders of summation do not: bfloat16 rounds each value by up to 0.4 %."""
_FEWEST_SEEDS, _MANY_SEEDS = 2, 3
"""Two seeds leave one degree of freedom: an edge at 6.3 standard errors (three: at 2.9)."""
_LARGEST = 1e150
"""Magnitude from which a loss is not taken for a number, as the detectors have it: no device
computes with such, and it would overflow in sums."""
_MIN_SHARE = 0.5
"""Share of the baseline's samples that a run must have recorded losses of to be judged."""


def mean_loss(losses: Sequence[float]) -> float:
    """Return the mean of losses; NaN of none, and where it is too large to be reckoned with.

    It is NaN or infinite where a loss is.
    """
    try:
        mean = statistics.fmean(losses) if losses else math.nan
    except (ValueError, OverflowError):  # infinities of both signs, or no float is so large
        return math.nan
    return math.nan if _LARGEST <= abs(mean) < math.inf else mean


@dataclass(frozen=True)
class LossCurve:
    """Loss over samples seen."""

    samples: tuple[float, ...]
    """Samples seen after each step, rising."""
    losses: tuple[float, ...]
    seed: int | None = None
    """What the run was begun from; None: not known, and it is paired with no other."""

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.losses) or not self.samples:
            raise SearchError(
                "a loss curve needs one loss per count of samples, but got "
                f"{len(self.losses)} and {len(self.samples)}."
            )

    @property
    def ends_broken(self) -> bool:
        """Whether a loss in the last part of the run is not finite."""
        return not math.isfinite(self.mean_between((1 - WINDOW) * self.samples[-1], math.inf))

    def mean_between(self, low: float, high: float) -> float:
        """Return the mean loss over low < samples <= high; NaN if no step ends there.

        It is NaN or infinite where a loss is, or where the sum is beyond all numbers.
        """
        inside = [
            loss
            for seen, loss in zip(self.samples, self.losses, strict=True)
            if low < seen <= high
        ]
        return mean_loss(inside)


@dataclass(frozen=True)
class ConvergenceBand:
    """What the baseline reaches, and how far its seeds lie apart."""

    samples: float
    """End of the window: the samples that every baseline run has seen."""
    mean: float
    deviation: float
    """From seed to seed, and at least that of rounding."""
    curves: tuple[LossCurve, ...]
    """Those that end finite."""

    def upper(self, runs: int) -> float:
        """Return the largest mean loss that so many more seeds of the baseline show (95 %).

        The one-sided prediction limit mean + t * s * sqrt(1 / m + 1 / n) of n seeds for m more.
        """
        seeds = len(self.curves)
        quantile = student_quantile(0.95, seeds - 1)
        return self.mean + quantile * self.deviation * math.sqrt(1 / runs + 1 / seeds)


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

    Args:
        curves: One per seed, at least two of which end finite.
        samples: Where to compare; None: where the shortest run ends.

    Raises:
        SearchError: with fewer than two curves that end finite.
    """
    finite = [curve for curve in curves if not curve.ends_broken]
    if len(finite) < 2:
        lost = len(curves) - len(finite)
        raise SearchError(
            f"a convergence band needs at least 2 seeds of the baseline, but got {len(finite)}"
            + (f" and {lost} whose loss ends not finite." if lost else ".")
        )
    end = min(curve.samples[-1] for curve in finite)
    end = end if samples is None else min(samples, end)
    losses = [curve.mean_between((1 - WINDOW) * end, end) for curve in finite]
    if not all(map(math.isfinite, losses)):
        raise SearchError(
            f"every seed of the baseline must end a step in the last {WINDOW:.0%} of {end:g} "
            f"samples, but their mean losses there are {losses}."
        )
    mean = statistics.fmean(losses)
    deviation = max(statistics.stdev(losses), _ROUNDING * abs(mean))
    return ConvergenceBand(end, mean, deviation, tuple(finite))


def never_finite(curves: Sequence[LossCurve]) -> ConvergenceVerdict | None:
    """Return the verdict over a config of which a run ends not finite; None: none does."""
    for curve in curves:
        if curve.ends_broken:
            end = curve.samples[-1]
            reason = f"its loss is not finite at the end, at {end:g} samples"
            return ConvergenceVerdict(False, math.nan, None, end, reason)
    return None


def judge(curves: Sequence[LossCurve], band: ConvergenceBand) -> ConvergenceVerdict:
    """Return whether a config's mean loss stays below the band's upper edge at equal samples.

    Args:
        curves: Of the config, one per seed, at least one.
        band: Of the baseline.
    """
    upper = band.upper(len(curves))
    broken = never_finite(curves)
    if broken is not None:
        return replace(broken, upper=upper)
    end = min(curve.samples[-1] for curve in curves)
    if end < _MIN_SHARE * band.samples:
        reason = f"losses were recorded of {end:g} of {band.samples:g} samples only"
        return ConvergenceVerdict(None, None, upper, end, reason)
    if end < band.samples:
        # Compare where both are: an early part of the baseline's own curves.
        try:
            band = baseline_band(band.curves, samples=end)
        except SearchError as error:
            return ConvergenceVerdict(None, None, None, end, str(error))
        upper = band.upper(len(curves))
    start = (1 - WINDOW) * band.samples
    losses = [curve.mean_between(start, band.samples) for curve in curves]
    if not all(map(math.isfinite, losses)):
        return ConvergenceVerdict(
            None, None, upper, band.samples,
            f"no step of the run ends with a finite loss in the last {WINDOW:.0%} of "
            f"{band.samples:g} samples",
        )  # fmt: skip
    mean, seeds, how = band.mean, len(band.curves), ""
    pairs = _pairs(curves, band)
    if pairs:
        losses = [own.mean_between(start, band.samples) for own, _ in pairs]
        bases = [base.mean_between(start, band.samples) for _, base in pairs]
        mean, seeds, how = statistics.fmean(bases), len(pairs), ", compared seed by seed"
        upper = mean + _paired_edge(losses, bases)
    loss = statistics.fmean(losses)
    ok = loss <= upper
    is_shown = min(seeds, len(losses)) >= _MANY_SEEDS
    stands = ("within" if is_shown else "not shown to be worse than") if ok else "above"
    return ConvergenceVerdict(
        ok, loss, upper, band.samples,
        f"loss {loss:.4f} ({len(losses)} seeds) at {band.samples:g} samples is {stands} the "
        f"baseline's {mean:.4f} with upper edge {upper:.4f} ({seeds} seeds{how})",
    )  # fmt: skip


def _pairs(
    curves: Sequence[LossCurve], band: ConvergenceBand
) -> list[tuple[LossCurve, LossCurve]]:
    """Return the runs of a config and of the baseline that share a seed; empty: too few do.

    Fewer pairs than the baseline has seeds, and fewer than three, would tell less than all seeds
    unpaired. A seed that stands for several runs tells nothing: all of them may be alike.
    """
    own, base = _by_seed(curves), _by_seed(band.curves)
    shared = [(own[seed], base[seed]) for seed in own if seed in base]
    enough = len(shared) >= min(_MANY_SEEDS, max(_FEWEST_SEEDS, len(band.curves)))
    return shared if enough else []


def _by_seed(curves: Sequence[LossCurve]) -> dict[int, LossCurve]:
    seeds = [curve.seed for curve in curves]
    return {
        curve.seed: curve
        for curve in curves
        if curve.seed is not None and seeds.count(curve.seed) == 1
    }


def _paired_edge(losses: Sequence[float], bases: Sequence[float]) -> float:
    """Return the largest mean difference that equal configs show (95 %): t * s / sqrt(n)."""
    differences = [own - base for own, base in zip(losses, bases, strict=True)]
    rounding = _ROUNDING * abs(statistics.fmean(bases))
    deviation = max(statistics.stdev(differences), rounding)
    count = len(differences)
    return student_quantile(0.95, count - 1) * deviation / math.sqrt(count)
