"""What overflows and the loss scale say together.

Theory of operation. An isolated overflow is normal business of a dynamic loss scale. So is the
**start-up search**: from a scale that is too high (2^24, 2^32) every step overflows while the loss
is finite, until the scale fits; no storm is reported before the first `_SETTLED` clean steps in a
row, unless the search takes more than `search_overflows` or reaches the floor. After that a
**storm** is `storm` overflows in a row, or `storm_rate` within the window; or a scale that has
collapsed: it fell `_COLLAPSE`-fold below its highest, under `_LOW_SCALE`, and still overflows.

An overflow **without effect** is the opposite fault: the scale stays where it is (or there is
none) and the update is applied all the same, so that non-finite gradients reach the weights. A
rate below one half, as some trainers log it, says nothing of that kind: it stands for many steps.
A scale at the **floor** that still overflows cannot help any more. Nor can one that **bounces**:
it overflows as soon as it has grown a little above the floor, `_BOUNCES` times, and neither gets
away from there in between nor has `_CALM` clean steps in a row.
"""

from __future__ import annotations

import math
from dataclasses import field, replace

from mindtune.policies.detectors.thresholds import DetectorThresholds
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation
from mindtune.policies.state import ADDED
from mindtune.policies.state_class import state_class

__all__ = ["OverflowState", "judge_overflow"]

_SETTLED = 16
_MOSTLY = 0.5
_COLLAPSE = 2.0**12
_LOW_SCALE = 2.0**12
_STILL_FALLS = 8.0
_UNMOVED_AFTER = 3
_CRITICAL_AT_FLOOR = 3
# Times the soft floor: overflows up to the first, clean steps beyond the second end the bouncing.
_NEAR_FLOOR, _AWAY = 4.0, 16.0
_BOUNCES, _CALM = 10, 128


@state_class(frozen=True, slots=True)
class OverflowState:
    """Overflows so far, in the terms of the rules above."""

    consecutive: int = 0
    """Overflows in a row."""
    clean: int = 0
    """Steps without overflow in a row."""
    settled: bool = False
    """Whether the start-up search is over."""
    total: int = 0
    """Overflows of the start-up search."""
    bits: int = 0
    """One bit per step, the newest lowest."""
    scale: float | None = None
    """Scale of the step before."""
    highest: float = 0.0
    """Highest scale seen."""
    unmoved: int = 0
    """Overflows in a row at an unchanged scale whose update was not skipped."""
    at_floor: int = 0
    """Overflows in a row at or below the soft floor."""
    near_floor: int = field(default=0, metadata={ADDED: True})
    """Overflows near the soft floor since the scale was last away from it, up to `_BOUNCES`."""


def judge_overflow(
    observation: Observation, state: OverflowState, thresholds: DetectorThresholds
) -> tuple[tuple[Finding, ...], OverflowState]:
    """Return the findings about overflow and loss scale, and the next state."""
    rate = observation.overflow
    scale = observation.loss_scale
    if scale is not None and not 0 < scale < math.inf:
        scale = None
    if rate is None or math.isnan(rate):
        if scale is None or scale == state.scale:
            return (), state
        return (), replace(state, scale=scale, highest=max(state.highest, scale))
    if rate <= 0:
        return (), _after_clean(scale, state, thresholds)
    return _judge_hit(observation, scale, state, thresholds)


def _after_clean(
    scale: float | None, state: OverflowState, thresholds: DetectorThresholds
) -> OverflowState:
    clean = state.clean + 1
    settles = not state.settled and clean >= _SETTLED
    highest = state.highest
    if settles:
        highest = scale or 0.0
    elif scale is not None and scale > highest:
        highest = scale
    away = clean >= _CALM or (scale or 0.0) > _AWAY * thresholds.soft_floor
    return OverflowState(
        0,
        clean,
        state.settled or settles,
        state.total,
        (state.bits << 1) & ((1 << thresholds.rate_window) - 1),
        state.scale if scale is None else scale,
        highest,
        near_floor=0 if away else state.near_floor,
    )


