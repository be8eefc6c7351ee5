"""A search on a simulated cluster, whose answer is known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from random import Random

from mindtune.experiments.cluster_simulator.luck import OUTLIER_LENGTH, Run, draw_run
from mindtune.experiments.cluster_simulator.machine import Machine
from mindtune.experiments.cluster_simulator.refusal import refusal
from mindtune.experiments.cluster_simulator.simulator import Simulator, Truth
from mindtune.experiments.search_quality.problem import SimulatedTrial
from mindtune.search.constraints import SpaceReport, check
from mindtune.search.facts import StudyFacts
from mindtune.search.knobs import Config
from mindtune.search.scoring import MeasuredTrial, score
from mindtune.search.space import Space

__all__ = ["SimulatedProblem", "expected_value"]

_REFUSED_S = 30.0
"""How long a program takes to refuse a config that cannot be laid out."""


@dataclass(frozen=True)
class SimulatedProblem:
    """One machine, model and space."""

    name: str
    machine: Machine
    space: Space
    warmup_steps: int = 3
    measure_steps: int = 12

    @cached_property
    def report(self) -> SpaceReport:
        """The space under the rules, with the uncalibrated cost model."""
        return check(self.space)

    @cached_property
    def simulator(self) -> Simulator:
        """What knows the truth."""
        return Simulator(self.machine, self.space.facts)

    def run(self, config: Config, *, seed: int) -> SimulatedTrial:
        """Return what a trial of a config comes to."""
        run = self.draw(config, seed=seed)
        if run is None:
            return SimulatedTrial("bad_config", wall_s=_REFUSED_S)
        if run.outcome != "ok":
            return SimulatedTrial(run.outcome, wall_s=run.wall_s)
        facts = self.space.facts
        measured = MeasuredTrial(
            step_time_s=run.step_time_s,
            bad_steps=sum(run.bad),
            samples_per_step=facts.training.global_batch_size,
        )
        return SimulatedTrial(
            "ok",
            value=score(measured, facts).value,
            step_time_s=measured.median_s,
            memory_bytes=run.memory_bytes,
            wall_s=run.wall_s,
            step_times_s=run.step_time_s,
            is_bad=run.bad,
        )

    def draw(self, config: Config, *, seed: int, measure_steps: int | None = None) -> Run | None:
        """Return a run step by step; None: its program refuses the config."""
        truth = self.truth(config)
        if truth is None:
            return None
        return draw_run(
            truth,
            self.machine,
            Random(f"{self.name}:{seed}:{self.space.key(config)}"),
            warmup_steps=self.warmup_steps,
            measure_steps=measure_steps or self.measure_steps,
        )

    def true_value(self, config: Config) -> float | None:
        """Return the value without noise and mishaps; None: it cannot run."""
        truth = self.truth(config)
        if truth is None or not truth.fits:
            return None
        return expected_value(truth, self.machine, self.space.facts)

    def can_start(self, config: Config) -> bool:
        """Return whether its program starts a config at all, by the program's own arithmetic."""
        return refusal(self.space.complete(config), self.space.facts) is None

    def fails_for_memory(self, config: Config) -> bool:
        """Return whether a config that starts does not fit; nothing else stops one for certain."""
        truth = self.truth(config)
        return truth is not None and not truth.fits

    def truth(self, config: Config) -> Truth | None:
        """Return what a config of the space really costs; None: its program refuses it."""
        if not self.can_start(config):
            return None
        return self.simulator.truth(self.space.complete(config))


def expected_value(truth: Truth, machine: Machine, facts: StudyFacts) -> float | None:
    """Return MFU x stability with the mean of what jitter and outliers take."""
    found = score(MeasuredTrial(step_time_s=(truth.step_time_s,)), facts)
    if found.mfu is None or found.value is None:
        return None
    # Median over mean of a log-normal variable, and of rare outliers.
    lost = 1.0 + machine.outlier_share * (OUTLIER_LENGTH - 1.0)
    steady = (1.0 - truth.bad_share) * math.exp(-(truth.jitter**2) / 2.0) / lost
    return found.mfu * steady
