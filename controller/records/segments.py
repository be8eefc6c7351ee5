"""Splits the observations of a log or run into segments: what ran between two restarts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice, pairwise
from typing import NamedTuple

from mindtune.policies.signals import Observation

__all__ = ["Segment", "segments"]

_SAMPLE = 64


class Segment(NamedTuple):
    """A stretch without a restart."""

    run: int
    starts_over: bool
    """Whether it is the beginning of a training; otherwise it goes on with an earlier one."""
    interval: int
    """Usual distance in steps from record to record."""
    observations: Iterator[Observation]
    """To be read before the next segment is asked for."""


def segments(observations: Iterable[Observation]) -> Iterator[Segment]:
    """Yield the segments of a log as they come.

    One whose first step is at or before the first step of all starts over: it is another training.
    """
    first_step = math.inf
    for run, group in groupby(observations, key=lambda observation: observation.run or 0):
        rest = iter(group)
        sample = list(islice(rest, _SAMPLE))
        starts_over = sample[0].step <= first_step
        if starts_over:
            first_step = sample[0].step
        gaps = [max(1, after.step - before.step) for before, after in pairwise(sample)]
        interval = statistics.median_low(gaps) if gaps else 1
        yield Segment(run, starts_over, interval, chain(sample, rest))
