"""A gradient that has died, or never lived.

Theory of operation. A norm **vanishes** when it stays below `vanishing` times its reference for
`vanishing_after` steps in a row while the loss does not fall: nothing is learnt any more, and not
because everything is learnt. The reference is the highest median of the norm, forgotten over a
thousand steps; it begins when the baseline is armed, so that the large norms of the first steps do
not count. A loss that still falls, or has come down to a hundredth of its own start, explains a
small norm. Steps whose loss is exactly zero tell nothing (a policy that learns from advantages
has many).

**No trainable parameters**: the norm is exactly 0 from the first step on, and the loss moves no
more than it scatters. With a loss that moves, zero only means that the norm is not reported.
"""

from __future__ import annotations

from itertools import pairwise

from mindtune.policies.detectors.spike import Judgement
from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import median, push

__all__ = ["GradientState", "judge_gradient"]

_FORGET = 0.999
_NEWEST = 8
_FALLS = 0.95
_LEARNT = 0.01
_HALF = 8
_MOVES = 1.5


@state_class(frozen=True, slots=True)
class GradientState:
    """Reference of the norm, and what the loss did since it vanished."""

    reference: float = 0.0
    """Highest median of the norm, slowly forgotten."""
    low: int = 0
    """Steps in a row below the share of it."""
    level: float | None = None
    """Median of the loss when the norm began to vanish."""
    losses: tuple[float, ...] = ()
    """Newest losses since then; of the first steps, while all norms were 0."""
    first_loss: float | None = None
    """First finite loss."""
    zeros: int = 0
    """Norms of exactly 0 since the first step; -1: one was not."""


def judge_gradient(
    observation: Observation,
    norm: float,
    judgement: Judgement,
    loss: float | None,
    level: float | None,
    state: GradientState,
    thresholds: DetectorThresholds,
) -> tuple[tuple[Finding, ...], GradientState]:
    """Return the findings about a norm that is too small, and the next state.

    Args:
        observation: The step.
        norm: Its gradient norm, finite.
        judgement: The verdict over it as a spike.
        loss: Its loss, if it is finite.
        level: Median of the loss's baseline.
        state: State before the step.
        thresholds: When to report.
    """
    reference = state.reference * _FORGET
    if judgement.armed and judgement.median > reference:
        reference = judgement.median
    first_loss = loss if state.first_loss is None else state.first_loss
    if state.zeros >= 0 and norm == 0.0 and loss != 0.0:
        return _judge_zero(observation, loss, first_loss, state, thresholds)
    zeros = state.zeros if norm == 0.0 else -1
    if norm > thresholds.vanishing * reference:
        return (), GradientState(reference, 0, None, (), first_loss, zeros)
    if loss == 0.0:
        return (), GradientState(
            reference, state.low, state.level, state.losses, first_loss, zeros
        )
    low = state.low + 1
    before = level if state.low == 0 else state.level
    losses = state.losses if loss is None else push(state.losses, loss, _NEWEST)
    following = GradientState(reference, low, before, losses, first_loss, zeros)
    if low < thresholds.vanishing_after or reference <= 0.0:
        return (), following
    return _vanished(observation, norm, following, thresholds), following


def _vanished(
    observation: Observation, norm: float, state: GradientState, thresholds: DetectorThresholds
) -> tuple[Finding, ...]:
    now = median(state.losses) if state.losses else None
    before, first = state.level, state.first_loss
    if now is not None and before is not None and first is not None:
        if now <= before - (1 - _FALLS) * abs(before) or abs(now) <= _LEARNT * abs(first):
            return ()
        loss = f"the loss stands at {now:.4g} after {before:.4g}"
    else:
        loss = "the loss is not measured"
    return (
        Finding(
            step=observation.step,
            last_step=observation.step,
            kind=FindingKind.GRAD_NORM_VANISHING,
            severity=Severity.INFO if now is None else Severity.WARNING,
            message=f"the gradient norm {norm:.4g} has been below {thresholds.vanishing:g} of its "
            f"level {state.reference:.4g} for {state.low} steps, and {loss}: nothing is learnt.",
            evidence={
                "value": norm,
                "median": state.reference,
                "threshold": thresholds.vanishing,
                "consecutive": state.low,
                "loss": now,
            },
        ),
    )


def _judge_zero(
    observation: Observation,
    loss: float | None,
    first_loss: float | None,
    state: GradientState,
    thresholds: DetectorThresholds,
) -> tuple[tuple[Finding, ...], GradientState]:
    zeros = state.zeros + 1
    losses = state.losses if loss is None else push(state.losses, loss, 2 * _HALF)
    following = GradientState(0.0, 0, None, losses, first_loss, zeros)
    if zeros < thresholds.untrained_after or len(losses) < 2 * _HALF:
        return (), following
    older, newer = median(losses[:_HALF]), median(losses[_HALF:])
    scatter = median(tuple(abs(later - earlier) for earlier, later in pairwise(losses)))
    if abs(newer - older) > _MOVES * scatter:
        return (), following
    finding = Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.NO_TRAINABLE_PARAMETERS,
        severity=Severity.CRITICAL,
        message=f"the gradient norm has been exactly 0 in all {zeros} steps and the loss does not "
        f"move from {newer:.4g}: nothing is trained. All parameters are frozen or cut off from "
        "the loss, or float16 gradients underflow without a loss scale.",
        evidence={"consecutive": zeros, "loss": newer, "loss_before": older},
    )
    return (finding,), following
