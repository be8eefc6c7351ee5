"""Owns the loss scale in act mode: finds it fast, forgives isolated overflows, knows its floor.

Theory of operation. Every overflow costs one update, which the step skips by itself. What is
decided here is the scale of the next step.

- **Isolated**: an overflow after a clean step takes one credit and changes nothing, since a bad
  batch says nothing about the scale; a clean step refills the credit (`hysteresis` 2 as in
  Megatron and DeepSpeed, but counted in a row). Overflows that come too often within the last 48
  steps (`rate`) are not isolated.
- **Search**: before the first clean step, and right after a growth, there is no credit: the scale
  is known to be wrong. It is halved, and from the third overflow in a row divided by 4, so that a
  start at 2^24 loses fewer updates than halving does.
- **Known scale**: trials may have run clean at some scale (`known_scale`, handed over in
  `best_config.yaml`). An overflow at more than one move above it leads straight there: a start at
  2^24 loses one update. It is the largest scale that short trials have visited, not the largest
  that fits, so what this run has seen itself counts as well: it never leads below the largest
  scale at which a step of this run was clean, and a healthy run is searched as without it.
- **Growth** after `window` clean steps in a row by 2, up to `cap`; there a single advice says that
  the cap holds (silent caps hide trouble, unbounded growth ends in infinity).
- **Floor**: `soft_floor` is where gradients should no longer need scaling down. Overflows at or
  below it are counted in a row and within 48 steps; the scale may still go down to `hard_floor`,
  and after `stop_after` in a row, or `stop_rate` in 48 steps, the run is ended with a diagnosis.
  So it is when a row of `stop_after` overflows has led down to `hard_floor`: nothing is left to
  try, which takes 20 overflows from 2^24.
- A **non-finite loss** is not the scale's fault: the scale stays.

Where the scale is not within reach, does not obey or is fixed by the user, or in observe mode, the
policy only explains: a storm, a floor, overflows that have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mindtune.policies.decisions import (
    NO_CHANGE,
    Action,
    Advise,
    Decision,
    RequestStop,
    SetLossScale,
)
from mindtune.policies.explanations import (
    diagnose_floor_of_loss_scale,
    diagnose_storm,
    diagnose_without_effect,
)
from mindtune.policies.findings import Finding, FindingKind
from mindtune.policies.limits import KnobLimits
from mindtune.policies.policy import Feedback
from mindtune.policies.settings import PolicySettings, bounded, build
from mindtune.policies.signals import Observation
from mindtune.policies.state import ADDED
from mindtune.policies.state_class import state_class

__all__ = ["LossScaleLimits", "LossScalePolicy", "LossScaleState", "LossScaleThresholds"]

_KNOB = SetLossScale.knob
_RATE_WINDOW = 48
_RATE_MASK = (1 << _RATE_WINDOW) - 1
_SLOW_HITS = 2


@dataclass(frozen=True, kw_only=True)
class LossScaleLimits:
    """Hard bounds."""

    hard_floor: float = bounded(2.0**-5, 2.0**-24, 1.0)
    """Smallest scale (metaseq PR 115, for its 66B run)."""
    cap: float = bounded(2.0**24, 1.0, 2.0**60)
    """Largest scale (MindSpore's usual start; apex' cap)."""
    budget: int = bounded(128, 1, 1000)
    """Moves in 1000 steps."""


@dataclass(frozen=True, kw_only=True)
class LossScaleThresholds:
    """When it acts, and how strongly."""

    hysteresis: int = bounded(2, 1, 100)
    """Overflows in a row of which the last one lowers the scale (Megatron, DeepSpeed: 2)."""
    rate: int = bounded(4, 2, 48)
    """Overflows within 48 steps that are not isolated: 8 %; DeepSpeed-Chat's healthy probing has
    2 %."""
    scale_factor: float = bounded(2.0, 1.1, 16.0)
    """Ratio of one move (MindSpore, Megatron: 2)."""
    scale_window: int = bounded(1000, 1, 1_000_000)
    """Clean steps before a growth (MindFormers: 1000)."""
    known_scale: float = bounded(2.0**60, 1.0, 2.0**60)
    """A scale at which the config is known to run clean; the default: none is known."""
    soft_floor: float = bounded(1.0, 2.0**-24, 2.0**16)
    """Scale at which overflows are counted for the stop (Megatron's floor)."""
    stop_after: int = bounded(10, 1, 1000)
    """Overflows in a row at the floor that end the run."""
    stop_rate: int = bounded(24, 1, 48)
    """Overflows at the floor within 48 steps that end it: a clean step now and then saves
    nothing."""


@state_class(frozen=True, slots=True)
class LossScaleState:
    """Overflows so far, as far as they matter for the next one."""

    credit: int = 0
    """Overflows that may pass before the scale is lowered."""
    hits: int = 0
    """Overflows in a row."""
    clean: int = 0
    """Clean steps in a row at this scale."""
    bits: int = 0
    """One bit per step, the newest lowest."""
    at_floor: int = 0
    """Overflows in a row at or below the soft floor."""
    floor_bits: int = 0
    """One bit per step: overflows at or below the soft floor."""
    clean_scale: float = field(default=0.0, metadata={ADDED: True})
    """Largest scale at which a step was clean; 0: none was yet."""


@dataclass(frozen=True)
class LossScalePolicy:
    """Owner of `loss_scale`."""

    limits: LossScaleLimits = LossScaleLimits()
    thresholds: LossScaleThresholds = LossScaleThresholds()

    @classmethod
    def from_settings(cls, settings: PolicySettings) -> LossScalePolicy:
        """Return the policy with the user's values."""
        return cls(
            build(LossScaleLimits, settings.limits, "policies.loss_scale.limits"),
            build(LossScaleThresholds, settings.thresholds, "policies.loss_scale.thresholds"),
        )

    @property
    def name(self) -> str:
        """Name in settings and records."""
        return "loss_scale"

    @property
    def knobs(self) -> Mapping[str, KnobLimits]:
        """What it may turn."""
        return MappingProxyType(
            {
                _KNOB: KnobLimits(
                    low=self.limits.hard_floor,
                    high=self.limits.cap,
                    max_factor=max(
                        self.thresholds.scale_factor**2,
                        self.limits.cap / self.thresholds.known_scale,
                    ),
                    cooldown=1,
                    budget=self.limits.budget,
                    check="overflow",
                    check_after=8,
                )
            }
        )

    def init(self) -> LossScaleState:
        """Return the state before the first step."""
        return LossScaleState()

    def decide(
        self,
        observation: Observation,
        findings: Sequence[Finding],
        feedback: Feedback,
        state: LossScaleState,
    ) -> tuple[Decision, LossScaleState]:
        """Return the scale of the next step, a stop, advice, or no change."""
        overflow, scale = observation.overflow, observation.loss_scale
        if (
            overflow is None
            or math.isnan(overflow)
            or scale is None
            or not (math.isfinite(scale) and scale > 0)
        ):
            return NO_CHANGE, state
        facts = feedback.facts
        last = feedback.knobs.get(_KNOB)
        obeys = last is None or last.effective is not False
        owns = obeys and _KNOB in facts.reachable and facts.loss_scale_dynamic is not False
        if overflow < 0.5:
            return self._clean(scale, state, owns=owns)
        at_floor = scale <= self.thresholds.soft_floor
        state = replace(
            state,
            hits=state.hits + 1,
            clean=0,
            bits=((state.bits << 1) | 1) & _RATE_MASK,
            at_floor=state.at_floor + 1 if at_floor else 0,
            floor_bits=((state.floor_bits << 1) | int(at_floor)) & _RATE_MASK,
        )
        hits = self._ends(scale, state, owns=owns)
        if hits:
            return self._stop(observation, hits, state), state
        explained = self._explain(observation, findings, owns=owns)
        if explained is not None:
            return explained, state
        if not owns:
            return NO_CHANGE, state
        return self._lower(observation, scale, state)

    def _clean(
        self, scale: float, state: LossScaleState, *, owns: bool
    ) -> tuple[Decision, LossScaleState]:
        credit = self.thresholds.hysteresis - 1
        clean = state.clean + 1
        bits = (state.bits << 1) & _RATE_MASK
        floor_bits = (state.floor_bits << 1) & _RATE_MASK
        following = LossScaleState(
            credit, 0, clean, bits, 0, floor_bits, max(state.clean_scale, scale)
        )
        if not owns or clean < self.thresholds.scale_window:
            return NO_CHANGE, following
        following = replace(following, clean=0)
        if scale >= self.limits.cap:
            return self._capped(scale), following
        value = min(scale * self.thresholds.scale_factor, self.limits.cap)
        return (
            Decision(
                actions=(SetLossScale(value),),
                reason=f"{clean} steps in a row without overflow",
                evidence={"loss_scale": scale, "scale_window": self.thresholds.scale_window},
            ),
            replace(following, credit=0),
        )

    def _capped(self, scale: float) -> Decision:
        text = (
            f"the loss scale {scale:g} is at its cap {self.limits.cap:g} and would grow further: "
            "gradients are far from underflow, so no scale is needed here, or they are zero; look "
            "at the gradient norm."
        )
        return Decision(
            actions=(Advise(id="loss-scale-cap", message=text),),
            reason=f"{self.thresholds.scale_window} steps without overflow at the cap",
            evidence={"loss_scale": scale, "cap": self.limits.cap},
        )

    def _ends(self, scale: float, state: LossScaleState, *, owns: bool) -> str:
        """Return how many overflows end the run, in words; empty: they do not yet."""
        count = state.floor_bits.bit_count()
        if state.at_floor >= self.thresholds.stop_after:
            return f"{state.at_floor} overflows in a row at"
        lasts = state.hits >= self.thresholds.stop_after
        if owns and lasts and scale <= self.limits.hard_floor:
            return f"{state.hits} overflows in a row down to"
        if count >= self.thresholds.stop_rate:
            return f"{count} overflows in {_RATE_WINDOW} steps at"
        return ""

    def _stop(self, observation: Observation, hits: str, state: LossScaleState) -> Decision:
        return Decision(
            actions=(
                RequestStop(
                    id="loss-scale-floor",
                    diagnosis=diagnose_floor_of_loss_scale(observation, hits),
                ),
            ),
            reason=f"{hits} the floor of the loss scale ({self.thresholds.soft_floor:g}, at the "
            f"lowest {self.limits.hard_floor:g})",
            evidence={
                "loss_scale": observation.loss_scale,
                "overflows": state.hits,
                "consecutive": state.at_floor,
                "count": state.floor_bits.bit_count(),
                "threshold": self.thresholds.stop_after,
                "rate_threshold": self.thresholds.stop_rate,
                "loss": observation.loss,
                "grad_norm": observation.grad_norm,
            },
        )

    def _explain(
        self, observation: Observation, findings: Sequence[Finding], *, owns: bool
    ) -> Decision | None:
        """Return advice on what the policy cannot change itself."""
        for finding in findings:
            action: Action
            if finding.kind is FindingKind.OVERFLOW_WITHOUT_EFFECT and not owns:
                text = diagnose_without_effect(observation, finding)
                action = Advise(id="overflow-without-effect", message=text)
                count = finding.evidence.get("consecutive")
                if isinstance(count, int) and count >= self.thresholds.stop_after:
                    action = RequestStop(id="overflow-without-effect-stop", diagnosis=text)
            elif finding.kind is FindingKind.OVERFLOW_STORM and not owns:
                action = Advise(id="overflow-storm", message=diagnose_storm(observation, finding))
            else:
                continue
            return Decision(actions=(action,), reason=finding.message, evidence=finding.evidence)
        return None

    def _lower(
        self, observation: Observation, scale: float, state: LossScaleState
    ) -> tuple[Decision, LossScaleState]:
        if observation.loss is not None and not math.isfinite(observation.loss):
            return NO_CHANGE, state
        often = state.bits.bit_count() >= self.thresholds.rate
        if state.credit > 0 and not often:
            return NO_CHANGE, replace(state, credit=state.credit - 1)
        factor = self.thresholds.scale_factor
        known = max(self.thresholds.known_scale, state.clean_scale)
        if scale > factor * known:
            factor = scale / known
        elif state.hits > _SLOW_HITS and scale > self.thresholds.soft_floor:
            factor = factor**2
        value = min(max(scale / factor, self.limits.hard_floor), self.limits.cap)
        if scale > self.thresholds.soft_floor:
            value = max(
                value, min(self.thresholds.soft_floor, scale / self.thresholds.scale_factor)
            )
        if value >= scale:
            return NO_CHANGE, state
        why = f"{state.hits} overflows in a row"
        if often and state.hits == 1:
            why = f"{state.bits.bit_count()} overflows in {_RATE_WINDOW} steps"
            state = replace(state, bits=0)
        return (
            Decision(
                actions=(SetLossScale(value),),
                reason=f"{why} at a loss scale of {scale:g}",
                evidence={
                    "loss_scale": scale,
                    "consecutive": state.hits,
                    "hysteresis": self.thresholds.hysteresis,
                    "loss": observation.loss,
                },
            ),
            replace(state, credit=0),
        )
