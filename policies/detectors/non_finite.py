"""NaN and infinity in loss and gradient norm: judged first, and never part of a statistic.

An overflow of a scaled loss also leaves a non-finite norm; that belongs to the loss scale and is
reported there. What counts here is a non-finite loss, and a non-finite norm that no loss scale
explains (none is in use, or the step reports no overflow). A number beyond `LARGEST` is none that
a device computes with, and would overflow in the statistics: it counts as infinite.
"""

from __future__ import annotations

from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class

__all__ = ["LARGEST", "NonFiniteState", "judge_non_finite", "overflowed_by_scale"]

LARGEST = 1e150
"""Magnitude from which a number is not taken for one; float32 ends at 3.4e38."""

# One bad batch whose update was skipped harms nothing; two in a row are no longer one batch.
_CRITICAL_AFTER = 2


@state_class(frozen=True, slots=True)
class NonFiniteState:
    """Non-finite values so far."""

    losses: int = 0
    """Non-finite losses in a row."""
    norms: int = 0
    """Unexplained non-finite norms in a row."""
    total_losses: int = 0
    """Non-finite losses in all."""


def overflowed_by_scale(observation: Observation) -> bool:
    """Tell whether the loss scale explains that a gradient norm is not finite."""
    return bool(observation.overflow) and observation.loss_scale is not None


def judge_non_finite(
    observation: Observation, state: NonFiniteState
) -> tuple[tuple[Finding, ...], NonFiniteState]:
    """Return the findings about non-finite values, and the next state."""
    loss, norm = observation.loss, observation.grad_norm
    bad_loss = loss is not None and not -LARGEST < loss < LARGEST
    bad_norm = norm is not None and not -LARGEST < norm < LARGEST
    if not bad_loss and not bad_norm:
        if state.losses == 0 and state.norms == 0:
            return (), state
        return (), NonFiniteState(
            0 if loss is not None else state.losses,
            0 if norm is not None else state.norms,
            state.total_losses,
        )
    findings: list[Finding] = []
    losses, norms, total = state.losses, state.norms, state.total_losses
    if bad_loss:
        losses, total = losses + 1, total + 1
        findings.append(_found(observation, FindingKind.NON_FINITE_LOSS, "loss", loss, losses))
    elif loss is not None:
        losses = 0
    if bad_norm and not overflowed_by_scale(observation):
        norms += 1
        findings.append(
            _found(observation, FindingKind.NON_FINITE_GRAD, "gradient norm", norm, norms)
        )
    elif norm is not None and not bad_norm:
        norms = 0
    return tuple(findings), NonFiniteState(losses, norms, total)


def _found(
    observation: Observation, kind: FindingKind, name: str, value: float | None, count: int
) -> Finding:
    skipped = observation.update_skipped
    harmless = bool(skipped) and count < _CRITICAL_AFTER
    unknown = skipped is None and count < _CRITICAL_AFTER
    if skipped is None:
        effect = "whether its update was skipped is unknown"
    else:
        effect = "its update was skipped" if skipped else "its update was applied"
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=kind,
        severity=Severity.WARNING if harmless or unknown else Severity.CRITICAL,
        message=f"the {name} was {value}, {count} steps in a row; {effect}.",
        evidence={
            "value": value,
            "consecutive": count,
            "skipped": skipped,
            "loss_scale": observation.loss_scale,
        },
    )