def _judge_hit(
    observation: Observation,
    scale: float | None,
    state: OverflowState,
    thresholds: DetectorThresholds,
) -> tuple[tuple[Finding, ...], OverflowState]:
    mask = (1 << thresholds.rate_window) - 1
    rate = observation.overflow or 0.0
    loss = observation.loss
    loss_finite = loss is None or math.isfinite(loss)
    often = int(rate * thresholds.rate_window >= thresholds.storm_rate)
    unmoved = 0
    skipped = observation.update_skipped
    applied = not skipped if scale is not None else skipped == 0
    if applied and rate >= _MOSTLY:
        unmoved = state.unmoved + 1 if state.scale in (None, scale) or scale is None else 1
    at_floor = state.at_floor + 1 if scale is not None and scale <= thresholds.soft_floor else 0
    near_floor = state.near_floor
    floor = thresholds.soft_floor
    if scale is not None and floor < scale <= _NEAR_FLOOR * floor:
        near_floor = min(near_floor + 1, _BOUNCES)
    following = OverflowState(
        # A low rate stands for many steps, most of them clean.
        state.consecutive + 1 if rate >= _MOSTLY else 1,
        0,
        state.settled or rate < _MOSTLY,
        state.total + int(not state.settled),
        ((state.bits << 1) | often) & mask,
        scale if scale is not None else state.scale,
        max(state.highest, scale or 0.0),
        unmoved,
        at_floor,
        near_floor,
    )
    findings = [
        _finding(
            observation,
            FindingKind.OVERFLOW,
            Severity.INFO,
            "a gradient overflowed."
            if scale is None
            else f"a gradient overflowed at a loss scale of {_spelled(scale)}.",
            {"consecutive": following.consecutive, "loss_scale": scale},
        )
    ]
    fell = scale is not None and _has_collapsed(scale, rate, state)
    if fell or _is_storm(following, thresholds, loss_finite=loss_finite):
        findings.append(_storm(observation, scale, following, loss_finite=loss_finite))
    if unmoved >= _UNMOVED_AFTER:
        findings.append(
            _finding(
                observation,
                FindingKind.OVERFLOW_WITHOUT_EFFECT,
                Severity.CRITICAL,
                f"{unmoved} overflows in a row neither lowered the loss scale ({_spelled(scale)}) "
                "nor were seen to skip the update: non-finite gradients may reach the weights.",
                {"consecutive": unmoved, "loss_scale": scale, "loss": loss},
            )
        )
    # One overflow after long calm is none of a scale that is too high: bfloat16 lives at 1.
    if at_floor and (state.clean < _CALM or at_floor >= _CRITICAL_AT_FLOOR):
        findings.append(
            _finding(
                observation,
                FindingKind.LOSS_SCALE_FLOOR,
                Severity.CRITICAL
                if at_floor >= _CRITICAL_AT_FLOOR or (scale or 0.0) <= thresholds.hard_floor
                else Severity.WARNING,
                f"the loss scale is at {_spelled(scale)} and the gradient still overflows "
                f"({at_floor} times in a row).",
                {"consecutive": at_floor, "loss_scale": scale, "loss": loss},
            )
        )
    elif near_floor == _BOUNCES and scale is not None:
        findings.append(
            _finding(
                observation,
                FindingKind.LOSS_SCALE_FLOOR,
                Severity.CRITICAL,
                f"the loss scale overflows at {_spelled(scale)} again, {_BOUNCES} times or more "
                "so near its floor: it bounces there and finds no place.",
                {"consecutive": near_floor, "loss_scale": scale, "loss": loss},
            )
        )
    return tuple(findings), following


def _has_collapsed(scale: float, rate: float, before: OverflowState) -> bool:
    # A low rate after a clean record, or after little of a fall, is probing or ends a search.
    falls = before.clean == 0 and scale * _STILL_FALLS <= (before.scale or scale)
    low = scale < min(_LOW_SCALE, before.highest / _COLLAPSE)
    return before.settled and low and (falls or rate >= _MOSTLY)


def _is_storm(state: OverflowState, thresholds: DetectorThresholds, *, loss_finite: bool) -> bool:
    if not state.settled:
        return state.total > thresholds.search_overflows or not loss_finite
    return state.consecutive >= thresholds.storm or state.bits.bit_count() >= thresholds.storm_rate


def _storm(
    observation: Observation, scale: float | None, state: OverflowState, *, loss_finite: bool
) -> Finding:
    loss = "finite" if loss_finite else "not finite"
    return _finding(
        observation,
        FindingKind.OVERFLOW_STORM,
        Severity.CRITICAL,
        f"{state.consecutive} overflows in a row and {state.bits.bit_count()} in the window; the "
        f"loss scale is {_spelled(scale)} after {state.highest:g} at "
        f"its highest, the loss is {loss}.",
        {
            "consecutive": state.consecutive,
            "count": state.bits.bit_count(),
            "loss_scale": scale,
            "highest": state.highest,
            "loss_finite": int(loss_finite),
        },
    )


def _spelled(scale: float | None) -> str:
    return "unknown" if scale is None else f"{scale:g}"


def _finding(
    observation: Observation,
    kind: FindingKind,
    severity: Severity,
    message: str,
    evidence: dict[str, float | int | str | None],
) -> Finding:
    return Finding(
        step=observation.step,
        last_step=observation.step,
        kind=kind,
        severity=severity,
        message=message,
        evidence=evidence,
    )
