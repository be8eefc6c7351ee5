"""The steps of a run as its page needs them: columns of numbers, taken in as they are read."""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Sequence

from mindtune.controller.metrics.collect import TimeJudge
from mindtune.controller.reports.figure_style import is_shown
from mindtune.policies.signals import Observation

__all__ = ["LAST", "Points", "RunSteps", "Signal"]

LAST = 20
"""Losses whose median is called the loss at the end: one alone is mostly noise."""
_MOST = 2**17
"""Points of a signal up to which all of them are kept, 2 MB each."""
_TIMED = frozenset({
    "step_time_s", "data_time_s", "tokens_per_s", "mfu", "device_utilization", "straggler_ratio",
})  # fmt: skip
"""Signals that are not comparable where a step compiled, evaluated or saved: left out there."""
_LIMITS = frozenset({"clip_norm", "skip_threshold"})
"""Signals that are infinite where they are switched off, which is no broken value."""
_SIGNALS = (
    "loss", "eval_loss", "grad_norm", *sorted(_LIMITS), "update_norm", "global_batch_size",
    "learning_rate", "learning_rate_scale", "loss_scale", "overflow", "update_skipped",
    *sorted(_TIMED), "device_memory_used_bytes", "memory_allocated_bytes", "device_temperature_c",
    "device_power_w",
)  # fmt: skip
_MAPPED = ("grad_norm", "loss")
"""Signals that are shown over the learning rate."""
_DISTRIBUTED = ("step_time_s", "data_time_s", "tokens_per_s", "mfu")
_COSTS = ("compile", "eval", "save")


class Points:
    """Numbers over the steps, in their order; of very many, some that stand for all.

    Args:
        width: Numbers of a point.
        extremes: Of very many points the lowest and the highest of each stretch stay (by the last
            of their numbers), so that no spike is lost; otherwise one in so many.
    """

    def __init__(self, width: int = 1, *, extremes: bool = True) -> None:
        self._steps: array[int] = array("q")
        self._columns: tuple[array[float], ...] = tuple(array("d") for _ in range(width))
        self._extremes = extremes
        self._every = 1
        self._waiting: list[tuple[int, tuple[float, ...]]] = []
        self._seen = 0

    def add(self, step: int, *values: float) -> None:
        """Take in a point."""
        if self._every == 1:
            self._keep(step, values)
        elif self._extremes:
            self._waiting.append((step, values))
            if len(self._waiting) >= 2 * self._every:
                for index in _lowest_and_highest([told[-1] for _, told in self._waiting]):
                    self._keep(*self._waiting[index])
                self._waiting.clear()
        else:
            if self._seen % self._every == 0:
                self._keep(step, values)
            self._seen += 1

    def _keep(self, step: int, values: Sequence[float]) -> None:
        self._steps.append(step)
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)
        if len(self._steps) >= _MOST:
            self._halve()

    def _halve(self) -> None:
        self._every *= 2
        count = len(self._steps)
        if self._extremes:
            told = self._columns[-1]
            kept = [
                start + index
                for start in range(0, count, 4)
                for index in _lowest_and_highest(told[start : start + 4])
            ]
        else:
            kept = list(range(0, count, 2))
        self._steps = array("q", [self._steps[index] for index in kept])
        self._columns = tuple(
            array("d", [column[index] for index in kept]) for column in self._columns
        )

    @property
    def steps(self) -> list[int]:
        """Step of each point."""
        return [*self._steps, *(step for step, _ in self._waiting)]

    def values(self, column: int = 0) -> list[float]:
        """Return a number of each point."""
        return [*self._columns[column], *(told[column] for _, told in self._waiting)]


def _lowest_and_highest(values: Sequence[float]) -> list[int]:
    shown = [index for index, value in enumerate(values) if not math.isnan(value)] or [0]
    return sorted({min(shown, key=values.__getitem__), max(shown, key=values.__getitem__)})


class Signal:
    """One signal over the steps in which it was measured."""

    def __init__(self, first: float) -> None:
        self.points = Points()
        self.broken = Points(0, extremes=False)
        """Steps whose value no axis can hold."""
        self.constant: float | None = first if math.isfinite(first) else None
        """The one value that all steps have; None: there are several, or it is not finite."""

    def add(self, step: int, value: float) -> None:
        """Take in a step."""
        self.points.add(step, value)
        if not is_shown(value):
            self.broken.add(step)
        if value != self.constant:
            self.constant = None


