"""From a trial's result to the numbers that scoring takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mindtune.controller.contract import TrialResult
from mindtune.controller.trials.outcome import TrialOutcome
from mindtune.policies import detectors
from mindtune.policies.detectors import DetectorState, DetectorThresholds
from mindtune.policies.detectors.non_finite import LARGEST
from mindtune.policies.signals import Observation
from mindtune.search.convergence import LossCurve, mean_loss
from mindtune.search.scoring import MeasuredTrial

__all__ = ["bad_steps", "final_loss", "loss_curve", "measured_trial"]

_SPIKE = "loss_spike"
_JUDGED_STEPS = 10_000
"""Spikes are looked for in so many last losses, at some 40 us each: a result may hold millions."""
_FINAL_SHARE = 0.2
"""Last share of the measured losses whose mean is the final loss."""


def measured_trial(outcome: TrialOutcome) -> MeasuredTrial | None:
    """Return what a launch measured; None unless it ended ok."""
    result = outcome.result
    if outcome.record.outcome != "ok" or result is None:
        return None
    times = result.step_times()
    steps = max(len(times), *(len(values) for values in _series(result)))
    if len(times) == 1:
        # One number stands for every measured step.
        times *= steps
    mfu = result.mfu
    return MeasuredTrial(
        step_time_s=times,
        bad_steps=min(bad_steps(result, steps), len(times)),
        tokens_per_step=result.tokens_per_step,
        samples_per_step=result.samples_per_step,
        peak_memory_bytes=outcome.record.peak_memory_bytes,
        mfu=mfu if mfu is not None and math.isfinite(mfu) else None,
    )


def bad_steps(result: TrialResult, steps: int) -> int:
    """Return how many measured steps were non-finite, overflowed, skipped or loss-spiking.

    Spikes are those that the live policies' detectors would report.
    """
    losses, norms, overflows, skips = (values[:steps] for values in _series(result))
    bad = {
        index
        for values in (losses, norms)
        for index, value in enumerate(values)
        if not abs(value) < LARGEST
    }
    bad |= {index for values in (overflows, skips) for index, value in enumerate(values) if value}
    bad |= _spikes(losses)
    # A single number is a rate over all steps.
    numbers = (result.overflow, result.update_skipped)
    rates = [value for value in numbers if isinstance(value, (int, float)) and value > 0]
    return max([len(bad), *(math.ceil(min(rate, 1.0) * steps) for rate in rates)])


def _series(result: TrialResult) -> tuple[list[float], list[float], list[float], list[float]]:
    values = (result.loss, result.grad_norm, result.overflow, result.update_skipped)
    listed = [entry if isinstance(entry, list) else [] for entry in values]
    return listed[0], listed[1], listed[2], listed[3]


def _spikes(losses: Sequence[float]) -> set[int]:
    state, thresholds = DetectorState(), DetectorThresholds()
    found = set()
    first = max(0, len(losses) - _JUDGED_STEPS)
    for index, loss in enumerate(losses[first:], start=first):
        findings, state = detectors.update(
            Observation(step=index + 1, loss=loss), state, thresholds, None
        )
        if any(finding.kind == _SPIKE for finding in findings):
            found.add(index)
    return found


def loss_curve(
    result: TrialResult, *, warmup_steps: int, samples_per_step: float, seed: int | None = None
) -> LossCurve | None:
    """Return loss over samples since sample 0; None without a list of losses."""
    losses = result.loss
    if not isinstance(losses, list) or not losses:
        return None
    first = warmup_steps + 1
    samples = tuple(float((first + index) * samples_per_step) for index in range(len(losses)))
    return LossCurve(samples, tuple(losses), seed)


def final_loss(result: TrialResult) -> float | None:
    """Return the mean of the last measured losses; None: there are none, NaN: it is no number."""
    losses = result.loss
    if losses is None:
        return None
    if not isinstance(losses, list):
        return losses
    if not losses:
        return None
    last = losses[-max(1, round(_FINAL_SHARE * len(losses))) :]
    mean = mean_loss(last)
    return mean if math.isfinite(mean) else math.nan
