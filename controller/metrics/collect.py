"""Reads the steps of a run once and keeps what its figures are made of, a few numbers per step."""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from mindtune.policies import detectors
from mindtune.policies.detectors import DetectorState
from mindtune.policies.detectors.non_finite import LARGEST
from mindtune.policies.findings import Finding, FindingKind
from mindtune.policies.incidents import Incidents
from mindtune.policies.signals import Observation

__all__ = ["Collected", "Collector", "TimeJudge", "collect"]

_FIRST = "first"
_SAMPLE = 64
"""Steps by which the interval of a segment is told."""
_TIMES = ("step_time_s", "tokens_per_s", "mfu")
_NumberT = TypeVar("_NumberT", int, float)


def _floats() -> array[float]:
    return array("d")


@dataclass
class Collected:
    """What the steps of a run say; arrays are in the order of the steps."""

    first_step: int = 0
    last_step: int = 0
    recorded: int = 0
    segments: int = 0
    covered: int = 0
    """Optimizer steps that the records stand for: more than there are where some are left out."""
    repeated: int = 0
    """Steps made once more after a restart."""
    excluded: Counter[str] = field(default_factory=Counter)
    """Why a step's time does not count -> how many."""
    loss_steps: array[float] = field(default_factory=_floats)
    """These four are of the newest training alone, where a log holds several. Of losses, those
    that a restart has made once more are left out: what replaced them is the course."""
    losses: array[float] = field(default_factory=_floats)
    eval_losses: array[float] = field(default_factory=_floats)
    grad_norms: array[float] = field(default_factory=_floats)
    """Finite ones."""
    step_times: array[float] = field(default_factory=_floats)
    """Of steps that only trained, as all of the following."""
    token_rates: array[float] = field(default_factory=_floats)
    sample_rates: array[float] = field(default_factory=_floats)
    waits: array[float] = field(default_factory=_floats)
    waited_steps: array[float] = field(default_factory=_floats)
    """Step times of the steps in `waits`."""
    mfus: array[float] = field(default_factory=_floats)
    """As the run has recorded them."""
    stragglers: array[float] = field(default_factory=_floats)
    utilizations: array[float] = field(default_factory=_floats)
    powers: array[float] = field(default_factory=_floats)
    overflows: array[float] = field(default_factory=_floats)
    skips: array[float] = field(default_factory=_floats)
    bad_steps: float = 0.0
    """Non-finite, skipped, overflowed or loss-spiking; a rate counts as a part of one."""
    broken: array[float] = field(default_factory=_floats)
    """1 for a step with a non-finite loss or gradient norm, else 0."""
    temperature_c: float | None = None
    used_bytes: int | None = None
    allocated_bytes: int | None = None
    device_bytes: int | None = None
    wall_s: float = 0.0
    """Sum over segments of the time from their start to their last step."""
    trained_s: float = 0.0
    """Of it, in steps that only trained."""
    incidents: list[Finding] = field(default_factory=list)
    """What the detectors have found."""

    def begin_training(self) -> None:
        """Forget the course of an earlier training."""
        for column in (self.loss_steps, self.losses, self.eval_losses, self.grad_norms):
            del column[:]

    def resume_at(self, step: int) -> None:
        """Forget the losses that a restart goes back to before."""
        kept = bisect_left(self.loss_steps, step)
        del self.loss_steps[kept:]
        del self.losses[kept:]

    def spikes(self, kind: FindingKind) -> int:
        """Return how many incidents of a kind there were."""
        return sum(finding.kind is kind for finding in self.incidents)


class TimeJudge:
    """Tells of each step what its time went into besides training."""

    def __init__(self) -> None:
        self._run: int | None = None
        self._has_time = False

    def why_untimed(self, step: Observation) -> str | None:
        """Return what it went into; None: nothing. To be asked of all steps, in their order."""
        run = step.run or 0
        is_first = run != self._run
        if is_first:
            self._run, self._has_time = run, False
        # The first time of a segment holds the compile, as the mean of a first epoch does.
        if not self._has_time and any(getattr(step, name) is not None for name in _TIMES):
            is_first = self._has_time = True
        if step.phase not in (None, "train"):
            return step.phase
        if step.phase is None and is_first:
            return _FIRST
        if step.phase is None and step.eval_loss is not None:
            return "eval"
        return None


def collect(observations: Iterable[Observation]) -> Collected:
    """Read all observations; those of a log may come as they are read."""
    collector = Collector()
    for observation in observations:
        collector.take(observation)
    return collector.finish()


