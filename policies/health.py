"""Tells whether the weights after a step are known to be good, so that they may be kept.

Theory of operation. A state is worth returning to if nothing speaks against it: no finding of
warning or worse about loss, gradients or overflow in the last `QUIET_STEPS` steps, and a finite
loss if one is measured. In the first `COLD_STEPS` steps no state is called healthy: a learning
rate that is far too high ruins the weights while the loss still falls (the reference workload at
30 times its rate: best loss in step 4, explosion seen in steps 8 to 13). The only good state of
that time is the one before the first step, which needs no judgement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class

__all__ = ["COLD_STEPS", "QUIET_STEPS", "HealthState", "judge_health"]

QUIET_STEPS = 8
"""Steps without trouble that make a state healthy: as many as a divergence takes to be seen (six
medians of 3)."""
COLD_STEPS = 16
"""First steps of a run, in which no state is called healthy."""

_TROUBLE = frozenset(
    {
        FindingKind.NON_FINITE_LOSS,
        FindingKind.NON_FINITE_GRAD,
        FindingKind.LOSS_SPIKE,
        FindingKind.GRAD_NORM_SPIKE,
        FindingKind.GRAD_NORM_VANISHING,
        FindingKind.DIVERGENCE,
        FindingKind.FROZEN_LOSS,
        FindingKind.OVERFLOW_STORM,
        FindingKind.OVERFLOW_WITHOUT_EFFECT,
        FindingKind.LOSS_SCALE_FLOOR,
    }
)


@state_class(frozen=True, slots=True)
class HealthState:
    """How long the run has been well."""

    seen: int = 0
    """Steps so far, counted up to the end of the cold start."""
    quiet: int = 0
    """Steps in a row without trouble, counted up to `QUIET_STEPS`."""


def judge_health(
    observation: Observation, findings: Sequence[Finding], state: HealthState
) -> tuple[bool, HealthState]:
    """Return whether the weights after this step are known to be good, and the next state."""
    loss = observation.loss
    trouble = (loss is not None and not math.isfinite(loss)) or any(
        finding.kind in _TROUBLE and finding.severity is not Severity.INFO for finding in findings
    )
    seen = min(state.seen + 1, COLD_STEPS + 1)
    quiet = 0 if trouble else min(state.quiet + 1, QUIET_STEPS)
    return seen > COLD_STEPS and quiet >= QUIET_STEPS, HealthState(seen, quiet)
