"""Why the loss does not fall, in the order in which an expert looks.

First whether anything is updated at all (parameters, skipped updates, a rate of 0), then whether
it is too early to say (warm-up), then what makes updates useless (weights out of range, gradients
that vanish in float16, clipping, a rate that is too high or too low), last the data; and whether
the loss is one that should fall.
"""

from __future__ import annotations

import math

from mindtune.policies.diagnosis.case import Case
from mindtune.policies.diagnosis.cause import Cause
from mindtune.policies.diagnosis.model import DECISIVE, STRONG, WEAK, Clues
from mindtune.policies.findings import FindingKind

__all__ = ["LEARNING", "spelled_vocabulary"]

_VOCABULARIES = (
    30522, 32000, 32128, 50257, 50265, 50304, 64000, 65024, 100352, 102400, 128000, 128256,
    130528, 151643, 151936, 152064, 250880, 256000,
)  # fmt: skip
"""Of BERT, Llama 1 and 2, T5, GPT-2, RoBERTa, GPT-2 padded, Yi, ChatGLM 3, GPT-4, DeepSeek,
Llama 3, ChatGLM, Qwen, BLOOM and Gemma: a loss of their logarithm means uniform guesses."""
_NEAR = 0.002
"""Share by which exp(loss) may miss a vocabulary's size: logs have four digits."""
_TINY_NORM = 1e-6
_LOW_RATE, _USUAL_RATE = 1e-6, 1e-4


def spelled_vocabulary(loss: float, vocab_size: int | None, near: float = _NEAR) -> str | None:
    """Return over which vocabulary uniform guesses would have this loss; None: over none.

    Args:
        loss: A loss in nats per token.
        vocab_size: Tokens that the model knows; None: one of those in use.
        near: Share by which exp(loss) may miss the size.
    """
    if not 1.0 < loss < 14.0:
        return None
    sizes = (vocab_size,) if vocab_size else _VOCABULARIES
    size = min(sizes, key=lambda each: abs(math.log(each) - loss))
    if abs(math.exp(loss) / size - 1.0) > near:
        return None
    whose = "of this model" if vocab_size else "that is in use"
    return f"ln({size}) = {math.log(size):.4f}, uniform guesses over a vocabulary {whose}"


def _not_computed(case: Case, clues: Clues) -> None:
    frozen = case.found(FindingKind.FROZEN_LOSS)
    if frozen is not None and frozen.evidence.get("loss") == 0.0:
        clues.speaks(frozen.message, DECISIVE)


def _nothing_trainable(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.NO_TRAINABLE_PARAMETERS)
    norm, change = case.course("grad_norm"), case.course("update_norm")
    if found is not None:
        clues.speaks(found.message, DECISIVE)
    if change is not None:
        if change.high == 0:
            clues.speaks(f"the weights changed by exactly 0 in {change.count} steps", DECISIVE)
        else:
            clues.denies(f"the weights change: by {change.median:.4g} per step", DECISIVE)
    if norm is not None and norm.high > 0:
        clues.denies(
            f"there is a gradient: its norm is {norm.median:.4g}, and was 0 in {norm.zeros} of "
            f"{norm.count} steps",
            STRONG,
        )
    elif norm is None and not case.history.measured("grad_norm") and change is None:
        clues.lacks("grad_norm: exactly 0 from the first step on would prove it")


def _updates_skipped(case: Case, clues: Clues) -> None:
    frozen = case.found(FindingKind.FROZEN_LOSS)
    if frozen is not None and frozen.number("skipped") > 0:
        clues.speaks(
            f"the loss stands still for {frozen.number('count'):.0f} steps, and "
            f"{frozen.number('skipped'):.0f} of these skipped their update or overflowed",
            DECISIVE,
        )
    history = case.history
    if history.measured("update_skipped"):
        share = history.skipped / max(1, history.steps)
        text = f"{history.skipped} of {history.steps} updates were skipped"
        if share >= 0.5:
            clues.speaks(text, DECISIVE)
        elif share >= 0.05:
            clues.speaks(text, STRONG if share >= 0.25 else WEAK)
        elif not clues.evidence_for:
            clues.denies(text, STRONG)
        return
    overflow = case.course("overflow")
    if overflow is not None and overflow.median >= 0.5:
        clues.speaks(f"overflows are told in {overflow.median:.0%} of the steps", STRONG)
    elif not clues.evidence_for:
        clues.lacks("update_skipped: would tell how many steps taught nothing")


