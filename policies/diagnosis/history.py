"""What a run's signals were like, in bounded memory however long it is.

Of each signal the **course** is kept as up to 256 means over equal numbers of samples, together
with count, extremes and the usual distance from sample to sample. Around the begin of each fault
that is more than a note the steps themselves are kept: 32 before it and 16 from it on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, sub

from mindtune.policies.detectors.non_finite import LARGEST
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import SIGNAL_NAMES, Observation
from mindtune.policies.windows import median

__all__ = ["Course", "History", "Scene"]

_POINTS = 256
_BEFORE, _FROM = 32, 16
_SCENES, _SCENES_OF_A_KIND = 200, 20
_GAPS = 16
_NOT_NUMBERS = frozenset({"step", "run", "phase", "straggler_rank"})
_BLOCK = 64
_SIGNALS = tuple(name for name in SIGNAL_NAMES if name not in _NOT_NUMBERS)
_ALL = attrgetter(*_SIGNALS)


@dataclass(slots=True)
class Course:
    """One signal over the run."""

    count: int = 0
    """Finite samples."""
    non_finite: int = 0
    """NaN and infinite ones."""
    zeros: int = 0
    """Samples of exactly 0."""
    first: float = 0.0
    last: float = 0.0
    low: float = LARGEST
    high: float = -LARGEST
    low_step: int = 0
    high_step: int = 0
    path: float = 0.0
    """Sum of the distances from sample to sample."""
    means: list[float] = field(default_factory=list)
    """Means of `width` samples each, oldest first."""
    width: int = 1
    total: float = 0.0
    """Sum of the samples that are in no mean yet."""
    pending: int = 0
    """How many these are."""

    def add(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Take the values of some steps, at least one."""
        low, high = min(values), max(values)
        # NaN hides from the comparisons, but not from the sum.
        if not (-LARGEST < sum(values) < LARGEST and low > -LARGEST and high < LARGEST):
            kept = [
                (step, value)
                for step, value in zip(steps, values, strict=True)
                if -LARGEST < value < LARGEST
            ]
            self.non_finite += len(values) - len(kept)
            if not kept:
                return
            steps, values = zip(*kept, strict=True)
            low, high = min(values), max(values)
        self.zeros += values.count(0)
        if self.count:
            self.path += abs(values[0] - self.last)
        else:
            self.first = values[0]
        self.path += sum(map(abs, map(sub, values[1:], values)))
        self.count += len(values)
        self.last = values[-1]
        if low < self.low:
            self.low, self.low_step = low, steps[values.index(low)]
        if high > self.high:
            self.high, self.high_step = high, steps[values.index(high)]
        self._add_to_means(values)

    def _add_to_means(self, values: Sequence[float]) -> None:
        begin = 0
        while begin < len(values):
            part = values[begin : begin + self.width - self.pending]
            begin += len(part)
            self.total += sum(part)
            self.pending += len(part)
            if self.pending < self.width:
                return
            self.means.append(self.total / self.width)
            self.total, self.pending = 0.0, 0
            if len(self.means) == _POINTS:
                pairs = zip(self.means[::2], self.means[1::2], strict=True)
                self.means = [0.5 * a + 0.5 * b for a, b in pairs]
                self.width *= 2

    def part(self, begin: float, end: float) -> float:
        """Return the median level between two shares (0..1) of the run; it must have samples."""
        means = self.means or [self.total / self.pending]
        first = min(int(begin * len(means)), len(means) - 1)
        return median(tuple(means[first : max(first + 1, round(end * len(means)))]))

    @property
    def median(self) -> float:
        """Median level of the whole run."""
        return self.part(0.0, 1.0)

    @property
    def scatter(self) -> float:
        """Mean distance from sample to sample."""
        return self.path / max(1, self.count - 1)


@dataclass(slots=True)
class Scene:
    """The steps around the begin of a fault."""

    kind: FindingKind
    step: int
    """Step in which it was seen."""
    before: tuple[Observation, ...]
    """Oldest first."""
    onset: list[Observation]
    """From `step` on."""


