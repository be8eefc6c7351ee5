"""A learning rate that jumps above every earlier one, and a loss that answers at once.

Theory of operation. Schedules warm up in small steps, fall, and restart at a rate that the run has
seen before. A rate of `rate_jump` times the highest of all earlier ones, in one step and after at
least `_KNOWN` rates, is a mistake (a typing error in a resumed run, a changed unit, a second
warm-up), but may be meant. If the loss answers within the next `_WATCHED` steps, it was not: the
cause is known, so nothing is waited for. A loss that then comes down again comes down to another,
worse place: on the reference workload at 30 times the rate it is a spike in one step only, and
ends up to 8 % higher.

How much of an answer it takes depends on the jump, since the more unusual it is, the less the loss
has to say. Where it just counts as one, the loss has to be a spike; every doubling beyond takes a
robust deviation off, down to half of a spike's score. Of five seeds of the reference workload at
30 times the rate (22 times the highest before), one answered by 3.6 deviations only.
"""

from __future__ import annotations

import math

from mindtune.policies.detectors.spike import Judgement
from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class

__all__ = ["RATE_JUMP", "RateJumpState", "judge_rate_jump"]

RATE_JUMP = "learning rate jump"
"""Pattern in the evidence of such a divergence."""
_KNOWN = 16
_WATCHED = 8
_LEAST = 0.5
"""Share of a spike's score below which a rise of the loss is none."""


@state_class(frozen=True, slots=True)
class RateJumpState:
    """The highest rate so far, and the jump that the loss may answer."""

    highest: float = 0.0
    seen: int = 0
    """Rates counted, up to those that are needed."""
    before: float = 0.0
    """Highest rate before the newest jump."""
    waits: int = 0
    """Steps in which the loss may still answer it."""


def judge_rate_jump(
    observation: Observation,
    loss: float,
    judgement: Judgement,
    state: RateJumpState,
    thresholds: DetectorThresholds,
) -> tuple[tuple[Finding, ...], RateJumpState]:
    """Return the finding that the learning rate jumped and the loss with it, and the next state.

    Args:
        observation: The step.
        loss: Its loss, finite.
        judgement: The verdict over the loss as a spike.
        state: State before the step.
        thresholds: When to report.
    """
    rate = observation.learning_rate
    if rate is None or not 0.0 < rate < math.inf:
        return (), state
    findings: tuple[Finding, ...] = ()
    before, waits = state.before, max(0, state.waits - 1)
    if state.waits and _answers(judgement, state, thresholds):
        findings = (_finding(observation, loss, judgement.median, state, thresholds),)
    if state.seen >= _KNOWN and rate >= thresholds.rate_jump * state.highest:
        before, waits = state.highest, _WATCHED
    seen = min(_KNOWN, state.seen + 1)
    if rate <= state.highest and waits == state.waits and seen == state.seen:
        return findings, state  # `before` moves with `waits` alone
    return findings, RateJumpState(max(rate, state.highest), seen, before, waits)


def _answers(judgement: Judgement, state: RateJumpState, thresholds: DetectorThresholds) -> bool:
    """Whether the loss has risen as much as tells against a jump of this size."""
    doublings = math.log2(state.highest / state.before / thresholds.rate_jump)
    wanted = max(_LEAST * judgement.threshold, judgement.threshold - doublings)
    return judgement.flagged or judgement.score >= wanted


def _finding(
    observation: Observation,
    loss: float,
    median: float,
    state: RateJumpState,
    thresholds: DetectorThresholds,
) -> Finding:
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=FindingKind.DIVERGENCE,
        severity=Severity.CRITICAL,
        message=f"the learning rate jumped to {state.highest:.4g}, which is "
        f"{state.highest / state.before:.3g} times the highest before, and the loss rose from "
        f"{median:.4g} to {loss:.4g} within {_WATCHED} steps.",
        evidence={
            "cold_start": 0,
            "pattern": RATE_JUMP,
            "loss": loss,
            "median": median,
            "lowest": median,
            "learning_rate": state.highest,
            "highest_before": state.before,
            "threshold": thresholds.rate_jump,
        },
    )