def _rate_is_zero(case: Case, clues: Clues) -> None:
    rate = case.course("learning_rate")
    if rate is None:
        clues.lacks("learning_rate: 0, or a schedule that has ended, would explain it")
    elif rate.high == 0:
        clues.speaks(f"the learning rate was 0 in all {rate.count} steps", DECISIVE)
    elif rate.part(0.75, 1.0) == 0:
        clues.speaks(f"the learning rate has come down to 0 (highest: {rate.high:.4g})", STRONG)
    elif rate.zeros > 0.5 * rate.count:
        clues.speaks(f"the learning rate was 0 in {rate.zeros} of {rate.count} steps", STRONG)
    else:
        clues.denies(f"the learning rate is {rate.last:.4g}", STRONG)


def _still_warming_up(case: Case, clues: Clues) -> None:
    rate = case.course("learning_rate")
    if rate is None:
        clues.lacks("learning_rate: one that still rises would say that it is too early to judge")
    elif rate.last >= 0.99 * rate.high and rate.last > 1.5 * rate.first and rate.last > 0:
        if rate.part(0.9, 1.0) > 1.02 * rate.part(0.5, 0.6):
            clues.speaks(
                f"the learning rate still rises, from {rate.first:.4g} to {rate.last:.4g} in step "
                f"{case.history.last_step}",
                STRONG,
            )
    else:
        clues.denies(f"the rate was highest ({rate.high:.4g}) in step {rate.high_step}", STRONG)


def _weights_out_of_range(case: Case, clues: Clues) -> None:
    frozen = case.found(FindingKind.FROZEN_LOSS)
    earlier = case.earlier(FindingKind.DIVERGENCE, FindingKind.NON_FINITE_LOSS, within=512)
    loss = case.course("loss")
    level = frozen.number("loss") if frozen is not None else None
    if frozen is None and loss is not None and loss.scatter <= 0.02 * abs(loss.median):
        level = loss.part(0.75, 1.0)
    guess = None if level is None else spelled_vocabulary(level, case.context.vocab_size)
    if guess is not None:
        clues.speaks(f"the loss stands at {guess}", STRONG)
    if earlier is not None:
        clues.speaks(f"before it, from step {earlier.step} on: {earlier.message}", STRONG)
    if frozen is not None and not clues.evidence_for and level is not None:
        clues.speaks(f"the loss is the same number, {level:.6g}, whatever the batch")
    if frozen is None and clues.evidence_for and guess is None:
        clues.denies("the loss still changes from batch to batch")


def _underflow(case: Case, clues: Clues) -> None:
    floor = case.near(FindingKind.LOSS_SCALE_FLOOR)
    scale, norm = case.course("loss_scale"), case.course("grad_norm")
    if floor is not None:
        clues.speaks(floor.message, STRONG)
    elif scale is not None and scale.last <= 1.0:
        clues.speaks(f"the loss scale is {scale.last:g}: small gradients become 0 in float16")
    elif scale is not None and scale.last >= 1024:
        clues.denies(f"the loss scale is {scale.last:g}", STRONG)
    if norm is not None:
        if norm.zeros >= 0.2 * norm.count and norm.high > 0:
            clues.speaks(f"the gradient norm is exactly 0 in {norm.zeros} of {norm.count} steps")
        if 0 < norm.part(0.75, 1.0) < _TINY_NORM:
            clues.speaks(f"the gradient norm is {norm.part(0.75, 1.0):.3g}", STRONG)
        elif norm.part(0.75, 1.0) >= 1e-3:
            clues.denies(f"the gradient norm is {norm.part(0.75, 1.0):.4g}")
    if scale is None and norm is None:
        clues.lacks("loss_scale and grad_norm: a scale of 1 with a norm near 0 would prove it")


