"""Confirm the leaders of a search: fresh repeats in turn with the base config, and a winner.

Theory of operation. The search's own measurements choose the leaders, so their values are too
good on average: the confirmation counts new ones only. Base and leaders run one after the other,
again and again, so that a slow moment of the machine hits all of them alike. Repeat r has one seed
for all configs. Where the confirmation is longer than a trial of the search, it also judges
convergence at equal samples: seed by seed where base and leader share their seeds, otherwise
against the band that the base's seeds span. A leader above is out. If all leaders are out, those
that follow them take their place once, again in turn with the base; also such as were stopped
early, since what they were stopped for was out. The winner is the first of the ranking that is
better than the base beyond noise; if there is none, the base wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindtune.controller.contract import StudyFile
from mindtune.controller.trials.measure import Launch
from mindtune.controller.trials.measured import loss_curve
from mindtune.controller.trials.summary import Measurement
from mindtune.search.confirming import TIE, Confirmed, compare, rank
from mindtune.search.convergence import (
    ConvergenceBand,
    ConvergenceVerdict,
    LossCurve,
    baseline_band,
    judge,
    never_finite,
)
from mindtune.search.errors import SearchError

__all__ = ["BASE", "Plan", "Verdict", "choose", "exclusion", "judge_convergence", "num_leaders"]

BASE = 0
"""Number of the base config's trial."""
_MAX_LEADERS = 3
_LEADER_SHARE = 0.2
_BAND_SEEDS = 3
"""Seeds of the base that the band of convergence takes at least."""


def num_leaders(trials: int) -> int:
    """Return how many configs are confirmed: a fifth of those tried, one to three."""
    return max(1, min(_MAX_LEADERS, round(_LEADER_SHARE * trials)))


@dataclass(frozen=True)
class Plan:
    """Which measurements a confirmation takes."""

    leaders: tuple[int, ...]
    repeats: int
    steps: int | None
    """Steps of each from sample 0; None: those of the search, and convergence is not judged."""
    base_repeats: int = 0
    """Confirming repeats of the base that were planned before this; new ones follow them."""

    @classmethod
    def of(cls, study: StudyFile, leaders: Sequence[int], *, after: Plan | None = None) -> Plan:
        """Return the plan for the leaders of a study, best first.

        Args:
            study: How long and how often.
            leaders: Configs to confirm.
            after: The plan whose leaders are all out.
        """
        trial = study.trial
        longer = trial.confirm_steps > trial.warmup_steps + trial.measure_steps
        base_repeats = 0 if after is None else sum(number == BASE for number, _ in after.order())
        steps = trial.confirm_steps if longer else None
        return cls(tuple(leaders), trial.repeats, steps, base_repeats)

    def order(self) -> list[tuple[int, int]]:
        """Return (number of the config, repeat) in the order of measuring."""
        judged = self.steps is not None
        rounds = max(self.repeats, _BAND_SEEDS - self.base_repeats) if judged else self.repeats
        return [
            (number, repeat + self.base_repeats if number == BASE else repeat)
            for repeat in range(1, rounds + 1)
            for number in (BASE, *self.leaders)
            if number == BASE or repeat <= self.repeats
        ]


def judge_convergence(
    launches: Mapping[int, Sequence[Launch]], *, samples_per_step: int
) -> dict[int, ConvergenceVerdict]:
    """Return for each leader whether it converges as the base does.

    Args:
        launches: number of a config -> its confirming launches.
        samples_per_step: global batch size, where a trial does not say its own.
    """
    curves = {
        number: [
            curve
            for launch in repeats
            if launch.outcome.record.outcome == "ok" and launch.outcome.result is not None
            and (
                curve := loss_curve(
                    launch.outcome.result,
                    warmup_steps=launch.plan.warmup_steps,
                    samples_per_step=launch.outcome.result.samples_per_step or samples_per_step,
                    seed=launch.plan.seed,
                )
            )
        ]
        for number, repeats in launches.items()
    }  # fmt: skip
    band: ConvergenceBand | None = None
    reason = ""
    try:
        band = baseline_band(curves.get(BASE, []))
    except SearchError as error:
        reason = str(error)
    return {number: _judge(own, band, reason) for number, own in curves.items() if number != BASE}