@dataclass
class History:
    """Signals of one segment of a run; filled step by step with `add`."""

    resumed_from: History | None = None
    """The segment that this one goes on from."""
    first_step: int | None = None
    last_step: int = 0
    steps: int = 0
    gaps: Counter[int] = field(default_factory=Counter)
    """Distance from record to record -> how often."""
    phases: Counter[str] = field(default_factory=Counter)
    """Phase other than train -> steps."""
    skipped: int = 0
    """Steps whose update was skipped."""
    scenes: list[Scene] = field(default_factory=list)
    _courses: dict[str, Course] = field(default_factory=dict)
    _untold: list[Observation] = field(default_factory=list)
    """Newest steps that are in no course yet."""
    _recent: deque[Observation] = field(default_factory=lambda: deque(maxlen=_BEFORE))
    _open: list[Scene] = field(default_factory=list)
    _newest: dict[FindingKind, int] = field(default_factory=dict)
    _of_kind: Counter[FindingKind] = field(default_factory=Counter)

    @classmethod
    def of(
        cls,
        steps: Iterable[tuple[Observation, Sequence[Finding]]],
        resumed_from: History | None = None,
    ) -> History:
        """Return the history of observations with the findings of each."""
        history = cls(resumed_from)
        for observation, findings in steps:
            history.add(observation, findings)
        return history

    def add(self, observation: Observation, findings: Sequence[Finding] = ()) -> None:
        """Take a step and what the detectors found in it."""
        step = observation.step
        if self.first_step is None:
            self.first_step = step
        else:
            gap = step - self.last_step
            if gap in self.gaps or len(self.gaps) < _GAPS:
                self.gaps[gap] += 1
        self.last_step = step
        self.steps += 1
        if observation.update_skipped:
            self.skipped += 1
        if observation.phase not in (None, "train"):
            self.phases[str(observation.phase)] += 1
        for scene in self._open:
            scene.onset.append(observation)
        if self._open and len(self._open[0].onset) >= _FROM:
            self._open = [scene for scene in self._open if len(scene.onset) < _FROM]
        for finding in findings:
            if finding.severity is not Severity.INFO:
                self._keep(finding.kind, observation)
        self._recent.append(observation)
        self._untold.append(observation)
        if len(self._untold) >= _BLOCK:
            self._take_in()

    def _take_in(self) -> None:
        """Bring the courses up to date; in blocks, since a run has many steps and signals."""
        untold, self._untold = self._untold, []
        steps = [observation.step for observation in untold]
        columns = zip(*map(_ALL, untold), strict=True)
        for name, column in zip(_SIGNALS, columns, strict=False):
            if None not in column:
                self._course(name).add(steps, column)
            elif any(value is not None for value in column):
                known = [pair for pair in zip(steps, column, strict=True) if pair[1] is not None]
                self._course(name).add(*zip(*known, strict=True))

    def _course(self, name: str) -> Course:
        course = self._courses.get(name)
        if course is None:
            course = self._courses[name] = Course()
        return course

    def _keep(self, kind: FindingKind, observation: Observation) -> None:
        newest = self._newest.get(kind)
        self._newest[kind] = observation.step
        if newest is not None and self._recent and newest >= self._recent[0].step:
            return  # it goes on, or comes back within the steps that are kept
        if len(self.scenes) >= _SCENES or self._of_kind[kind] >= _SCENES_OF_A_KIND:
            return
        self._of_kind[kind] += 1
        scene = Scene(kind, observation.step, tuple(self._recent), [observation])
        self.scenes.append(scene)
        self._open.append(scene)

    def course(self, name: str) -> Course | None:
        """Return the course of a signal; None: it has no finite value."""
        self._take_in()
        course = self._courses.get(name)
        return course if course is not None and course.count else None

    def courses(self) -> Iterator[tuple[str, Course]]:
        """Yield the signals that have a finite value, each with its course."""
        self._take_in()
        for name, course in self._courses.items():
            if course.count:
                yield name, course

    def measured(self, name: str) -> bool:
        """Return whether a signal was measured at all, NaN included."""
        self._take_in()
        return name in self._courses

    @property
    def interval(self) -> int:
        """Usual distance from record to record."""
        return max(1, self.gaps.most_common(1)[0][0]) if self.gaps else 1

    def scene(self, incident: Finding) -> Scene | None:
        """Return the steps around the begin of an incident, if they were kept."""
        for scene in self.scenes:
            if scene.kind is incident.kind and incident.step <= scene.step <= incident.last_step:
                return scene
        return None
