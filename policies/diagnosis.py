"""From findings to causes: the texts of stops and advice.

Every text says what was seen, against which threshold, what that rules in or out, and what to do
next. A stop without a cause is the most repeated complaint about loss scalers and guards.
"""

from __future__ import annotations

import math

from mindtune.policies.findings import Finding, FindingKind
from mindtune.policies.signals import Observation

__all__ = [
    "diagnose_data_stall",
    "diagnose_floor_of_learning_rate",
    "diagnose_floor_of_loss_scale",
    "diagnose_frozen",
    "diagnose_non_finite",
    "diagnose_storm",
    "diagnose_without_effect",
]


def _state_of(name: str, value: float | None) -> str:
    if value is None:
        return f"the {name} is not measured"
    if math.isfinite(value):
        return f"the {name} is finite ({value:.4g})"
    return f"the {name} is {value}"


def diagnose_non_finite(observation: Observation, finding: Finding, limit: int) -> str:
    """Explain why a run with non-finite values was ended."""
    is_loss = finding.kind is FindingKind.NON_FINITE_LOSS
    name = "loss" if is_loss else "gradient norm"
    head = f"non-finite {name} for {limit} steps in a row (step {observation.step})"
    if not is_loss and observation.loss is not None and math.isfinite(observation.loss):
        cause = (
            f"the loss is finite ({observation.loss:.4g}), so the forward pass and the weights "
            "are still good and the backward pass is not: look for sqrt, log, norm or division at "
            "zero in the loss, and for float16 gradients without loss scaling"
        )
    elif observation.update_skipped:
        cause = (
            "every update was skipped, so the weights are those of the last good step, or were "
            "bad before: look at the batches since then, and at the checkpoint that was loaded"
        )
    else:
        cause = (
            "updates were applied, so the weights hold non-finite values by now: a lower learning "
            "rate or loss scale cannot help any more"
        )
    return (
        f"{head}: {cause}. Go back to a checkpoint from before step "
        f"{max(1, observation.step - limit)}, pass over the data since then, and lower the "
        "learning rate if it happens again."
    )


def diagnose_frozen(observation: Observation, finding: Finding) -> str:
    """Explain why a run with a frozen loss was ended."""
    norm = _state_of("gradient norm", observation.grad_norm)
    return (
        f"{finding.message} {norm[0].upper()}{norm[1:]}. Nothing is learnt any more: an earlier "
        "update has driven the weights out of range (a loss of ln(vocabulary size) means uniform "
        "guesses). Go back to a checkpoint from before the loss froze, with a lower learning rate."
    )


def diagnose_floor_of_learning_rate(
    observation: Observation, finding: Finding, floor: float
) -> str:
    """Explain that a lower learning rate did not help."""
    return (
        f"{finding.message} The learning-rate scale is at its floor {floor:g} already (step "
        f"{observation.step}), so the rate is not the cause: look at the data since the trouble "
        "began and at the weights that were loaded; go back to a checkpoint from before it."
    )


def diagnose_floor_of_loss_scale(observation: Observation, hits: int) -> str:
    """Explain why a run whose loss scale cannot fall any further was ended."""
    loss = observation.loss
    scale = "unknown" if observation.loss_scale is None else f"{observation.loss_scale:g}"
    head = (
        f"{hits} overflows in a row at the floor of the loss scale (now {scale}, step "
        f"{observation.step}); {_state_of('loss', loss)}, "
        f"{_state_of('gradient norm', observation.grad_norm)}"
    )
    if loss is not None and not math.isfinite(loss):
        cause = (
            "the loss itself is not finite, so the forward pass overflows and no loss scale can "
            "help: the weights are bad (check the loaded checkpoint for NaN), the learning rate "
            "is far too high, or the batch holds non-finite values"
        )
    else:
        cause = (
            "the loss is finite but the gradients overflow without any scaling: they exceed "
            "float16's 65504. Check for a loss that is summed instead of averaged, multiplied by "
            "the number of devices, or a masked softmax with -inf; keep normalisation, softmax "
            "and loss in float32, or train in bfloat16"
        )
    return f"{head}: {cause}."


def diagnose_storm(observation: Observation, finding: Finding) -> str:
    """Explain a storm of overflows to a user whose loss scale is managed elsewhere."""
    return (
        f"{finding.message} {_state_of('loss', observation.loss).capitalize()}. If the loss is "
        "finite the scale will find its place; if the storm goes on, lower the learning rate or "
        "its growth, and keep normalisation, softmax and loss in float32. If the loss is not "
        "finite, the weights are bad and a checkpoint from before is needed."
    )


def diagnose_without_effect(observation: Observation, finding: Finding) -> str:
    """Explain overflows that change nothing."""
    return (
        f"{finding.message} {_state_of('loss', observation.loss).capitalize()}. The training step "
        "notices the overflow but neither skips the update nor lowers the scale: use a dynamic "
        "loss scale and skip overflowed updates (in mindyolo: overflow_still_update: False), or "
        "train with mindtune's TrainStep."
    )


def diagnose_data_stall(finding: Finding) -> str:
    """Explain that the input pipeline, not the device, sets the pace."""
    return (
        f"{finding.message} The input pipeline is the bottleneck: a larger batch would wait all "
        "the longer. Raise the number of data workers (num_parallel_workers, up to the number of "
        "cores) or the prefetch size, move preprocessing out of Python, or cache what is read."
    )
