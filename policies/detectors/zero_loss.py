"""A loss that turns to exactly 0 and stays there: nothing is computed any more.

Theory of operation. A loss does not fall from a number to exactly 0 in one step. Where it does and
stays, a trainer has filtered NaN out of its log (the sum over an interval that holds nothing but
NaN is 0), every label is masked out, or the network's output is cut off. The row of zeros must
follow `_KNOWN` losses none of which was 0, the newest of them all above `_LEVEL`, since a log of
four decimals prints a loss that has really gone as 0; means over an interval need fewer. A loss
that is 0 now and then belongs to another kind of training (advantages, triplets): it rests.
"""

from __future__ import annotations

from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import median, push

__all__ = ["ZeroLossState", "judge_zero_loss"]

_KNOWN, _KEPT = 16, 8
_INTERVAL, _KNOWN_MEANS, _ZERO_MEANS = 10, 4, 3
_LEVEL = 0.05
_RESTS = -1


@state_class(frozen=True, slots=True)
class ZeroLossState:
    """Losses before a row of zeros, and the row."""

    seen: int = 0
    """Losses other than 0 in a row from the first one on, up to `_KNOWN`; -1: the rule rests."""
    newest: tuple[float, ...] = ()
    """Newest of these."""
    zeros: int = 0
    """Losses of exactly 0 in a row since."""


def judge_zero_loss(
    observation: Observation,
    loss: float,
    interval: int,
    state: ZeroLossState,
    thresholds: DetectorThresholds,
) -> tuple[tuple[Finding, ...], ZeroLossState]:
    """Return the finding that the loss has turned to 0, and the next state.

    Args:
        observation: The step.
        loss: Its loss, finite.
        interval: Steps since the record before.
        state: State before the step.
        thresholds: When to report.
    """
    if state.seen == _RESTS:
        return (), state
    if loss != 0.0:
        if state.zeros:
            return (), ZeroLossState(_RESTS)
        seen = min(state.seen + 1, _KNOWN)
        return (), ZeroLossState(seen, push(state.newest, loss, _KEPT))
    means = interval >= _INTERVAL
    if (
        state.seen < (_KNOWN_MEANS if means else _KNOWN)
        or min(state.newest[-_KNOWN_MEANS:]) < _LEVEL
    ):
        return (), ZeroLossState(_RESTS)
    zeros = state.zeros + 1
    following = ZeroLossState(state.seen, state.newest, zeros)
    if zeros < (_ZERO_MEANS if means else thresholds.frozen):
        return (), following
    before = median(state.newest)
    finding = Finding(
        step=observation.step - (zeros - 1) * interval,
        last_step=observation.step,
        kind=FindingKind.FROZEN_LOSS,
        severity=Severity.CRITICAL,
        message=f"the loss has been exactly 0 in {zeros} records after {before:.4g}: NaN that is "
        "filtered out of the log, or labels that are all masked out.",
        evidence={"loss": 0.0, "count": zeros, "skipped": 0, "median": before},
    )
    return (finding,), following