def _judge(
    curves: Sequence[LossCurve], band: ConvergenceBand | None, why_none: str
) -> ConvergenceVerdict:
    if curves and band is not None:
        return judge(curves, band)
    broken = never_finite(curves)
    if broken is not None:
        return broken
    why = "its repeats recorded no losses" if not curves else why_none
    return ConvergenceVerdict(None, None, None, 0.0, f"not judged: {why}")


@dataclass(frozen=True)
class Verdict:
    """The winner of a study, and why."""

    winner: int | None
    """None: nothing ended ok."""
    reason: str


def choose(
    repeats: Mapping[int, Sequence[Measurement]],
    verdicts: Mapping[int, ConvergenceVerdict],
    *,
    device_memory: float | None,
) -> Verdict:
    """Return the winner among confirmed configs.

    Args:
        repeats: number of a config -> its confirming measurements, the base's included.
        verdicts: number of a leader -> its convergence.
        device_memory: bytes of one device; None: unknown, then less memory used is more to spare.
    """
    excluded: dict[int, str] = {}
    confirmed = []
    for number, measurements in repeats.items():
        why = exclusion(number, measurements, verdicts.get(number))
        if why:
            excluded[number] = why
        else:
            confirmed.append(_confirmed(number, measurements, device_memory))
    notes = "".join(f"; trial {number} is out: {why}" for number, why in excluded.items())
    ranked = rank(confirmed)
    if not ranked:
        return Verdict(None, f"no config ended ok{notes}")
    # A base that breaks the memory limit cannot win, but it can be compared with.
    base_values = [entry.value for entry in repeats.get(BASE, ()) if entry.value]
    if not base_values:
        best = ranked[0]
        return Verdict(best.number, f"the best value, {best.median:.4g}{notes}")
    for entry in ranked:
        if entry.number == BASE:
            continue
        comparison = compare(entry.values, base_values)
        single = comparison.different is None and comparison.ratio > 1.0 + TIE
        if (comparison.ratio > 1.0 and (comparison.different or single)) or BASE in excluded:
            interval = (
                "one repeat each, so noise is not known"
                if comparison.different is None
                else f"95 % interval {comparison.low:.2f} to {comparison.high:.2f}"
            )
            return Verdict(
                entry.number,
                f"{comparison.ratio:.2f} x the base config's value ({interval})"
                f"{_tie_note(entry, ranked)}{_doubt(verdicts.get(entry.number))}{notes}",
            )
    return Verdict(BASE, f"no config is better than the base config beyond noise{notes}")


def exclusion(
    number: int, measurements: Sequence[Measurement], verdict: ConvergenceVerdict | None
) -> str:
    """Return why a config cannot win; empty: it can.

    Args:
        number: Of the config.
        measurements: Its confirming ones.
        verdict: Over its convergence; None: not judged.
    """
    failed = [entry for entry in measurements if entry.outcome != "ok" or not entry.value]
    if number == BASE and len(failed) < len(measurements):
        # The base is what the user runs today: it wins by its good repeats if nothing beats it.
        return ""
    if failed:
        first = failed[0]
        if first.outcome == "ok" and not first.message:
            return f"repeat {first.repeat} ended, but its value is 0, as no step of it was good"
        return f"repeat {first.repeat} was {first.outcome}: {first.message}"
    if not measurements:
        return "it was not measured again"
    if verdict is not None and verdict.ok is False:
        return f"it does not converge as the base does: {verdict.reason}"
    return ""


def _confirmed(
    number: int, measurements: Sequence[Measurement], device_memory: float | None
) -> Confirmed:
    measurements = [entry for entry in measurements if entry.outcome == "ok" and entry.value]
    peaks = [m.peak_memory_bytes for m in measurements if m.peak_memory_bytes is not None]
    headroom = (device_memory or 0.0) - max(peaks) if peaks else None
    values = tuple(float(entry.value) for entry in measurements if entry.value)
    return Confirmed(number, values, headroom)


def _doubt(verdict: ConvergenceVerdict | None) -> str:
    """Return that nobody knows whether the winner learns as well, where that was asked."""
    if verdict is None or verdict.ok is not None:
        return ""
    return f"; whether it learns as well as the base is not known ({verdict.reason})"


def _tie_note(entry: Confirmed, ranked: Sequence[Confirmed]) -> str:
    best = max(ranked, key=lambda other: other.median)
    if best is entry:
        return ""
    return f"; it lies within {TIE:.0%} of trial {best.number} and needs less memory"
