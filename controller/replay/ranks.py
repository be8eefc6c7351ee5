"""The logs of several ranks, merged step by step: what is bad on one rank is bad for all.

Losses are averaged, but a non-finite one on any rank stands for all; ranks whose loss is exactly 0
while another's is not are left out, since pipeline stages but the last print 0. Of norms, times,
overflows and memory the worst rank counts, of the loss scale the lowest. A step that only some
ranks have told of is one all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from mindtune.policies.signals import SIGNAL_NAMES, Observation

__all__ = ["Ranks"]

_IDLE, _BUSY = 0.1, 0.5
_LEAST_STEPS = 8
_KNOWN_RANKS = 3
"""Ranks from which a median rank means something."""


class Ranks:
    """Merges the observations of ranks, and remembers how they differ.

    Args:
        numbers: Rank of each log.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = tuple(numbers)
        self._non_finite: dict[int, tuple[int, str]] = {}
        self._busy: dict[int, list[float]] = {rank: [0.0, 0] for rank in numbers}

    def merged(self, streams: Sequence[Iterable[Observation]]) -> Iterator[Observation]:
        """Yield one observation per segment and step, in their order."""
        iterators = [iter(stream) for stream in streams]
        heads = [next(iterator, None) for iterator in iterators]
        while any(head is not None for head in heads):
            place = min((o.run or 0, o.step) for o in heads if o is not None)
            told = {}
            for index, head in enumerate(heads):
                if head is not None and (head.run or 0, head.step) == place:
                    told[self._numbers[index]] = head
                    heads[index] = next(iterators[index], None)
            for rank, observation in told.items():
                self._note(rank, observation)
            yield _merge(told)

    def _note(self, rank: int, observation: Observation) -> None:
        for name, word in (("loss", "loss"), ("grad_norm", "gradient norm")):
            value = getattr(observation, name)
            if value is not None and not math.isfinite(value) and rank not in self._non_finite:
                self._non_finite[rank] = (observation.step, f"{word} is {value}")
        busy = observation.device_utilization
        if busy is not None and math.isfinite(busy):
            entry = self._busy[rank]
            entry[0] += busy
            entry[1] += 1

    def first_non_finite(self) -> str | None:
        """Return which ranks alone were not finite first, in words; None: no few of them."""
        if not self._non_finite:
            return None
        first = min(step for step, _ in self._non_finite.values())
        ranks = sorted(rank for rank, (step, _) in self._non_finite.items() if step == first)
        if 2 * len(ranks) > len(self._numbers):
            return None
        later = [step for step, _ in self._non_finite.values() if step > first]
        others = f"others from step {min(later)} on" if later else "no other rank's ever is"
        names = ", ".join(map(str, ranks))
        what = self._non_finite[ranks[0]][1]
        return (
            f"of {len(self._numbers)} ranks, rank {names} alone: its {what} in step {first}; "
            f"{others}"
        )

    def idle(self) -> str | None:
        """Return which ranks' devices do nothing while others work, in words; None: none do."""
        means = {
            rank: total / count for rank, (total, count) in self._busy.items()
            if count >= _LEAST_STEPS
        }  # fmt: skip
        idle = sorted(rank for rank, mean in means.items() if mean < _IDLE)
        if not idle or max(means.values()) < _BUSY:
            return None
        names = ", ".join(map(str, idle[:16]))
        return (
            f"the devices of {len(idle)} of {len(means)} ranks (rank {names}) are busy less than "
            f"{_IDLE:.0%} of the time, the busiest one {max(means.values()):.0%}"
        )


def _merge(told: dict[int, Observation]) -> Observation:
    observations = list(told.values())
    first = observations[0]
    merged: dict[str, Any] = {}
    for name in SIGNAL_NAMES:
        values = [getattr(o, name) for o in observations]
        values = [value for value in values if value is not None]
        if values and name not in ("step", "run"):
            merged[name] = _RULES.get(name, _first)(values)
    times = {rank: o.step_time_s for rank, o in told.items() if o.step_time_s is not None}
    if "straggler_ratio" not in merged and len(times) >= _KNOWN_RANKS:
        slowest = max(times, key=lambda rank: times[rank])
        usual = median(times.values())
        if usual > 0:
            merged["straggler_rank"] = slowest
            merged["straggler_ratio"] = times[slowest] / usual
    return replace(first, **merged)


def _first(values: Sequence[Any]) -> Any:
    return values[0]


def _other_than_train(values: Sequence[str]) -> str:
    return next((value for value in values if value != "train"), values[0])


def _worst(values: Sequence[float]) -> float:
    return next((value for value in values if not math.isfinite(value)), max(values))


def _mean(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return _worst(values)
    if any(values):
        values = [value for value in values if value != 0]
    return fmean(values)


_RULES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "loss": _mean,
    "eval_loss": _mean,
    "grad_norm": _worst,
    "overflow": max,
    "update_skipped": max,
    "loss_scale": min,
    "tokens": max,
    "wall_time_s": max,
    "step_time_s": max,
    "data_time_s": max,
    "tokens_per_s": max,
    "mfu": fmean,
    "device_utilization": fmean,
    "device_memory_used_bytes": max,
    "memory_allocated_bytes": max,
    "device_temperature_c": max,
    "device_power_w": min,
    "phase": _other_than_train,
}
"""How the values of ranks become one; what is not named here is equal on all of them."""
