"""From the records of a log's lines to one observation per optimizer step.

Theory of operation. Lines that speak of the same step become one observation: lines of several
ranks or writers, times and validation losses told later. The newest `_HELD` steps are held back
for that, so memory is bounded. A step that goes back is one of three things:

- a **repeated line**: a rank or writer that is a little behind. Its step is among the newest ones
  and its time is near;
- a **copy**: the log of another rank, appended. Its times lie inside what was read already, so it
  is passed over;
- a **restart**: everything else. A new segment (`run`) begins, and nothing of it is merged into
  the one before. So it does where the line's own clock starts anew.

A line without a time is a repeated one if it repeats the newest step, or one of the `lag` steps
before it that is not the first of its segment. Where a launcher names the rank of each line, it
tells: another rank repeats a step, the same one restarts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from mindtune.controller.records.log_readers.reader import Record, changed
from mindtune.policies.signals import Observation

__all__ = ["TimedRecord", "merge_records", "merged"]

_HELD = 64
_NEAR_S = 60.0
"""Ranks tell of one step within a minute, the first one, which compiles, included."""
_BEHIND = 4
"""Steps by which a rank's line may be behind another's."""
_RESTART_S = 2.0
"""No program that has to start anew trains again sooner."""
_LARGEST = frozenset({"overflow", "update_skipped", "step_time_s", "data_time_s",
                      "device_memory_used_bytes", "memory_allocated_bytes"})  # fmt: skip
"""Of several ranks the slowest and fullest counts, and any overflow."""
_NAMES = tuple(
    field.name for field in fields(Observation) if field.name not in ("step", "run", "phase")
)
_EVALUATION = frozenset({"eval_loss", "wall_time_s"})


class TimedRecord(NamedTuple):
    """A record with the time at which its line was written."""

    record: Record
    written_s: float | None = None
    rank: int | None = None
    """Who wrote it, where a launcher says so."""


@dataclass
class _Held:
    """A step that lines may still add to."""

    observation: Observation
    written_s: float | None


def merge_records(records: Iterable[TimedRecord], *, lag: int) -> Iterator[Observation]:
    """Yield one observation per step and segment, in the order of their first lines.

    Args:
        records: in the order of their lines.
        lag: steps by which a second writer may be behind the first.
    """
    merger = _Merger(lag)
    for timed in records:
        yield from merger.take(timed)
    yield from merger.flush()


class _Merger:
    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._held: dict[int, _Held] = {}
        self._run = 0
        self._told_run: int | None = None
        self._first_step: int | None = None
        self._last_step = -1
        self._first_written_s: float | None = None
        self._last_written_s: float | None = None
        self._interval_s = 0.0
        self._elapsed_s: float | None = None
        self._evaluated: Observation | None = None
        self._of_rank: dict[int, int] = {}
        """Rank -> its newest step in this segment."""

    def take(self, timed: TimedRecord) -> Iterator[Observation]:
        """Take one record, and yield the steps that nothing can be added to any more."""
        observation = timed.record.observation
        if _only_evaluates(observation):
            self._add_evaluation(observation)
            return
        told = observation.run
        if told is not None and told != self._told_run:
            if self._told_run is not None:
                yield from self._restart()
            self._told_run = told
        elif self._last_step >= 0:
            kind = self._kind(timed) if timed.rank is None else self._kind_of_rank(timed)
            if kind == "copy":
                return
            if kind == "restart":
                yield from self._restart()
        if timed.rank is not None:
            self._of_rank[timed.rank] = observation.step
        yield from self._hold(timed)

    def flush(self) -> Iterator[Observation]:
        """Yield what is held back."""
        yield from (held.observation for held in self._held.values())
        self._held.clear()

    def _kind(self, timed: TimedRecord) -> str:
        step, elapsed_s = timed.record.observation.step, timed.record.elapsed_s
        if elapsed_s is not None and self._elapsed_s is not None:
            if elapsed_s < self._elapsed_s / 2:
                return "restart"
            if step in self._held:
                return "same"
        if step > self._last_step:
            return "new"
        written_s = timed.written_s
        held = self._held.get(step)
        if written_s is not None and self._last_written_s is not None:
            if held is not None and held.written_s is not None:
                newest = step == self._last_step
                near_s = _NEAR_S if newest else max(_RESTART_S, _BEHIND * self._interval_s)
                lags = self._lag > 0 and step in list(self._held)[-1 - _BEHIND :]
                if (newest or lags) and abs(written_s - held.written_s) <= near_s:
                    return "same"
            first_s = self._first_written_s
            inside = first_s is not None and first_s <= written_s < self._last_written_s
            return "copy" if inside else "restart"
        if step == self._last_step:
            return "same"
        just_before = list(self._held)[-1 - self._lag : -1]
        return "same" if step in just_before and step != self._first_step else "restart"

    def _kind_of_rank(self, timed: TimedRecord) -> str:
        step = timed.record.observation.step
        before = self._of_rank.get(timed.rank or 0)
        if before is not None and step < before:
            return "restart"
        if step > self._last_step:
            return "new"
        return "same" if step in self._held else "copy"

    def _restart(self) -> Iterator[Observation]:
        yield from self.flush()
        self._run += 1
        self._first_step = None
        self._last_step = -1
        self._elapsed_s = None
        self._first_written_s = self._last_written_s = None
        self._of_rank.clear()

    def _hold(self, timed: TimedRecord) -> Iterator[Observation]:
        observation, written_s = timed.record.observation, timed.written_s
        step = observation.step
        if timed.record.elapsed_s is not None:
            self._elapsed_s = max(timed.record.elapsed_s, self._elapsed_s or 0.0)
        held = self._held.get(step)
        if held is not None:
            held.observation = merged(held.observation, observation)
            return
        if self._first_step is None:
            self._first_step = step
        self._last_step = max(step, self._last_step)
        if written_s is not None:
            if self._last_written_s is None:
                self._first_written_s = written_s
            else:
                self._interval_s = max(0.0, written_s - self._last_written_s)
            self._last_written_s = written_s
        segment = self._run if observation.run is None else observation.run
        if observation.run != segment:
            observation = changed(observation, {"run": segment})
        if self._evaluated is not None:
            observation = merged(observation, self._evaluated)
            self._evaluated = None
        self._held[step] = _Held(observation, written_s)
        if len(self._held) > _HELD:
            oldest = next(iter(self._held))
            yield self._held.pop(oldest).observation

    def _add_evaluation(self, observation: Observation) -> None:
        """Give a validation loss to its step, else to the newest one; at first, to the next."""
        step = observation.step
        if not self._held:
            self._evaluated = observation
            return
        held = self._held.get(step) or self._held[next(reversed(self._held))]
        held.observation = merged(held.observation, observation)


def _only_evaluates(observation: Observation) -> bool:
    if observation.eval_loss is None:
        return False
    return all(getattr(observation, name) is None for name in _NAMES if name not in _EVALUATION)


def merged(first: Observation, second: Observation) -> Observation:
    """Return what both say of one step: the first word holds, but no bad news is lost."""
    changes: dict[str, Any] = {}
    for name in _NAMES:
        new = getattr(second, name)
        if new is None:
            continue
        old = getattr(first, name)
        if old is None or (
            math.isfinite(old) and (not math.isfinite(new) or (name in _LARGEST and new > old))
        ):
            changes[name] = new
    if first.phase is None and second.phase is not None:
        changes["phase"] = second.phase
    return changed(first, changes) if changes else first