class RunSteps:
    """What a page shows of the steps of a run.

    A signal takes some megabytes, however long the run is; the distributions of times keep a
    number per step, as the metrics do.

    Args:
        last_action: Step of the last change that a policy made; None: none did.
    """

    def __init__(self, *, last_action: int | None = None) -> None:
        self.count = 0
        self.lowest_step = self.highest_step = 0
        self.last_step = 0
        self.last_loss: float | None = None
        """Of the last step; None: it has none."""
        self.phases: Counter[str] = Counter()
        self.signals: dict[str, Signal] = {}
        """Those that were measured."""
        self.norms = Points(extremes=False)
        """Gradient norms, for their distribution."""
        self.maps = {name: Points(2) for name in _MAPPED}
        """Learning rate and signal."""
        self.distributions: dict[str, array[float]] = {name: array("d") for name in _DISTRIBUTED}
        """Finite values of the steps whose time counts; see `TimeJudge`."""
        self.waits: array[float] = array("d")
        """Share of each such step's time that was spent waiting for data."""
        self.first_loss: float | None = None
        """The first finite one."""
        self.last_losses: deque[float] = deque(maxlen=LAST)
        """The last finite ones."""
        self.broken_losses = 0
        self.losses_since_action = 0
        """Finite losses after the last action."""
        self.skipped = 0
        """Updates that were skipped."""
        self.eval_loss: float | None = None
        self.wall_time_s: float | None = None
        self.spent_s: dict[str, float] = dict.fromkeys(_COSTS, 0.0)
        """Seconds of the steps of a phase."""
        self.peak_bytes: dict[str, float] = {}
        """Most memory, by the signal that tells of it."""
        self._last_action = last_action
        self._times = TimeJudge()

    def take(self, step: Observation) -> None:
        """Take in a step."""
        number = step.step
        if not self.count:
            self.lowest_step = self.highest_step = number
        self.lowest_step = min(self.lowest_step, number)
        self.highest_step = max(self.highest_step, number)
        self.count += 1
        self.last_step, self.last_loss = number, step.loss
        self.phases[step.phase or "train"] += 1
        only_trained = step.phase in (None, "train")
        for name in _SIGNALS:
            value = getattr(step, name)
            if value is None or (not only_trained and name in _TIMED):
                continue
            if name in _LIMITS and math.isinf(value):
                continue
            signal = self.signals.get(name)
            if signal is None:
                signal = self.signals[name] = Signal(value)
            signal.add(number, value)
        self._take_course(step)
        self._take_costs(step)
        if self._times.why_untimed(step) is None:
            self._take_times(step)

    def _take_course(self, step: Observation) -> None:
        loss = step.loss
        if loss is not None and math.isfinite(loss):
            if self.first_loss is None:
                self.first_loss = loss
            self.last_losses.append(loss)
            if self._last_action is not None:
                self.losses_since_action += step.step > self._last_action
        elif loss is not None:
            self.broken_losses += 1
        self.eval_loss = _newest(step.eval_loss, self.eval_loss)
        if step.grad_norm is not None:
            self.norms.add(step.step, step.grad_norm)
        rate = step.learning_rate
        if rate is None or not 0 < rate <= 1e100:
            return
        for name, points in self.maps.items():
            value = getattr(step, name)
            if value is not None and value > 0 and is_shown(value):
                points.add(step.step, rate, value)

    def _take_costs(self, step: Observation) -> None:
        self.wall_time_s = _newest(step.wall_time_s, self.wall_time_s)
        self.skipped += bool(step.update_skipped)
        time_s, phase = step.step_time_s, step.phase or ""
        if phase in self.spent_s and time_s and math.isfinite(time_s):
            self.spent_s[phase] += time_s
        for name in ("memory_allocated_bytes", "device_memory_used_bytes"):
            size = getattr(step, name)
            if size is not None and math.isfinite(size):
                self.peak_bytes[name] = max(size, self.peak_bytes.get(name, size))

    def _take_times(self, step: Observation) -> None:
        for name, column in self.distributions.items():
            value = getattr(step, name)
            if value is not None and math.isfinite(value):
                column.append(value)
        if step.data_time_s is not None and step.step_time_s:
            share = step.data_time_s / step.step_time_s
            if math.isfinite(share):
                self.waits.append(share)


def _newest(value: float | None, known: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else known
