"""Judges what a granted set-point did: whether it took effect, and whether it helped."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mindtune.policies.arbiter_state import ArbiterState, Pending
from mindtune.policies.limits import KnobLimits
from mindtune.policies.signals import Observation
from mindtune.policies.windows import MAD_TO_SIGMA, median

__all__ = ["Outcome", "baseline_of", "follow", "judge", "tokens_per_second"]

_MIN_SAMPLES = 4
# A raise of the learning rate must not cost loss: 2 % or one standard deviation of a single
# sample, whichever is more. The median of 16 samples has a standard error of 0.31 deviations.
_LOSS_TOLERANCE = 0.02
_RELATIVE_MATCH = 1e-3


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Verdict over one pending set-point."""

    text: str
    undo: bool


def tokens_per_second(observation: Observation) -> float | None:
    """Return the throughput of this step, or None if it was not measured or is impossible."""
    rate = observation.tokens_per_s
    if rate is None and observation.tokens is not None and observation.step_time_s:
        rate = observation.tokens / observation.step_time_s
    if rate is None or not math.isfinite(rate) or rate <= 0:
        return None
    return rate


def baseline_of(check: str, state: ArbiterState) -> tuple[float | None, float]:
    """Return median and robust deviation of the judged signal before a grant."""
    values = {"loss": state.losses, "throughput": state.throughputs}.get(check, ())
    if len(values) < _MIN_SAMPLES:
        return None, 0.0
    center = median(values)
    return center, MAD_TO_SIGMA * median(tuple(abs(value - center) for value in values))


def follow(
    pending: Pending, limits: KnobLimits, observation: Observation, acting: float | None
) -> Pending:
    """Return `pending` with this step's report of the knob and sample of the signal added."""
    if not pending.effective and acting is not None:
        if abs(acting - pending.value) <= _RELATIVE_MATCH * max(abs(pending.value), 1e-12):
            pending = replace(pending, effective=True)
        else:
            return replace(pending, mismatches=pending.mismatches + 1)
    sample: float | None
    if limits.check == "loss":
        sample = observation.loss
    elif limits.check == "throughput":
        sample = tokens_per_second(observation)
    else:
        sample = observation.overflow
    if not pending.judged or sample is None or len(pending.samples) >= limits.check_after:
        return pending
    return replace(pending, samples=(*pending.samples, sample))


def judge(pending: Pending, limits: KnobLimits) -> Outcome:
    """Return the verdict over the samples since the set-point took effect."""
    samples = pending.samples
    if limits.check == "overflow":
        bad = sum(1 for sample in samples if sample != 0)
        return Outcome(text=f"kept: {bad} of {len(samples)} steps overflowed since", undo=False)
    finite = tuple(sample for sample in samples if math.isfinite(sample))
    raised = pending.before is not None and pending.value > pending.before
    if 2 * len(finite) < len(samples):
        return Outcome(
            text=f"{len(samples) - len(finite)} of {len(samples)} samples were not finite",
            undo=raised,
        )
    if len(finite) < _MIN_SAMPLES or pending.baseline is None:
        return Outcome(text="kept: not measured well enough to be judged", undo=False)
    after = median(finite)
    if limits.check == "throughput":
        gain = after / pending.baseline
        text = (
            f"tokens/s went from {pending.baseline:.4g} to {after:.4g}, a gain of {gain:.3f} "
            f"(asked for: {limits.min_gain:g})"
        )
        return Outcome(text=text, undo=raised and gain < limits.min_gain)
    tolerance = max(_LOSS_TOLERANCE * abs(pending.baseline), pending.spread)
    text = (
        f"median loss went from {pending.baseline:.4g} to {after:.4g} in {len(samples)} steps "
        f"(tolerance of a raise: {tolerance:.2g})"
    )
    return Outcome(text=text, undo=raised and after > pending.baseline + tolerance)
