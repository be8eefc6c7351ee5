"""Why values are not finite, and why gradients overflow: where it is seen first tells most."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mindtune.policies.diagnosis.case import Case
from mindtune.policies.diagnosis.cause import Cause
from mindtune.policies.diagnosis.model import DECISIVE, STRONG, WEAK, Clues
from mindtune.policies.findings import FindingKind
from mindtune.policies.signals import Observation

__all__ = ["NON_FINITE", "OVERFLOWS"]

_LOSS_OF_SUMS = 1000.0
"""Losses beyond it are sums over tokens or pixels: means over them are of the order of 1 to 10."""
_OFTEN, _LOW_SCALE = 0.5, 64.0
"""Share of overflows from which a scale has no room at all, and a scale that is near its floor."""


def _bad_from_the_start(case: Case, clues: Clues) -> None:
    resumed = case.history.resumed_from is not None
    start = "after a resume" if resumed else "of this log"
    if case.since_start <= case.history.interval:
        clues.speaks(
            f"it is there in step {case.first}, among the first records {start}",
            DECISIVE if case.since_start == 0 else STRONG,
        )
    else:
        steps = case.since_start // case.history.interval
        clues.denies(f"{steps} records before it were finite", DECISIVE)


def _exploded(case: Case, clues: Clues) -> None:
    grew = case.earlier(FindingKind.DIVERGENCE, FindingKind.LOSS_SPIKE,
                        FindingKind.GRAD_NORM_SPIKE, within=256)  # fmt: skip
    if grew is not None:
        clues.speaks(
            f"from step {grew.step} on: {grew.message}",
            STRONG if grew.kind is FindingKind.DIVERGENCE else WEAK,
        )
    for name, word in (("loss", "loss"), ("grad_norm", "gradient norm")):
        values = [getattr(o, name) for o in case.before]
        finite = [v for v in values if v is not None and math.isfinite(v)]
        if len(finite) >= 8:
            usual, last = sorted(finite)[len(finite) // 2], max(finite[-4:])
            if last > 3 * usual > 0:
                clues.speaks(f"the {word} had risen to {last:.4g} from {usual:.4g}", STRONG)
            elif grew is None:
                clues.denies(f"the {word} was calm before it, at {finite[-1]:.4g}")


def _forward(case: Case, clues: Clues) -> None:
    loss = case.found(FindingKind.NON_FINITE_LOSS)
    norm = case.found(FindingKind.NON_FINITE_GRAD)
    if loss is None:
        values = [o.loss for o in case.onset if o.loss is not None]
        if values and all(math.isfinite(value) for value in values):
            clues.denies(f"the loss is finite ({values[0]:.4g}) in these steps", DECISIVE)
        return
    if norm is None and not case.history.measured("grad_norm"):
        clues.speaks(f"the loss is not finite from step {loss.step} on")
        clues.lacks("grad_norm: a norm that was NaN before the loss would acquit the forward pass")
        return
    if norm is not None and norm.step < loss.step:
        clues.denies(f"the gradient was not finite before it, in step {norm.step}", STRONG)
    else:
        clues.speaks(
            f"the loss is not finite in step {loss.step}, and no gradient was before", STRONG
        )


def _backward(case: Case, clues: Clues) -> None:
    loss = case.found(FindingKind.NON_FINITE_LOSS)
    norm = case.found(FindingKind.NON_FINITE_GRAD)
    if norm is None:
        return
    if loss is None or norm.step < loss.step:
        then = "the loss stays finite" if loss is None else f"the loss only in step {loss.step}"
        clues.speaks(f"the gradient norm is not finite from step {norm.step} on; {then}", DECISIVE)
    else:
        clues.denies(f"the loss is not finite either, in step {loss.step}", STRONG)


def _skips_hidden(case: Case, clues: Clues) -> None:
    """The run goes on as if nothing were: every one of these steps taught nothing."""
    steps = [o for o in case.onset if o.update_skipped is not None]
    if steps:
        skipped = sum(bool(o.update_skipped) for o in steps)
        text = f"{skipped} of the {len(steps)} steps from step {case.first} on skipped the update"
        if skipped == len(steps) and len(steps) > 2:
            clues.speaks(text, STRONG)
        else:
            clues.denies(text)


def _lone_batch(case: Case, clues: Clues) -> None:
    records = (case.last - case.first) // case.history.interval + 1
    if records <= 2 and len(case.onset) > 2:
        clues.speaks(f"it is over after {records} records, and the run goes on", STRONG)
        repeats = [f for f in case.others if f.kind is FindingKind.NON_FINITE_LOSS]
        if len(repeats) > 2:
            clues.speaks(f"it comes back, {len(repeats)} times in this segment, each time alone")
    elif records > 8:
        clues.denies(f"it lasts for {records} records: one batch does not", STRONG)


def _one_rank(case: Case, clues: Clues) -> None:
    told = case.context.first_non_finite
    if told is not None:
        clues.speaks(told, STRONG)
    elif case.context.num_ranks > 1:
        clues.denies(f"no one of the {case.context.num_ranks} ranks is alone with it")
    else:
        clues.lacks("the log of each rank: one that turns NaN before the others has bad data or "
                    "bad hardware (mindtune replay rank_*.log)")  # fmt: skip


def _scaled_overflow(case: Case, clues: Clues) -> None:
    overflow = case.near(FindingKind.OVERFLOW, FindingKind.OVERFLOW_STORM, reach=8)
    scale = case.course("loss_scale")
    if overflow is not None and overflow.step <= case.first:
        clues.speaks(f"step {overflow.step}: {overflow.message}")
    elif scale is None and not case.history.measured("overflow"):
        clues.lacks("loss_scale: NaN with float16 and no scale, or a very high one, points there")
    if case.near(FindingKind.OVERFLOW_WITHOUT_EFFECT) is not None:
        clues.speaks("overflowed updates are applied all the same", STRONG)


def _high_start(case: Case, clues: Clues) -> None:
    scale = case.course("loss_scale")
    records = case.since_start // case.history.interval
    if scale is None:
        clues.lacks("loss_scale: whether it falls to a place and stays there")
        return
    if records <= 40 and scale.first > scale.low and case.onset:
        clues.speaks(f"it begins {records} records after the start, at a scale of {scale.first:g}")
        if scale.last >= scale.low and case.last < case.history.last_step:
            clues.speaks(f"it ends in step {case.last}, at a scale of {scale.low:g}", STRONG)
        elif scale.last <= scale.low < scale.first / 1024:
            clues.denies(f"it finds no place: it ends at {scale.last:g}", STRONG)
    elif records > 100:
        clues.denies(f"{records} records had gone before", STRONG)


def _weights_bad(case: Case, clues: Clues) -> None:
    bad = case.near(FindingKind.NON_FINITE_LOSS, reach=8)
    if bad is not None:
        clues.speaks(f"the loss is not finite either, from step {bad.step} on", DECISIVE)
        return
    losses = [o.loss for o in case.onset if o.loss is not None]
    if losses:
        clues.denies(f"the loss is finite ({losses[-1]:.4g}), so the weights are", STRONG)
    else:
        clues.lacks("the loss: one that is not finite would mean that the weights are bad")


def _diverging(case: Case, clues: Clues) -> None:
    grew = case.near(FindingKind.DIVERGENCE, FindingKind.LOSS_SPIKE, reach=32)
    if grew is not None:
        strong = grew.kind is FindingKind.DIVERGENCE
        clues.speaks(f"step {grew.step}: {grew.message}", STRONG if strong else WEAK)
        return
    loss = case.course("loss")
    rate = [o.learning_rate for o in (*case.before, *case.onset) if o.learning_rate]
    if len(rate) >= 2 and rate[-1] > 1.5 * rate[0]:
        clues.speaks(f"the learning rate rises in these steps, {rate[0]:.3g} to {rate[-1]:.3g}")
    elif loss is not None and case.onset and loss.last <= loss.first:
        clues.denies(f"the loss goes on falling ({loss.first:.4g} to {loss.last:.4g})")


def _too_large(case: Case, clues: Clues) -> None:
    floor = case.found(FindingKind.LOSS_SCALE_FLOOR)
    if floor is not None:
        often = (_rate(case.onset) or 1.0) >= _OFTEN
        clues.speaks(floor.message, STRONG if often else WEAK)
    loss = case.usual("loss") or case.peak("loss")
    if loss is not None and loss > _LOSS_OF_SUMS:
        clues.speaks(f"the loss is {loss:.4g}: a sum, not a mean", STRONG)
    scale = case.course("loss_scale")
    if scale is not None and scale.last <= scale.low < scale.high / 1024:
        clues.speaks(f"the scale has fallen from {scale.high:g} to {scale.last:g}", STRONG)
    elif scale is not None and scale.last >= 1024 and floor is None:
        clues.denies(f"the scale is at {scale.last:g}, far above its floor")


def _not_obeyed(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.OVERFLOW_WITHOUT_EFFECT)
    if found is not None:
        clues.speaks(found.message, DECISIVE)
        return
    scale = case.course("loss_scale")
    if scale is not None and scale.low < scale.high:
        clues.denies(f"the scale moves ({scale.low:g} to {scale.high:g})", STRONG)


def _bounces(case: Case, clues: Clues) -> None:
    near = (*case.before, *case.onset)
    scales = [o.loss_scale for o in near if o.loss_scale is not None]
    share = _rate(near)
    if not scales or share is None:
        return
    low, high = min(scales), max(scales)
    if low < high <= _LOW_SCALE and share < _OFTEN:
        clues.speaks(f"the scale goes up and down between {low:g} and {high:g}", STRONG)
        clues.speaks(f"{1 - share:.0%} of these steps are clean, so it does find room below")


def _rate(steps: Sequence[Observation]) -> float | None:
    values = [o.overflow for o in steps if o.overflow is not None]
    return sum(values) / len(values) if values else None


def _ran_away(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.LOSS_SCALE_RUNAWAY)
    if found is not None:
        clues.speaks(found.message, DECISIVE)


NON_FINITE = (
    Cause(
        "bad_from_the_start",
        "the weights that were loaded hold non-finite values, or the first batch does",
        (
            "run isnan over the tensors of the checkpoint; load an older one",
            "run one batch in float32, with an eye on its labels and masks",
        ),
        _bad_from_the_start,
    ),
    Cause(
        "exploded_before",
        "the training had exploded before; this is its end",
        (
            "judge the first spike or climb, not the NaN: what came before it is the cause",
            "go back to a checkpoint from before it with a lower learning rate",
        ),
        _exploded,
    ),
    Cause(
        "backward_pass",
        "the backward pass makes it: sqrt, log, norm or division at 0, or float16 without a scale",
        (
            (
                "skip these updates (mindtune's TrainStep does), and find the layer in "
                "model_signals.jsonl (gradient_non_finite)"
            ),
            "add an epsilon inside of sqrt, norm and division; use bfloat16 or a loss scale",
        ),
        _backward,
    ),
    Cause(
        "forward_pass",
        "the forward pass makes it: activations beyond float16's 65504, a log of 0, a masked "
        "softmax over nothing, or non-finite inputs",
        (
            "check the inputs and labels of this step for NaN and empty masks",
            "keep normalisation, softmax and loss in float32, or train in bfloat16",
        ),
        _forward,
    ),
    Cause(
        "one_rank",
        "one rank makes it for all: its data, or its hardware",
        (
            "run the same step on that rank alone, then on another device",
            "look at its device's error counters (ECC), and leave the node out",
        ),
        _one_rank,
    ),
    Cause(
        "bad_batch",
        "a batch holds what the loss cannot take",
        (
            "print the samples of these steps; drop empty, overlong and non-finite ones",
            "let such updates be skipped, and count the skips",
        ),
        _lone_batch,
    ),
    Cause(
        "overflow_applied",
        "scaled float16 gradients overflow, and reach the weights",
        ("use a dynamic loss scale that skips overflowed updates, or mindtune's TrainStep",),
        _scaled_overflow,
    ),
    Cause(
        "skips_hide_it",
        "the guard against NaN skips every update, so that the run goes on and learns nothing",
        ("stop it: go back to a checkpoint from before the first of these steps",),
        _skips_hidden,
    ),
)
"""Causes of NaN and infinity, in the order in which to look."""

OVERFLOWS = (
    Cause(
        "no_effect",
        "the training step does not answer an overflow",
        (
            (
                "use a dynamic loss scale and skip overflowed updates (mindyolo: "
                "overflow_still_update: False), or mindtune's TrainStep"
            ),
        ),
        _not_obeyed,
    ),
    Cause(
        "weights_not_finite",
        "the forward pass overflows: the weights or the data are bad, and no scale can help",
        ("go back to a checkpoint from before; check the data of these steps",),
        _weights_bad,
    ),
    Cause(
        "initial_scale_too_high",
        "the loss scale starts too high and is searching for its place",
        ("start it where it settled",),
        _high_start,
    ),
    Cause(
        "diverging",
        "the training diverges, and its gradients grow beyond any scale",
        ("lower the learning rate, or go back to a checkpoint from before it",),
        _diverging,
    ),
    Cause(
        "gradients_too_large",
        "the gradients exceed float16 without any scaling",
        (
            (
                "look for a loss that is summed instead of averaged, or multiplied by the "
                "number of devices"
            ),
            "train in bfloat16; keep normalisation, softmax and loss in float32",
        ),
        _too_large,
    ),
    Cause(
        "bounces_at_floor",
        "the scale grows, overflows and falls again without a place of its own: float16 is too "
        "narrow for this model",
        ("train in bfloat16", "lower the learning rate; lengthen the scale window"),
        _bounces,
    ),
    Cause(
        "runaway",
        "the loss scale has no upper bound",
        ("bound it at 2^24",),
        _ran_away,
    ),
)
"""Causes of overflows, in the order in which to look."""
