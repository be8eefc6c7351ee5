"""Lets the device skip a poisoned update in the very step: owns the skip threshold.

Theory of operation. An update whose gradient norm is far beyond everything usual cannot be taken
back by a decision that comes after it, so the decision is made before: the policy sets a
threshold, and the training step compares and skips. The threshold stands at

    median * max(ratio, exp(deviations * spread))

of the detectors' baseline of the norm, that is of its unflagged samples: the median, and the
robust deviation of the logarithm upwards, from upper quantiles, since norms are positive and
their tails heavy; and never below 3 times what one sample in twenty exceeds, for norms that are
zero more often than not. That is far enough above that no healthy step reaches it; moderate
spikes are left to clipping and to the learning rate. Until the baseline is armed the threshold is
infinite.

It follows the level with hysteresis, since every move is a record: **up** at once when the target
has left it by `raise_ratio` and one of the newest norms comes within a third of it, since a
threshold that is too low skips healthy updates; **down** only when the target has fallen below it
by `lower_ratio`, and `lower_after` steps after the last move. A legal shift of the level (another
batch size) that reaches the threshold must not be skipped for long, nor only until the detectors
declare it: while norms are flagged, and before it falls, the median of the newest 32 norms counts
as well, flagged ones included. A burst of bad batches does not move it, a new level does after 17
steps.

A guard that fires again and again is wrong, or the run has a trouble that skipping does not cure:
after `max_skips` skipped updates within 48 steps it **opens**: the threshold is infinite for
`rest` steps, with an advice, and others (learning rate, rewind) deal with what is left. So a
healthy run whose level jumps loses `max_skips` updates at the most.

Setting the threshold changes nothing in a run by itself. Where it is not within reach, or in
observe mode, nothing is asked for until an update comes that would have been skipped and whose
loss is out of line as well (or not measured). A threshold that the user has set is left alone; if
it skips as much as would open the guard there is an advice, and where it skips `stop_after`
updates in a row, and nothing can be learnt any more, the run is ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mindtune.policies.decisions import (
    NO_CHANGE,
    Advise,
    Decision,
    RequestStop,
    SetSkipThreshold,
)
from mindtune.policies.diagnosis import diagnose_skipping
from mindtune.policies.findings import Evidence, Finding, FindingKind
from mindtune.policies.limits import KnobLimits
from mindtune.policies.policy import Baseline, Feedback
from mindtune.policies.settings import PolicySettings, bounded, build
from mindtune.policies.signals import Observation
from mindtune.policies.windows import median, push

__all__ = ["SkipUpdateLimits", "SkipUpdatePolicy", "SkipUpdateState", "SkipUpdateThresholds"]

_KNOB = SetSkipThreshold.knob
_WINDOW = 48
_MASK = (1 << _WINDOW) - 1
_RECENT = 32
_NEAR = 3.0
_LOWEST, _HIGHEST = 1e-30, 1e30
_ANY_FACTOR = 1e60
# A scatter of 1 in the logarithm reaches it in 1 step of 400,000; what seems wider is no baseline.
_LARGEST_RATIO = 100.0
_OVER_HIGH = 3.0
_LONG = 1_000_000


@dataclass(frozen=True, kw_only=True)
class SkipUpdateLimits:
    """Hard bounds."""

    max_skips: int = bounded(16, 1, 48)
    """Skipped updates within 48 steps after which the guard opens: half of the 32 steps that the
    detectors take to declare a shift, so that a burst of 10 bad batches is skipped whole."""
    budget: int = bounded(64, 1, 1000)
    """Moves of the threshold in 1000 steps: 64 raises by a quarter are 6 decades."""


@dataclass(frozen=True, kw_only=True)
class SkipUpdateThresholds:
    """When an update is poisoned."""

    ratio: float = bounded(8.0, 2.0, 1e6)
    """Norm over its median that is skipped at least; a legal shift of the level (another batch
    size) is threefold."""
    deviations: float = bounded(5.5, 2.0, 100.0)
    """Deviations of the logarithm above that of the median that are skipped at least: independent
    log-normal norms exceed them in 1 step of 50 million. 6 linear deviations (OLMo-core) they
    exceed, with a scatter of 35 %, in 1 of 1500, and a public healthy run (TrOCR, 700 records)
    reaches 22."""
    raise_ratio: float = bounded(1.25, 1.01, 10.0)
    """Target over threshold that moves the threshold up."""
    lower_ratio: float = bounded(2.0, 1.01, 100.0)
    """Threshold over target that moves it down."""
    lower_after: int = bounded(32, 1, 100_000)
    """Steps between a move and one down: a quarter of the detectors' window."""
    stop_after: int = bounded(20, 2, 48)
    """Updates in a row that a threshold of the user's may skip (MindFormers' gate skips for ever,
    or stops at 10)."""
    rest: int = bounded(128, 8, 100_000)
    """Steps for which an opened guard stays open: the detectors take over a disordered level
    within 128."""


