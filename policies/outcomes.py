"""Judges what a granted set-point did: whether it took effect, and whether it helped."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mindtune.policies.arbiter_state import ArbiterState, Pending
from mindtune.policies.limits import KnobLimits
from mindtune.policies.signals import Observation
from mindtune.policies.windows import MAD_TO_SIGMA, median

__all__ = ["Outcome", "baseline_of", "follow", "judge", "memory_share", "tokens_per_second"]

_MIN_SAMPLES = 4
# A raise of the learning rate must not cost loss: 2 % or one standard deviation of a single
# sample, whichever is more. The median of 16 samples has a standard error of 0.31 deviations.
_LOSS_TOLERANCE = 0.02
_RELATIVE_MATCH = 1e-3
# What overflows or skips in more than half of the steps does not pay.
_MOST_BAD = 0.5
# A smaller micro-batch that frees less than 2 % costs time for nothing.
_MEMORY_FELL = 0.98


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


def memory_share(observation: Observation) -> float | None:
    """Return the share of the device memory in use, or None if it was not measured."""
    total = observation.device_memory_total_bytes
    used = observation.memory_allocated_bytes
    if used is None:
        used = observation.device_memory_used_bytes
    if used is None or total is None or not (0 <= used < math.inf and 0 < total < math.inf):
        return None
    return used / total


def baseline_of(
    check: str, state: ArbiterState, observation: Observation
) -> tuple[float | None, float]:
    """Return median and robust deviation of the judged signal before a grant."""
    if check == "memory":
        return memory_share(observation), 0.0
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
        if math.isclose(acting, pending.value, rel_tol=_RELATIVE_MATCH, abs_tol=1e-15):
            pending = replace(pending, effective=True)
        else:
            return replace(pending, mismatches=pending.mismatches + 1)
    sample: float | None
    if limits.check == "loss":
        sample = observation.loss
    elif limits.check == "throughput":
        sample = tokens_per_second(observation)
    elif limits.check == "memory":
        sample = memory_share(observation)
    elif limits.check == "skipped":
        sample = observation.update_skipped if not observation.overflow else 0.0
    else:
        sample = observation.overflow
    if not pending.judged or sample is None or len(pending.samples) >= limits.check_after:
        return pending
    return replace(pending, samples=(*pending.samples, sample))


def judge(pending: Pending, limits: KnobLimits) -> Outcome:
    """Return the verdict over the samples since the set-point took effect."""
    samples = pending.samples
    raised = pending.before is not None and pending.value > pending.before
    lowered = pending.before is not None and pending.value < pending.before
    if limits.check in ("overflow", "skipped"):
        bad = sum(1 for sample in samples if sample != 0)
        often = bad > _MOST_BAD * len(samples)
        if limits.check == "overflow":
            text = f"{bad} of {len(samples)} steps overflowed since"
            return Outcome(text=text, undo=raised and often)
        text = f"{bad} of {len(samples)} updates were skipped since"
        return Outcome(text=text, undo=lowered and often)
    finite = tuple(sample for sample in samples if math.isfinite(sample))
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
    if limits.check == "memory":
        text = f"memory in use went from {pending.baseline:.1%} to {after:.1%} of the device"
        return Outcome(text=text, undo=lowered and after > _MEMORY_FELL * pending.baseline)
    tolerance = max(_LOSS_TOLERANCE * abs(pending.baseline), pending.spread)
    text = (
        f"median loss went from {pending.baseline:.4g} to {after:.4g} in {len(samples)} steps "
        f"(tolerance of a raise: {tolerance:.2g})"
    )
    return Outcome(text=text, undo=raised and after > pending.baseline + tolerance)