class Collector:
    """Takes in the steps of a run one by one.

    A segment whose first step is at or before the first step of all starts over: it is another
    training. Detectors start anew where the steps go back, as those of a run do.
    """

    def __init__(self) -> None:
        self._found = Collected()
        self._times = TimeJudge()
        self._state = DetectorState()
        self._judged_step = -1
        self._training_begins = math.inf
        self._highest = -1
        self._run: int | None = None
        self._begins = 0
        self._wall_s = 0.0
        self._sample: list[int] = []
        self._early: list[Finding] = []
        self._incidents: Incidents | None = None

    def take(self, observation: Observation, findings: Sequence[Finding] | None = None) -> None:
        """Take in a step.

        Args:
            observation: The step.
            findings: What the detectors found in it; None: they are asked here.
        """
        run = observation.run or 0
        if run != self._run:
            self._end_segment()
            self._begin_segment(run, observation.step)
        if findings is None:
            findings = self._judge(observation)
        self._join(observation.step, findings)
        found = self._found
        if not found.recorded:
            found.first_step = observation.step
        found.recorded += 1
        found.last_step = observation.step
        found.repeated += observation.step <= self._highest
        if observation.wall_time_s is not None and math.isfinite(observation.wall_time_s):
            self._wall_s = max(self._wall_s, observation.wall_time_s)
        _take_course(found, observation)
        _take_events(found, observation, findings)
        _take_device(found, observation)
        why = self._times.why_untimed(observation)
        if why is not None:
            found.excluded[why] += 1
        else:
            _take_times(found, observation)

    def finish(self) -> Collected:
        """Return what was collected; nothing can be taken in after it."""
        self._end_segment()
        return self._found

    def _begin_segment(self, run: int, step: int) -> None:
        self._run, self._begins = run, step
        if step <= self._training_begins:
            self._training_begins = step
            self._state, self._judged_step = DetectorState(), -1
            self._found.begin_training()
        self._found.resume_at(step)

    def _end_segment(self) -> None:
        if self._run is None:
            return
        found = self._found
        interval = _interval(self._sample)
        if self._incidents is None:
            self._incidents = self._joined(interval)
        found.incidents += self._incidents.found()
        found.wall_s += self._wall_s
        found.covered += max(found.last_step - self._begins + interval, 1)
        found.segments += 1
        self._highest = max(self._highest, found.last_step)
        self._wall_s, self._incidents = 0.0, None
        self._sample.clear()
        self._early.clear()

    def _judge(self, observation: Observation) -> tuple[Finding, ...]:
        if observation.step == self._judged_step:
            return ()
        if observation.step < self._judged_step:
            self._state = DetectorState()
        self._judged_step = observation.step
        findings, self._state = detectors.update(observation, self._state)
        return findings

    def _join(self, step: int, findings: Sequence[Finding]) -> None:
        """Take in findings; how far apart they make one fault is known after the first steps."""
        if self._incidents is not None:
            for finding in findings:
                self._incidents.add(finding)
            return
        self._sample.append(step)
        self._early += findings
        if len(self._sample) == _SAMPLE:
            self._incidents = self._joined(_interval(self._sample))

    def _joined(self, interval: int) -> Incidents:
        incidents = Incidents(gap=interval)
        for finding in self._early:
            incidents.add(finding)
        return incidents


def _interval(steps: Sequence[int]) -> int:
    """Return the usual distance in steps from record to record."""
    gaps = [max(1, after - before) for before, after in pairwise(steps)]
    return statistics.median_low(gaps) if gaps else 1


def _take_course(found: Collected, observation: Observation) -> None:
    if observation.loss is not None:
        found.loss_steps.append(observation.step)
        found.losses.append(observation.loss)
    if observation.eval_loss is not None:
        found.eval_losses.append(observation.eval_loss)
    _keep(found.grad_norms, observation.grad_norm)


def _take_events(found: Collected, observation: Observation, findings: Sequence[Finding]) -> None:
    values = (observation.loss, observation.grad_norm)
    broken = any(value is not None and not math.isfinite(value) for value in values)
    found.broken.append(broken)
    bad = float(broken or any(entry.kind is FindingKind.LOSS_SPIKE for entry in findings))
    for value, column in (
        (observation.overflow, found.overflows),
        (observation.update_skipped, found.skips),
    ):
        if value is not None and math.isfinite(value):
            share = min(max(value, 0.0), 1.0)
            column.append(share)
            bad = max(bad, share)
    found.bad_steps += bad


def _take_device(found: Collected, observation: Observation) -> None:
    found.used_bytes = _larger(found.used_bytes, observation.device_memory_used_bytes)
    found.allocated_bytes = _larger(found.allocated_bytes, observation.memory_allocated_bytes)
    found.device_bytes = _larger(found.device_bytes, observation.device_memory_total_bytes)
    found.temperature_c = _larger(found.temperature_c, observation.device_temperature_c)
    _keep(found.powers, observation.device_power_w)


def _take_times(found: Collected, observation: Observation) -> None:
    time_s = observation.step_time_s
    _keep(found.mfus, observation.mfu)
    _keep(found.stragglers, observation.straggler_ratio)
    _keep(found.utilizations, observation.device_utilization)
    rate = observation.tokens_per_s
    if time_s is None or not 0 < time_s < LARGEST:
        _keep(found.token_rates, rate)
        return
    found.step_times.append(time_s)
    found.trained_s += time_s
    # On several ranks a row holds the time of the step before: its own rate fits that time.
    if rate is None and observation.tokens is not None:
        rate = observation.tokens / time_s
    _keep(found.token_rates, rate)
    if observation.global_batch_size is not None:
        _keep(found.sample_rates, observation.global_batch_size / time_s)
    wait_s = observation.data_time_s
    if wait_s is not None and 0 <= wait_s < LARGEST:
        found.waits.append(wait_s)
        found.waited_steps.append(time_s)


def _keep(column: array[float], value: float | None) -> None:
    # Beyond it nothing is a measurement, and sums of such values overflow.
    if value is not None and abs(value) < LARGEST:
        column.append(value)


def _larger(known: _NumberT | None, value: _NumberT | None) -> _NumberT | None:
    if value is None or not math.isfinite(value):
        return known
    return value if known is None else max(known, value)
