"""What a run of a config shows: its truth with noise, outliers, crashes and bad luck."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Literal

from mindtune.experiments.cluster_simulator.machine import Machine
from mindtune.experiments.cluster_simulator.simulator import Truth

__all__ = ["OUTLIER_LENGTH", "Run", "draw_run"]

OUTLIER_LENGTH = 3.0
"""Mean of how many times longer an outlier takes, with a tail of power 3."""
_TAIL = 3.0
_DISTURBED = 0.02
"""Runs that a neighbour on the network slows down by up to a half."""
_MEMORY_LUCK = 0.01
"""Standard deviation of the logarithm of a run's peak."""
_CRASH_DEVICES = 1000.0
_CRASH_POWER = 0.25
_MOST_CRASHES = 0.1


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a config."""

    outcome: Literal["ok", "oom", "crash"]
    step_time_s: tuple[float, ...]
    """Of the measured steps; empty unless it ended ok."""
    bad: tuple[bool, ...]
    """Whether each step was skipped or its loss spiked."""
    memory_bytes: float
    """Peak, or what was asked for when memory ran out."""
    wall_s: float


def draw_run(
    truth: Truth, machine: Machine, draw: Random, *, warmup_steps: int, measure_steps: int
) -> Run:
    """Return a run; equal states of `draw` give equal runs."""
    memory = truth.memory_bytes * math.exp(_MEMORY_LUCK * draw.gauss(0.0, 1.0))
    if memory > truth.usable_bytes:
        return Run(
            outcome="oom", step_time_s=(), bad=(), memory_bytes=memory,
            wall_s=truth.start_s + truth.step_time_s,
        )  # fmt: skip
    pace = truth.step_time_s * math.exp(machine.run_noise * draw.gauss(0.0, 1.0))
    if draw.random() < _DISTURBED:
        pace *= draw.uniform(1.1, 1.5)
    steps = warmup_steps + measure_steps
    share = machine.crash_share * (machine.num_devices / _CRASH_DEVICES) ** _CRASH_POWER
    if draw.random() < min(share, _MOST_CRASHES):
        return Run(
            outcome="crash", step_time_s=(), bad=(), memory_bytes=memory,
            wall_s=truth.start_s + draw.random() * steps * pace,
        )  # fmt: skip
    times = tuple(
        pace * _outlier(draw, machine) * math.exp(truth.jitter * draw.gauss(0.0, 1.0))
        for _ in range(measure_steps)
    )
    bad = tuple(draw.random() < truth.bad_share for _ in range(measure_steps))
    return Run(
        outcome="ok", step_time_s=times, bad=bad, memory_bytes=memory,
        wall_s=truth.start_s + warmup_steps * pace + sum(times),
    )  # fmt: skip


def _outlier(draw: Random, machine: Machine) -> float:
    if draw.random() >= machine.outlier_share:
        return 1.0
    # A Pareto variable of power 3 has mean 1.5.
    return 1.0 + (OUTLIER_LENGTH - 1.0) * draw.paretovariate(_TAIL) * (_TAIL - 1.0) / _TAIL
