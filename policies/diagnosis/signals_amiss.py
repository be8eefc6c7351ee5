"""What is odd about the gradient, and about the signals themselves."""

from __future__ import annotations

from mindtune.policies.diagnosis.case import Case
from mindtune.policies.diagnosis.cause import Cause
from mindtune.policies.diagnosis.model import DECISIVE, STRONG, Clues
from mindtune.policies.findings import FindingKind

__all__ = ["ATTENTION_MISSING", "HIDDEN_STEPS", "ODD_GRADIENT", "UNRULY_KNOB", "WRONG_FIGURE"]

_GIB = 2.0**30


def _cut_off(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.GRAD_NORM_VANISHING)
    if found is None:
        return
    clues.speaks(found.message, STRONG)
    rate = case.usual("learning_rate")
    if rate:
        clues.denies(f"the learning rate is {rate:.4g}, so the weights did move before")


def _saturated(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.GRAD_NORM_VANISHING)
    if found is None:
        return
    exploded = case.earlier(FindingKind.DIVERGENCE, FindingKind.GRAD_NORM_SPIKE,
                            FindingKind.LOSS_SPIKE, within=256)  # fmt: skip
    if exploded is not None:
        clues.speaks(f"before it, in step {exploded.step}: {exploded.message}", STRONG)
    else:
        clues.denies("nothing exploded before it")


def _in_float16(case: Case, clues: Clues) -> None:
    if case.found(FindingKind.GRAD_NORM_VANISHING) is None:
        return
    scale = case.course("loss_scale")
    if scale is None:
        clues.lacks("loss_scale: float16 without one loses gradients below 6e-8")
    elif scale.last <= 1:
        clues.speaks(f"the loss scale is {scale.last:g}", STRONG)
    else:
        clues.denies(f"the loss scale is {scale.last:g}", STRONG)


def _clip_too_low(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.CLIP_SATURATION)
    if found is not None:
        clues.speaks(found.message, STRONG)


def _norm_too_large(case: Case, clues: Clues) -> None:
    if case.found(FindingKind.CLIP_SATURATION) is None:
        return
    loss, norm = case.course("loss"), case.course("grad_norm")
    if loss is not None and loss.median > 1000:
        clues.speaks(f"the loss is {loss.median:.4g}: a sum, not a mean", STRONG)
    if norm is not None and norm.count >= 64:
        early, late = norm.part(0.1, 0.3), norm.part(0.8, 1.0)
        text = f"the norm went from {early:.4g} to {late:.4g}"
        if late > 1.5 * early:
            clues.speaks(text, STRONG)
        else:
            clues.denies(text)


ODD_GRADIENT = (
    Cause(
        "cut_off",
        "layers are frozen or cut off from the loss, or the loss is masked out",
        (
            "look at the gradient norm of each layer (model_signals.jsonl)",
            "count the labels that are not masked",
        ),
        _cut_off,
    ),
    Cause(
        "saturated",
        "an explosion has left activations where they have no slope",
        ("go back to a checkpoint from before it, with a lower learning rate",),
        _saturated,
    ),
    Cause(
        "gradient_underflow",
        "gradients below float16's range become 0",
        ("use bfloat16, or a dynamic loss scale of 2^16",),
        _in_float16,
    ),
    Cause(
        "clip_too_low",
        "clip_norm is far below the usual norm, so that clipping sets the size of each update",
        ("raise clip_norm to about twice the usual norm, and lower the rate if need be",),
        _clip_too_low,
    ),
    Cause(
        "norm_too_large",
        "the gradients are larger than they should be",
        (
            (
                "look for a summed loss, one multiplied by the number of devices, a missing "
                "normalisation"
            ),
        ),
        _norm_too_large,
    ),
)
"""Causes of an odd gradient norm."""


def _sinking(case: Case, clues: Clues) -> None:
    gap, gaps = case.history.interval, case.history.gaps
    share = gaps[gap] / max(1, sum(gaps.values()))
    text = f"{share:.0%} of the records come {gap} steps after the one before"
    if gap > 1 and share >= 0.9:
        clues.speaks(text, DECISIVE)
    else:
        clues.denies(text, STRONG)


def _rows_lost(case: Case, clues: Clues) -> None:
    missing = [gap for gap in case.history.gaps if gap > 1]
    if case.history.interval == 1 and missing:
        clues.speaks(f"single gaps, of up to {max(missing) - 1} steps, between whole rows", STRONG)


HIDDEN_STEPS = (
    Cause(
        "sink_mode",
        "data sinking hides steps from the callback",
        ("train with dataset_sink_mode=False, or sink_size=1",),
        _sinking,
    ),
    Cause(
        "rows_lost",
        "rows of the record are lost, as after a kill",
        ("nothing, if the run was killed and went on there",),
        _rows_lost,
    ),
)
"""Causes of steps that a record of every step does not hold."""


def _pool(case: Case, clues: Clues) -> None:
    used = case.course("device_memory_used_bytes")
    held = case.course("memory_allocated_bytes")
    if used is not None and used.count >= 32 and used.low == used.high:
        clues.speaks(
            f"the memory in use was exactly {used.high / _GIB:.3g} GiB in all {used.count} steps: "
            "a pool that was reserved at the start",
            STRONG,
        )
    if used is not None and held is not None and held.high < 0.5 * used.high:
        clues.speaks(
            f"the allocator holds at most {held.high / _GIB:.3g} of {used.high / _GIB:.3g} GiB"
        )


def _impossible(case: Case, clues: Clues) -> None:
    for finding in case.incidents:
        if finding.kind is FindingKind.MFU_INVALID and "stuck" not in finding.evidence:
            clues.speaks(finding.message, DECISIVE)


def _stuck(case: Case, clues: Clues) -> None:
    for finding in case.incidents:
        if "stuck" in finding.evidence:
            clues.speaks(finding.message, DECISIVE)


WRONG_FIGURE = (
    Cause(
        "wrong_input",
        "a figure that it is made of is wrong: a peak, a size, a clock",
        ("check peak_flops, the model block and num_devices; compare with npu-smi or nvidia-smi",),
        _impossible,
    ),
    Cause(
        "counter_stands_still",
        "the counter of the driver stands still",
        ("restart the driver's monitor, or read another counter (mindtune doctor)",),
        _stuck,
    ),
    Cause(
        "reserved_pool",
        "the memory in use is what the framework has reserved, not what it needs",
        ("read memory_allocated_bytes (hal.max_memory_allocated()) instead",),
        _pool,
    ),
)
"""Causes of figures that cannot be true."""


def _not_returned(case: Case, clues: Clues) -> None:
    if case.context.has_attention is False:
        clues.speaks("the sampled model signals hold no attention weights", STRONG)


ATTENTION_MISSING = (
    Cause(
        "attention_not_returned",
        "the model does not return its attention weights: fused kernels never hold them",
        (
            (
                "give the callback a function that returns them, with flash attention off "
                "in sampled steps"
            ),
        ),
        _not_returned,
    ),
)
"""Causes of attention entropies that are not there."""


def _foreign(case: Case, clues: Clues) -> None:
    for finding in case.incidents:
        clues.speaks(finding.message, STRONG)


UNRULY_KNOB = (
    Cause(
        "not_read",
        "the training program does not read this knob",
        ("train with mindtune's TrainStep, or set the policy to observe",),
        _foreign,
    ),
)
"""Causes of a knob that does not obey."""