@dataclass(frozen=True, slots=True)
class SkipUpdateState:
    """Where the guard stands."""

    threshold: float | None = None
    """What it stands at, as asked for last; None: not armed."""
    since_move: int = 0
    """Steps since then."""
    skips: int = 0
    """One bit per step, the newest lowest: updates skipped by the threshold."""
    open_for: int = 0
    """Steps for which it still stays open."""
    openings: int = 0
    """How often it has opened."""
    moved: bool = False
    """Whether it was ever asked for: before that, a finite threshold is the user's."""
    recent: tuple[float, ...] = ()
    """Newest finite norms, flagged ones included."""


@dataclass(frozen=True)
class SkipUpdatePolicy:
    """Owner of `skip_threshold`."""

    limits: SkipUpdateLimits = SkipUpdateLimits()
    thresholds: SkipUpdateThresholds = SkipUpdateThresholds()

    @classmethod
    def from_settings(cls, settings: PolicySettings) -> SkipUpdatePolicy:
        """Return the policy with the user's values."""
        return cls(
            build(SkipUpdateLimits, settings.limits, "policies.skip_update.limits"),
            build(SkipUpdateThresholds, settings.thresholds, "policies.skip_update.thresholds"),
        )

    @property
    def name(self) -> str:
        """Name in settings and records."""
        return "skip_update"

    @property
    def knobs(self) -> Mapping[str, KnobLimits]:
        """What it may turn."""
        return MappingProxyType(
            {
                _KNOB: KnobLimits(
                    low=_LOWEST,
                    high=_HIGHEST,
                    max_factor=_ANY_FACTOR,
                    cooldown=1,
                    budget=self.limits.budget,
                    check="skipped",
                    check_after=16,
                    off=math.inf,
                )
            }
        )

    def init(self) -> SkipUpdateState:
        """Return the state before the first step."""
        return SkipUpdateState()

    def decide(
        self,
        observation: Observation,
        findings: Sequence[Finding],
        feedback: Feedback,
        state: SkipUpdateState,
    ) -> tuple[Decision, SkipUpdateState]:
        """Return the threshold of the next step, advice, or no change."""
        reported = observation.skip_threshold
        if not state.moved and reported is not None and math.isfinite(reported):
            state = replace(state, threshold=reported)
            state = _follow(observation, feedback, state, self.thresholds.rest)
            return self._warn(observation, reported, feedback.grad_norm, state), state
        state = _follow(observation, feedback, state, self.thresholds.rest)
        within_reach = _KNOB in feedback.facts.reachable
        if state.skips.bit_count() >= self.limits.max_skips and within_reach:
            return self._open(observation, feedback.grad_norm, state)
        if state.open_for > 0:
            return NO_CHANGE, replace(state, open_for=state.open_for - 1)
        baseline = feedback.grad_norm
        if baseline is None or not baseline.armed:
            return NO_CHANGE, state
        level = baseline.median
        target = self._target(baseline, level)
        falls = state.threshold is not None and target < state.threshold
        if falls or any(found.kind is FindingKind.GRAD_NORM_SPIKE for found in findings):
            level = max(level, median(state.recent))
            target = self._target(baseline, level)
        if not _LOWEST <= target <= _HIGHEST:
            return NO_CHANGE, state
        if not within_reach:
            return self._tell(observation, findings, baseline, state), replace(
                state, threshold=target
            )
        return self._move(target, level, baseline, state)

    def _target(self, baseline: Baseline, level: float) -> float:
        """Return where the threshold should stand for a norm of this level."""
        tail = self.thresholds.deviations * baseline.spread
        largest = max(self.thresholds.ratio, _LARGEST_RATIO)
        factor = largest if tail >= math.log(largest) else math.exp(tail)
        return max(level * max(self.thresholds.ratio, factor), _OVER_HIGH * baseline.high)

    def _move(
        self, target: float, level: float, baseline: Baseline, state: SkipUpdateState
    ) -> tuple[Decision, SkipUpdateState]:
        now = state.threshold
        if now is None:
            why = f"the norm's baseline is armed after {baseline.count} samples"
        elif target > self.thresholds.raise_ratio * now and max(state.recent) > now / _NEAR:
            why = f"the norm's level has risen to {level:.4g}"
        elif (
            now > self.thresholds.lower_ratio * target
            and state.since_move >= self.thresholds.lower_after
        ):
            why = f"the norm's level has fallen to {level:.4g}"
        else:
            return NO_CHANGE, state
        return (
            Decision(
                actions=(SetSkipThreshold(target),),
                reason=f"{why}: updates above {target:.4g} are poisoned",
                evidence=_evidence(baseline, target),
            ),
            replace(state, threshold=target, since_move=0, moved=True),
        )

    def _open(
        self, observation: Observation, baseline: Baseline | None, state: SkipUpdateState
    ) -> tuple[Decision, SkipUpdateState]:
        count = state.skips.bit_count()
        usual = "unknown" if baseline is None else f"{baseline.median:.4g}"
        text = (
            f"{count} of the last {_WINDOW} updates were skipped, because their gradient norms "
            f"(now {observation.grad_norm}) were above {state.threshold}; usual is {usual}. That "
            "is no single bad batch: the level of the norm has changed (batch size, data, "
            "schedule), or the weights are damaged. The guard is open for "
            f"{self.thresholds.rest} steps; look at the data and at the learning rate."
        )
        openings = state.openings + 1
        return (
            Decision(
                actions=(
                    SetSkipThreshold(math.inf),
                    Advise(id=f"skip-guard-open-{openings}", message=text),
                ),
                reason=f"{count} of {_WINDOW} updates were skipped (limit: "
                f"{self.limits.max_skips})",
                evidence={
                    "skipped": count,
                    "limit": self.limits.max_skips,
                    "grad_norm": observation.grad_norm,
                    "skip_threshold": state.threshold,
                },
            ),
            SkipUpdateState(
                open_for=self.thresholds.rest,
                openings=openings,
                moved=True,
                recent=state.recent,
            ),
        )

    def _warn(
        self,
        observation: Observation,
        threshold: float,
        baseline: Baseline | None,
        state: SkipUpdateState,
    ) -> Decision:
        """Return what the user should know about a threshold of their own."""
        count, last = state.skips.bit_count(), (1 << self.thresholds.stop_after) - 1
        usual = None if baseline is None else baseline.median
        ends = state.skips & last == last
        if not ends and count < self.limits.max_skips:
            return NO_CHANGE
        skipped = f"{count} of the last {_WINDOW} updates"
        if ends:
            skipped = f"{self.thresholds.stop_after} updates in a row"
        text = diagnose_skipping(observation, skipped, threshold, usual)
        return Decision(
            actions=(
                RequestStop(id="every-update-skipped", diagnosis=text)
                if ends
                else Advise(id="skip-threshold", message=text),
            ),
            reason=f"{skipped} were skipped by the run's own threshold",
            evidence={"skipped": count, "skip_threshold": threshold, "median": usual},
        )

    def _tell(
        self,
        observation: Observation,
        findings: Sequence[Finding],
        baseline: Baseline,
        state: SkipUpdateState,
    ) -> Decision:
        """Return what would have been asked for, if this update would have been skipped."""
        norm, threshold = observation.grad_norm, state.threshold
        if threshold is None or norm is None or not threshold < norm < math.inf:
            return NO_CHANGE
        agrees = observation.loss is None or any(
            found.kind is FindingKind.LOSS_SPIKE for found in findings
        )
        if not agrees or observation.update_skipped:
            return NO_CHANGE
        return Decision(
            actions=(SetSkipThreshold(threshold),),
            reason=f"the update of norm {norm:.4g} is poisoned: usual is {baseline.median:.4g}",
            evidence={**_evidence(baseline, threshold), "grad_norm": norm},
        )


