"""How much the measurements of a study vary although nothing was changed.

Three kinds, each from what a study measures anyway, so that none costs a launch:

- from step to step within a launch, robust, since a pause of the machine is no property of the
  config;
- from part to part of a launch: how far the median of a third of it lies from that of the next.
  What is judged early, is judged by such a part;
- from launch to launch of one config: the confirming launches, pooled over the configs. They are
  measured in rounds, every config once per round, so that what a whole round has in common (the
  machine at that time) can be told from what each launch has of its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["LaunchNoise", "between_launches", "part_noise", "step_noise"]

_MAD_TO_SIGMA = 1.4826
"""Of a normal distribution."""
_MEAN_RANGE_OF_TWO = 1.128
"""Mean distance of two draws from a normal distribution, in standard deviations."""
_PARTS = 3
_FEWEST_STEPS = 6


@dataclass(frozen=True)
class LaunchNoise:
    """Relative standard deviations of the value of a launch."""

    total: float
    """From launch to launch of one config."""
    common: float | None
    """Part of it that all configs of a round share; None: fewer than two configs or rounds."""
    own: float | None
    """Part that every launch has of its own."""
    freedom: int
    """Degrees of freedom that `total` rests on."""


def step_noise(step_times_s: Sequence[float]) -> float | None:
    """Return the relative deviation of a step time within a launch; None: one step only."""
    if len(step_times_s) < 2:
        return None
    median = statistics.median(step_times_s)
    deviation = statistics.median(abs(time - median) for time in step_times_s)
    return _MAD_TO_SIGMA * deviation / median


def part_noise(launches: Sequence[Sequence[float]]) -> float | None:
    """Return the relative deviation of the median of a third of a launch; None: not known.

    From the second and the last third of every launch: the first one holds the start, which is
    slower for a reason.

    Args:
        launches: Step times of each, in seconds and in order.
    """
    distances = []
    for times in launches:
        if len(times) < _FEWEST_STEPS:
            continue
        part = len(times) // _PARTS
        last, before = times[-part:], times[-2 * part : -part]
        distances.append(abs(math.log(statistics.median(last) / statistics.median(before))))
    return statistics.fmean(distances) / _MEAN_RANGE_OF_TWO if distances else None


def between_launches(values: Mapping[int, Mapping[int, float]]) -> LaunchNoise | None:
    """Return how much launches of one config differ; None: no config was launched twice.

    Args:
        values: Number of a config -> round -> positive value.
    """
    logs = {
        config: {turn: math.log(value) for turn, value in rounds.items() if value > 0}
        for config, rounds in values.items()
    }
    repeated = [rounds for rounds in logs.values() if len(rounds) > 1]
    if not repeated:
        return None
    squares = sum(_squares(list(rounds.values())) for rounds in repeated)
    freedom = sum(len(rounds) - 1 for rounds in repeated)
    total = math.sqrt(squares / freedom)
    common, own = _split(repeated)
    return LaunchNoise(total, common, own, freedom)


def _split(repeated: Sequence[Mapping[int, float]]) -> tuple[float | None, float | None]:
    """Return the deviations of a round and of a launch within it: two-way analysis of variance."""
    rounds = sorted(set.intersection(*(set(entry) for entry in repeated)))
    if len(repeated) < 2 or len(rounds) < 2:
        return None, None
    rows = [[entry[turn] for turn in rounds] for entry in repeated]
    centred = [[value - statistics.fmean(row) for value in row] for row in rows]
    means = [statistics.fmean(column) for column in zip(*centred, strict=True)]
    freedom = (len(rows) - 1) * (len(rounds) - 1)
    rest = sum((v - mean) ** 2 for row in centred for v, mean in zip(row, means, strict=True))
    own = rest / freedom
    shared = sum(mean**2 for mean in means) / (len(rounds) - 1) - own / len(rows)
    return math.sqrt(max(0.0, shared)), math.sqrt(own)


def _squares(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)