def _clipping(case: Case, clues: Clues) -> None:
    found = next((f for f in case.others if f.kind is FindingKind.CLIP_SATURATION), None)
    norm, clip = case.course("grad_norm"), case.course("clip_norm")
    if found is not None:
        clues.speaks(found.message, STRONG)
    elif norm is not None and clip is not None and clip.last > 0:
        times = norm.median / clip.last
        text = f"the median norm is {times:.2g} times the clip threshold {clip.last:g}"
        if times >= 4:
            clues.speaks(text)
        elif times <= 1:
            clues.denies(text, STRONG)


def _rate_too_high(case: Case, clues: Clues) -> None:
    kinds = (FindingKind.DIVERGENCE, FindingKind.LOSS_SPIKE, FindingKind.OVERFLOW_STORM)
    wild = [f for f in case.others if f.kind in kinds]
    norm, loss = case.course("grad_norm"), case.course("loss")
    if wild:
        clues.speaks(f"step {wild[0].step}: {wild[0].message}", STRONG)
    if norm is not None and norm.count >= 64:
        early, late = norm.part(0.1, 0.3), norm.part(0.8, 1.0)
        text = f"the gradient norm went from {early:.4g} to {late:.4g}"
        if late >= 2 * early > 0:
            clues.speaks(text, STRONG)
        elif late <= 1.2 * early:
            clues.denies(text)
    if loss is not None and loss.part(0.8, 1.0) > loss.part(0.0, 0.1) + loss.scatter:
        clues.speaks(
            f"the loss ends higher than it began, at {loss.part(0.8, 1.0):.4g} after "
            f"{loss.part(0.0, 0.1):.4g}"
        )


def _rate_too_low(case: Case, clues: Clues) -> None:
    rate, loss = case.course("learning_rate"), case.course("loss")
    if rate is None:
        clues.lacks("learning_rate: below 1e-6 it would be too low for most models")
    elif 0 < rate.high <= _LOW_RATE:
        clues.speaks(f"the learning rate is never above {rate.high:.3g}", STRONG)
    elif rate.high >= _USUAL_RATE:
        clues.denies(f"the learning rate reaches {rate.high:.4g}")
    if loss is not None and loss.count >= 64 and clues.evidence_for:
        begin, end = loss.part(0.0, 0.05), loss.part(0.8, 1.0)
        if end < 0.5 * begin:
            clues.denies(f"the loss has fallen far, from {begin:.4g} to {end:.4g}", STRONG)
        elif end < begin:
            clues.speaks(f"the loss does fall, by {begin - end:.3g} over the run")


def _data(case: Case, clues: Clues) -> None:
    kinds = (FindingKind.LOSS_SPIKE, FindingKind.NON_FINITE_LOSS, FindingKind.NON_FINITE_GRAD)
    odd = [f for f in case.others if f.kind in kinds and f.step == f.last_step]
    if len(odd) >= 3:
        steps = ", ".join(str(f.step) for f in odd[:3])
        clues.speaks(f"{len(odd)} single steps stand out (steps {steps}, ...)")
    norm, rate = case.course("grad_norm"), case.course("learning_rate")
    if norm is not None and rate is not None and norm.median > _TINY_NORM and rate.high > 0:
        clues.speaks(
            f"there is a gradient (norm {norm.median:.4g}) and a rate ({rate.high:.4g}), and the "
            "loss does not follow them"
        )
    clues.lacks("one fixed batch, trained on 100 times: a loss that falls there clears the model")


def _not_meant_to_fall(case: Case, clues: Clues) -> None:
    loss = case.course("loss")
    if loss is None or loss.count < 16 or case.incidents:
        return
    if loss.zeros >= 0.2 * loss.count:
        clues.speaks(
            f"the loss is exactly 0 in {loss.zeros} of {loss.count} steps, as in policy training",
            STRONG,
        )
    if loss.low < 0 < loss.high:
        clues.speaks(f"the loss takes both signs ({loss.low:.4g} to {loss.high:.4g})", STRONG)
    wild = loss.scatter / max(abs(loss.median), 1e-30)
    if wild >= 0.25:
        clues.speaks(
            f"the loss changes by {wild:.0%} of its level from step to step, as in adversarial or "
            "policy training",
            STRONG,
        )
    elif not clues.evidence_for:
        clues.denies(f"the loss changes by {wild:.1%} of its level from step to step", STRONG)


