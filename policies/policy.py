"""The protocol that every policy follows, and the feedback it gets about its earlier actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mindtune.policies.decisions import Decision
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Finding
from mindtune.policies.limits import KnobLimits
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class
from mindtune.policies.windows import MAD_TO_SIGMA, Window

__all__ = ["Baseline", "Feedback", "KnobFeedback", "Policy", "Verdict"]

Verdict = Literal["granted", "refused", "observed", "undone"]
"""granted: applied; refused: by bound, cool-down, budget or conflict; observed: in observe mode;
undone: taken back because the outcome was worse."""


@dataclass(frozen=True, kw_only=True)
class KnobFeedback:
    """What became of the last request on one knob."""

    step: int
    """Step at which it was asked for."""
    requested: float
    """Value that the policy asked for."""
    granted: float | None
    """Value that the arbiter sent to the actuator; None if refused or only observed."""
    verdict: Verdict
    reason: str
    """The arbiter's reason for a refusal or an undo."""
    effective: bool | None = None
    """Whether the step reported the granted value as acting; None until it has reported."""

    def contradiction(self) -> str | None:
        """Return why no run can have stored this; None if one can."""
        if self.granted is not None and not self.granted >= 0.0:
            return f"no knob is set to {self.granted}"
        return None


# As in the detectors' score: a very quiet signal has no smaller deviation.
_RELATIVE_FLOOR = 0.05
_ABSOLUTE_FLOOR = 1e-12


@state_class(frozen=True, slots=True)
class Baseline:
    """What is usual for a signal: the detectors' robust statistics, this step included."""

    window: Window
    """The unflagged samples."""
    armed: bool
    """Whether these are enough for the detectors' full threshold."""

    @property
    def samples(self) -> tuple[float, ...]:
        """The unflagged samples, oldest first."""
        return self.window.values

    @property
    def median(self) -> float:
        """Median of the unflagged samples."""
        return self.window.median()

    @property
    def deviation(self) -> float:
        """Robust standard deviation, with the detectors' floor; above 0."""
        median = self.median
        floor = max(_RELATIVE_FLOOR * abs(median), _ABSOLUTE_FLOOR)
        return max(MAD_TO_SIGMA * self.window.mad(median), floor)


@state_class(frozen=True, kw_only=True)
class Feedback:
    """What a policy is told besides the signals: about its actions, the run and its baselines."""

    knobs: Mapping[str, KnobFeedback] = field(default_factory=dict)
    """Per knob, what was last granted, refused, undone or found ineffective."""
    rewound_step: int | None = None
    """Step at which the last return to an earlier state was granted; None: none was."""
    grad_norm: Baseline | None = None
    """What is usual for the gradient norm; None while there are too few samples."""
    facts: RunFacts = field(default_factory=lambda: RunFacts(reachable=frozenset()))
    """Facts of the run as far as they hold for this policy: in observe mode no knob is within
    reach."""


class Policy(Protocol):
    """A pure function of observation, findings, feedback and its own frozen state.

    No clock, no randomness, no rank: equal inputs give equal outputs, so a log can be replayed.
    """

    @property
    def name(self) -> str:
        """Key under `policies:` in a study file, and the `policy` field of a decision record."""

    @property
    def knobs(self) -> Mapping[str, KnobLimits]:
        """The knobs that this policy may turn, with what the arbiter holds it to."""

    def init(self) -> Any:
        """Return the state before the first step: a frozen, JSON-serialisable dataclass."""

    def decide(
        self,
        observation: Observation,
        findings: Sequence[Finding],
        feedback: Feedback,
        state: Any,
    ) -> tuple[Decision, Any]:
        """Return the decision for this step and the next state; never raises on any signal."""
