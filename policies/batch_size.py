"""Enlarges the global batch of an under-fed device, and checks that it paid.

Theory of operation. The detectors report an under-fed device (busy for less than
`low_utilization` of the last steps while it does not wait for data) or a starved one (it waits).
A starved device gets advice about the input pipeline: a larger batch would wait all the longer.
An under-fed one gets a batch twice as large, made of more micro-batches of the same size: no more
memory, and the fixed cost of an optimizer step (update, reduction, host work) is shared by more
samples. From one micro-batch it goes to four at once: one runs as a single fused graph, while two
pay for the launch of a second graph and gained nothing in our workload on a CPU (17.3, 17.3, 14.6,
12.6 ms per sample with 1, 2, 4, 8 micro-batches). The arbiter compares the tokens per second
before and after and takes the move back if it gained less than 5 % (the gate of AdaptDL and
KungFu); then that size is the ceiling for `retry_after` steps.

Nothing is resized while the run is in trouble or shortly after (`calm` steps), since it would
blur the view on either; a rank that the others wait for is trouble too: its host is slow, their
devices wait, and a larger batch would hide that; nor while memory is under pressure; nor beyond
`max_growth` times the first batch or the most micro-batches that the actuator accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mindtune.policies.decisions import NO_CHANGE, Advise, Decision, SetBatchSize
from mindtune.policies.explanations import diagnose_data_stall
from mindtune.policies.findings import Finding, FindingKind
from mindtune.policies.limits import KnobLimits
from mindtune.policies.policy import Feedback
from mindtune.policies.settings import PolicySettings, bounded, build
from mindtune.policies.signals import Observation
from mindtune.policies.state_class import state_class

__all__ = ["BatchSizeLimits", "BatchSizePolicy", "BatchSizeState", "BatchSizeThresholds"]

_KNOB = SetBatchSize.knob
_FACTOR = 2
_FIRST_FACTOR = 4
_LONG = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class BatchSizeLimits:
    """Hard bounds."""

    max_global_batch_size: int = bounded(1 << 24, 1, 1 << 30)
    """Largest batch."""
    max_growth: int = bounded(8, 1, 1024)
    """Largest ratio to the first batch: the schedule was made for that one."""
    cooldown: int = bounded(64, 1, 100_000)
    """Steps between two moves: one window of utilization and the outcome check."""
    budget: int = bounded(4, 1, 100)
    """Moves in 1000 steps."""


@dataclass(frozen=True, kw_only=True)
class BatchSizeThresholds:
    """When it acts."""

    calm: int = bounded(32, 0, 10_000)
    """Steps without trouble before a move."""
    stall_patience: int = bounded(16, 1, 10_000)
    """Steps in a row of a starved device before the advice."""
    min_gain: float = bounded(1.05, 1.0, 10.0)
    """Gain in tokens per second below which a move is taken back."""
    check_after: int = bounded(32, 4, 10_000)
    """Steps over which the gain is taken."""
    retry_after: int = bounded(5000, 1, 10_000_000)
    """Steps for which a move that was taken back is not tried again."""


@state_class(frozen=True, slots=True)
class BatchSizeState:
    """What has been tried."""

    first: int | None = None
    """Batch of the first step that reported one."""
    quiet: int = 0
    """Steps in a row without trouble."""
    stalled: int = 0
    """Steps in a row of a starved device."""
    rest: int = 0
    """Steps until a move may be tried again."""
    undone_step: int = 0
    """Step of the last undo that was taken in."""


@dataclass(frozen=True)
class BatchSizePolicy:
    """Owner of `global_batch_size`."""

    limits: BatchSizeLimits = BatchSizeLimits()
    thresholds: BatchSizeThresholds = BatchSizeThresholds()

    @classmethod
    def from_settings(cls, settings: PolicySettings) -> BatchSizePolicy:
        """Return the policy with the user's values."""
        return cls(
            build(BatchSizeLimits, settings.limits, "policies.batch_size.limits"),
            build(BatchSizeThresholds, settings.thresholds, "policies.batch_size.thresholds"),
        )

    @property
    def name(self) -> str:
        """Name in settings and records."""
        return "batch_size"

    @property
    def knobs(self) -> Mapping[str, KnobLimits]:
        """What it may turn."""
        return MappingProxyType(
            {
                _KNOB: KnobLimits(
                    low=1,
                    high=self.limits.max_global_batch_size,
                    max_factor=_FIRST_FACTOR,
                    cooldown=self.limits.cooldown,
                    budget=self.limits.budget,
                    check="throughput",
                    check_after=self.thresholds.check_after,
                    settle=16,
                    min_gain=self.thresholds.min_gain,
                )
            }
        )

    def init(self) -> BatchSizeState:
        """Return the state before the first step."""
        return BatchSizeState()

    def decide(
        self,
        observation: Observation,
        findings: Sequence[Finding],
        feedback: Feedback,
        state: BatchSizeState,
    ) -> tuple[Decision, BatchSizeState]:
        """Return a larger batch, advice on the pipeline, or no change."""
        found = {finding.kind: finding for finding in findings}
        stall = found.get(FindingKind.DATA_STALL)
        state = self._follow(observation, found, feedback, state)
        if state.stalled >= self.thresholds.stall_patience and stall is not None:
            return (
                Decision(
                    actions=(Advise(id="data-workers", message=diagnose_data_stall(stall)),),
                    reason=stall.message,
                    evidence=stall.evidence,
                ),
                state,
            )
        under_fed = found.get(FindingKind.LOW_UTILIZATION)
        if (
            under_fed is None
            or stall is not None
            or FindingKind.MEMORY_PRESSURE in found
            or state.quiet < self.thresholds.calm
            or state.rest > 0
        ):
            return NO_CHANGE, state
        return self._grow(observation, under_fed, feedback, state)

    def _follow(
        self,
        observation: Observation,
        found: Mapping[FindingKind, Finding],
        feedback: Feedback,
        state: BatchSizeState,
    ) -> BatchSizeState:
        first = state.first
        if first is None:
            first = _whole(observation.global_batch_size)
        last = feedback.knobs.get(_KNOB)
        undone = last is not None and last.verdict == "undone" and last.step != state.undone_step
        return BatchSizeState(
            first,
            0 if not _TROUBLE.isdisjoint(found) else min(state.quiet + 1, _LONG),
            min(state.stalled + 1, _LONG) if FindingKind.DATA_STALL in found else 0,
            self.thresholds.retry_after if undone else max(0, state.rest - 1),
            last.step if undone and last is not None else state.undone_step,
        )

    def _grow(
        self,
        observation: Observation,
        under_fed: Finding,
        feedback: Feedback,
        state: BatchSizeState,
    ) -> tuple[Decision, BatchSizeState]:
        batch, facts = _whole(observation.global_batch_size), feedback.facts
        micro = facts.micro_batch_size or _whole(observation.micro_batch_size)
        if batch is None or micro is None or state.first is None:
            return NO_CHANGE, state
        most = min(self.limits.max_global_batch_size, state.first * self.limits.max_growth)
        if facts.max_num_microbatches is not None:
            most = min(most, facts.max_num_microbatches * micro * facts.data_parallel)
        single = batch <= micro * facts.data_parallel
        value = batch * (_FIRST_FACTOR if single else _FACTOR)
        if value > most:
            value = batch * _FACTOR
        if value > most:
            text = (
                f"{under_fed.message} The batch of {batch} is not enlarged, since {most} is the "
                "most that is allowed; raise limits.max_growth or max_global_batch_size of the "
                "policy batch_size, or the micro-batch."
            )
            return (
                Decision(
                    actions=(Advise(id="batch-limit", message=text),),
                    reason=under_fed.message,
                    evidence={**under_fed.evidence, "global_batch_size": batch, "limit": most},
                ),
                state,
            )
        return (
            Decision(
                actions=(SetBatchSize(value),),
                reason=under_fed.message,
                evidence={**under_fed.evidence, "global_batch_size": batch},
            ),
            replace(state, rest=self.limits.cooldown),
        )


_TROUBLE = frozenset(
    {
        FindingKind.NON_FINITE_LOSS,
        FindingKind.NON_FINITE_GRAD,
        FindingKind.DIVERGENCE,
        FindingKind.LOSS_SPIKE,
        FindingKind.GRAD_NORM_SPIKE,
        FindingKind.OVERFLOW,
        FindingKind.FROZEN_LOSS,
        FindingKind.STRAGGLER,
    }
)


def _whole(value: float | None) -> int | None:
    """Return a count of samples as a log gives it, or None if it is none."""
    if value is None or not 1 <= value < _LONG:
        return None
    return int(value)