def _learnt(case: Case, clues: Clues) -> None:
    loss, rate = case.course("loss"), case.course("learning_rate")
    if loss is None:
        return
    begin, end = loss.part(0.0, 0.03), loss.part(0.8, 1.0)
    if begin - end > 0.1 * abs(begin):
        clues.speaks(f"the loss has come down from {begin:.4g} to {end:.4g} before", STRONG)
    else:
        clues.denies(f"the loss has never fallen far: {begin:.4g} at first, {end:.4g} now", STRONG)
    if rate is not None and 0 < rate.last <= 0.1 * rate.high:
        clues.speaks(f"the schedule nears its end ({rate.last:.3g} of {rate.high:.3g})")


LEARNING = (
    Cause(
        "loss_not_computed",
        "the loss is not computed any more: NaN that the log leaves out, or labels all masked out",
        (
            "log NaN as it is (Hugging Face: logging_nan_inf_filter=False), and the gradient norm",
            "count the labels that are not masked in a batch of these steps",
            "go back to a checkpoint from before the first 0",
        ),
        _not_computed,
    ),
    Cause(
        "no_trainable_parameters",
        "nothing is trained: the parameters are frozen, or cut off from the loss",
        (
            "count net.trainable_params() and check requires_grad of a few of them",
            (
                "check that the optimizer was given these very parameters, after the last "
                "change of the network"
            ),
            "look for stop_gradient, asnumpy() or a comparison between the weights and the loss",
        ),
        _nothing_trainable,
    ),
    Cause(
        "updates_skipped",
        "the updates are skipped, so the weights stay as they are",
        (
            (
                "find why: overflow (see the loss scale), a skip threshold below the usual "
                "norm, or NaN in the gradients"
            ),
            "go back to a checkpoint from before the row of skips",
        ),
        _updates_skipped,
    ),
    Cause(
        "learning_rate_zero",
        "the learning rate is 0",
        (
            "compare the schedule's total steps with those of the run",
            "after a resume check that the schedule goes on where it was, not beyond its end",
        ),
        _rate_is_zero,
    ),
    Cause(
        "warm_up_not_over",
        "it is too early to tell: the warm-up is not over",
        ("wait for the end of the warm-up", "shorten it if it takes over 5 % of the run"),
        _still_warming_up,
    ),
    Cause(
        "weights_out_of_range",
        "an earlier update has driven the weights out of range; the model guesses uniformly",
        (
            "go back to a checkpoint from before the loss stood still",
            "go on with a lower learning rate, or a longer warm-up",
        ),
        _weights_out_of_range,
    ),
    Cause(
        "gradient_underflow",
        "small gradients become 0 in float16",
        (
            "use bfloat16, or a dynamic loss scale that starts at 2^16 or more",
            "keep normalisation, softmax and loss in float32",
        ),
        _underflow,
    ),
    Cause(
        "clipping_sets_the_step",
        "clipping, not the learning rate, sets the size of the updates",
        ("raise clip_norm to about twice the usual norm, or find what makes the norm large",),
        _clipping,
    ),
    Cause(
        "learning_rate_too_high",
        "the learning rate is too high",
        ("divide it by 3 to 10 and compare the first 200 steps", "lengthen the warm-up"),
        _rate_too_high,
    ),
    Cause(
        "learning_rate_too_low",
        "the learning rate is too low",
        ("multiply it by 3 to 10 and compare the first 200 steps",),
        _rate_too_low,
    ),
    Cause(
        "dirty_data",
        "the data teach nothing: labels shifted, masked or shuffled against the inputs",
        (
            "decode one batch, with its labels and mask, and read it",
            "train on one fixed batch: its loss must fall to near 0",
            "count how many labels are masked out",
        ),
        _data,
    ),
    Cause(
        "not_meant_to_fall",
        "this loss is none that falls: two networks or a policy are trained against each other",
        ("judge the run by its rewards, or by the quality of what it makes",),
        _not_meant_to_fall,
    ),
    Cause(
        "learnt",
        "it has learnt what this rate and these data teach",
        ("compare the validation loss; end the run, or lower the rate",),
        _learnt,
    ),
)
"""Causes of a loss that does not fall, in the order in which to look."""
