"""From findings to causes: the texts of stops and advice.

Every text says what was seen, against which threshold, what that rules in or out, and what to do
next. A stop without a cause is the most repeated complaint about loss scalers and guards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mindtune.policies.decisions import Decision, RequestStop
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation

__all__ = [
    "diagnose_clip_saturation",
    "diagnose_data_stall",
    "diagnose_floor_of_learning_rate",
    "diagnose_floor_of_loss_scale",
    "diagnose_frequent_skips",
    "diagnose_lost_run",
    "diagnose_memory",
    "diagnose_never_finite",
    "diagnose_skipping",
    "diagnose_storm",
    "diagnose_without_effect",
    "stop_dead_run",
]


# One record may be one bad batch, whatever the interval of a log.
_REPEATED = 2


def _state_of(name: str, value: float | None) -> str:
    if value is None:
        return f"the {name} is not measured"
    if math.isfinite(value):
        return f"the {name} is finite ({value:.4g})"
    return f"the {name} is {value}"


def stop_dead_run(
    observation: Observation,
    found: Mapping[FindingKind, Finding],
    stop_after: int,
    lasted: int = 0,
) -> Decision | None:
    """Return the end of a run that no knob can bring back, or None if it lives.

    Args:
        observation: The step.
        found: Its findings.
        stop_after: Non-finite values, or frozen losses with skipped updates, in a row.
        lasted: Steps since the first of the present row of non-finite values: more than values
            where a log leaves steps out.
    """
    for kind in (FindingKind.NON_FINITE_LOSS, FindingKind.NON_FINITE_GRAD):
        finding = found.get(kind)
        if finding is None:
            continue
        count = finding.number("consecutive")
        if count >= stop_after or (count >= _REPEATED and lasted >= stop_after):
            frozen = found.get(FindingKind.FROZEN_LOSS)
            text = _diagnose_non_finite(observation, finding, max(stop_after, lasted), frozen)
            name = "non-finite loss" if kind is FindingKind.NON_FINITE_LOSS else "non-finite norm"
            return Decision(
                actions=(RequestStop(id=name.replace(" ", "-"), diagnosis=text),),
                reason=f"{name} for {max(stop_after, lasted)} steps in a row",
                evidence={**finding.evidence, "threshold": stop_after},
            )
    finding = found.get(FindingKind.FROZEN_LOSS)
    if finding is None or finding.number("skipped") < stop_after:
        return None
    text = _diagnose_frozen(observation, finding)
    return Decision(
        actions=(RequestStop(id="frozen-loss", diagnosis=text),),
        reason=finding.message,
        evidence=finding.evidence,
    )


def _diagnose_non_finite(
    observation: Observation, finding: Finding, limit: int, frozen: Finding | None
) -> str:
    is_loss = finding.kind is FindingKind.NON_FINITE_LOSS
    name = "loss" if is_loss else "gradient norm"
    head = f"non-finite {name} for {limit} steps in a row (step {observation.step})"
    since = limit
    if frozen is not None and frozen.number("skipped") > 0:
        since = round(frozen.number("count"))
        cause = (
            f"the loss is finite, but it has been {observation.loss!r} for {since} steps whatever "
            "the data were: an earlier update has driven the weights out of range (a loss of "
            "ln(vocabulary size) means uniform guesses), with a learning rate that is far too high"
        )
    elif not is_loss and observation.loss is not None and math.isfinite(observation.loss):
        cause = (
            f"the loss is finite ({observation.loss:.4g}), so the forward pass and the weights "
            "are still good and the backward pass is not: look for sqrt, log, norm or division at "
            "zero in the loss, and for float16 gradients without loss scaling"
        )
    elif observation.update_skipped:
        cause = (
            f"every update was skipped, so {limit} batches met the same weights: these are bad, "
            "not one batch, and not the loss scale, which does not act on the loss. The updates "
            "before have driven them out of range (float16 ends at 65504), or the checkpoint that "
            "was loaded was bad"
        )
    else:
        cause = (
            "updates were applied, so the weights hold non-finite values by now: a lower learning "
            "rate or loss scale cannot help any more"
        )
    return (
        f"{head}: {cause}. Go back to a checkpoint from before step "
        f"{max(1, observation.step - since)}, pass over the data since then, and lower the "
        "learning rate if it happens again."
    )


def _diagnose_frozen(observation: Observation, finding: Finding) -> str:
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


def diagnose_floor_of_loss_scale(observation: Observation, hits: str) -> str:
    """Explain why a run whose loss scale cannot fall any further was ended.

    Args:
        observation: The step.
        hits: How many overflows there were and where, such as `10 overflows in a row at`.
    """
    loss = observation.loss
    scale = "unknown" if observation.loss_scale is None else f"{observation.loss_scale:g}"
    head = (
        f"{hits} the floor of the loss scale (now {scale}, step "
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


def diagnose_memory(finding: Finding, micro_batch_size: float) -> str:
    """Explain what saves memory; `micro_batch_size` 0 stands for one that is not known."""
    text = (
        f"{finding.message} In the order of what it costs: offload the optimizer's state or shard "
        "it over the data-parallel ranks (optimizer_sharding), recompute activations (recompute: "
        "selective, interval:K or full), then halve the micro-batch and accumulate twice as many."
    )
    if finding.severity is Severity.CRITICAL and micro_batch_size == 1:
        text += " The micro-batch is 1 already, so only the former are left."
    return text


def diagnose_leak(finding: Finding, micro_batch_size: float) -> str:
    """Explain why a run is ended whose memory grows until it is full.

    Args:
        finding: The pressure, with `bytes_per_step` and `steps_left`.
        micro_batch_size: Samples of a micro-batch; 0: not known.
    """
    tried = f" at a micro-batch of {micro_batch_size:g}" if micro_batch_size else ""
    return (
        f"{finding.message} It has grown steadily{tried}, and what a step needs does not grow: "
        "something is kept from step to step. Look for losses, outputs or gradients that a list "
        "or a log holds (keep loss.asnumpy(), not the Tensor), for a cache without a bound, for "
        "shapes that change and are compiled each anew, and for data workers that grow; then go "
        "on from the last checkpoint. The run was ended while it could still leave its records."
    )


def diagnose_clip_saturation(finding: Finding) -> str:
    """Explain that clipping has become the learning rate."""
    median, clip = finding.number("median"), finding.number("clip_norm")
    return (
        f"{finding.message} With Adam this hides how large the gradients are, with SGD it divides "
        f"the rate by {median / clip if clip > 0 else math.inf:.1f}. Raise clip_norm to about "
        f"{2 * median:.3g}, twice the usual norm, and lower the learning rate if the loss needs "
        "it; or find what makes the gradients large (a summed loss, a missing normalisation)."
    )


def diagnose_lost_run(observation: Observation, reason: str, rewinds: int) -> str:
    """Explain why a run is ended that cannot be brought back.

    Args:
        observation: The step.
        reason: Why its state is lost, without a full stop.
        rewinds: Returns to earlier states that did not help.
    """
    if rewinds == 0:
        tried = (
            "no earlier state of this run is at hand to return to. Go back to a checkpoint from "
            "before, with a lower learning rate; with mindtune's TrainStep a run keeps states of "
            "its own, unless limits.budget of the policy rewind is 0"
        )
    else:
        tried = (
            f"{rewinds} returns to an earlier state within 1000 steps, each with a lower learning "
            "rate and other data, ended the same way, so neither the data nor the last weights "
            "are the cause: look at the loss function (log, sqrt or division at zero), at the "
            "precision (keep normalisation, softmax and loss in float32), at the weights that "
            "were loaded and at the learning rate of the schedule"
        )
    return (
        f"step {observation.step}: {reason}. {_state_of('loss', observation.loss).capitalize()}, "
        f"{_state_of('gradient norm', observation.grad_norm)}. {tried}."
    )


def diagnose_skipping(
    observation: Observation, skipped: str, threshold: float, usual: float | None
) -> str:
    """Explain that a threshold of the user's skips what it should not.

    Args:
        observation: The step.
        skipped: How many updates were skipped, such as `20 updates in a row`.
        threshold: The user's skip threshold.
        usual: Median gradient norm; None: not known.
    """
    norm = observation.grad_norm if usual is None else usual
    remedy = "raise skip_threshold well above it"
    if norm is not None and math.isfinite(norm):
        remedy = f"raise skip_threshold to about {8 * norm:.3g}, eight times the usual norm"
    return (
        f"{skipped} were skipped (step {observation.step}), because their gradient norms (now "
        f"{observation.grad_norm}, usual {'unknown' if usual is None else f'{usual:.4g}'}) are "
        f"above the skip threshold {threshold:g} that this run was given. A skipped update "
        f"teaches nothing: {remedy}, or leave it out and let the policy skip_update find it."
    )


def diagnose_frequent_skips(
    observation: Observation, count: int, ratio: float, passes: float | None
) -> str:
    """Explain that the guard skips a part of the data instead of single bad batches.

    Args:
        observation: The step.
        count: Updates that were skipped in the last 1000 steps.
        ratio: Their typical gradient norm over the usual one.
        passes: Ratio up to which they act from now on; None: they stay skipped.
    """
    head = (
        f"about {count} of the last 1000 updates were skipped (step {observation.step}), "
        f"typically at {ratio:.3g} times the usual gradient norm: no single bad batches but a "
        "part of the data"
    )
    if passes is None:
        return f"{head}. Find out what these batches have in common; mend them or leave them out."
    return (
        f"{head}, which would never be learnt. Up to {passes:.3g} times the usual norm they act "
        "from now on. Find out what they have in common; set a clip norm if they disturb the run."
    )


def diagnose_never_finite(observation: Observation, count: int) -> str:
    """Explain that a run was dead before its first step."""
    skipped = "Every update was skipped" if observation.update_skipped else "Updates were applied"
    return (
        f"the loss was {observation.loss} in all of the first {count} steps. {skipped}, but no "
        "learning rate, loss scale or batch can be the cause of the first one: the weights that "
        "were loaded hold non-finite values, or the loss function divides by zero or takes the "
        "logarithm of nothing. Check the checkpoint (isnan over its tensors), run one batch in "
        "float32, and look at the labels and masks of the first batch."
    )