def _follow(
    observation: Observation, feedback: Feedback, state: SkipUpdateState, rest: int
) -> SkipUpdateState:
    """Return the state with this step counted, and with what became of the last request."""
    norm, threshold = observation.grad_norm, state.threshold
    by_guard = (
        bool(observation.update_skipped)
        and norm is not None
        and threshold is not None
        and threshold < norm < math.inf
    )
    open_for = state.open_for
    last = feedback.knobs.get(_KNOB)
    if last is not None and last.verdict == "undone" and last.step == observation.step:
        open_for = rest
    # The step's own report holds; without one, what was granted last.
    acting = observation.skip_threshold
    if acting is None and last is not None:
        acting = last.granted
    if state.moved and acting is not None and not math.isnan(acting):
        threshold = acting if math.isfinite(acting) else None
    return SkipUpdateState(
        threshold,
        min(state.since_move + 1, _LONG),
        ((state.skips << 1) | int(by_guard)) & _MASK,
        open_for,
        state.openings,
        state.moved,
        push(state.recent, norm, _RECENT)
        if norm is not None and math.isfinite(norm)
        else state.recent,
    )


def _evidence(baseline: Baseline, target: float) -> Evidence:
    return {
        "median": baseline.median,
        "spread": baseline.spread,
        "samples": baseline.count,
        "threshold": target,
    }
