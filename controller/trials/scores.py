"""The values of a study's measurements, all of one kind."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Literal

from mindtune.controller.contract import StudyFile
from mindtune.controller.trials.measure import Launch
from mindtune.controller.trials.measured import final_loss
from mindtune.controller.trials.summary import Measurement
from mindtune.controller.units import format_size
from mindtune.search.facts import StudyFacts
from mindtune.search.halving import Bar
from mindtune.search.scoring import Exponents, MeasuredTrial, Score, score

__all__ = ["Scorer"]


@dataclass
class Scorer:
    """Gives every measurement its value; remembers what relative values are relative to."""

    study: StudyFile
    facts: StudyFacts
    """With the resolved peak."""
    reference: MeasuredTrial | None = None
    """The base config's measurement; the first that ended ok where the base's did not."""

    @property
    def objective(self) -> Literal["mfu", "relative"]:
        """Return what values are made of; one kind for the whole study."""
        if self.facts.model is not None and self.facts.cluster.peak_flops is not None:
            return "mfu"
        return "mfu" if self.reference is not None and self.reference.mfu else "relative"

    @property
    def exponents(self) -> Exponents:
        """Return the weights of the value's parts."""
        return Exponents(self.study.score.mfu, self.study.score.stability)

    def score(self, measured: MeasuredTrial) -> Score:
        """Return the value of a measurement; the first one becomes the reference."""
        if self.reference is None:
            self.reference = measured
        if self.objective == "relative":
            # A trial's own MFU is of no use where the reference has none.
            measured = replace(measured, mfu=None)
        found = score(measured, self.facts, exponents=self.exponents, baseline=self.reference)
        if found.kind != self.objective:
            problem = "the trial reports no MFU, but the base config's does"
            return replace(found, value=None, problem=problem)
        return found

    def memory_problem(self, launch: Launch) -> str:
        """Return why a measurement breaks the memory limit; empty: it does not."""
        limit, used = self.facts.memory_limit, launch.outcome.record.peak_memory_bytes
        if limit is None or used is None or used <= limit[0]:
            return ""
        return (
            f"peak memory {format_size(used)} is above the limit of {format_size(limit[0])} "
            f"({limit[1]})"
        )

    def measurement(self, launch: Launch) -> Measurement:
        """Return a launch with its value."""
        record, result = launch.outcome.record, launch.outcome.result
        scored = None if launch.measured is None else self.score(launch.measured)
        broken = self.memory_problem(launch) if record.outcome == "ok" else ""
        problem = broken or (scored.problem if scored is not None else "")
        return Measurement(
            repeat=launch.repeat,
            seed=launch.plan.seed,
            outcome="infeasible" if broken else record.outcome,
            message=problem or record.message,
            value=None if scored is None else scored.value,
            mfu=None if scored is None or scored.kind != "mfu" else scored.mfu,
            stability=None if scored is None else scored.stability,
            tokens_per_s=None
            if launch.measured is None
            else launch.measured.throughput("tokens_per_step"),
            step_time_s=None
            if launch.measured is None
            else statistics.median(launch.measured.step_time_s),
            peak_memory_bytes=record.peak_memory_bytes,
            memory_source=record.memory_source,
            final_loss=None if result is None else final_loss(result),
            eval_loss=None if result is None else result.eval_loss,
            wall_s=record.wall_s,
        )

    def bound(self, launch: Launch) -> float | None:
        """Return the value that a stopped trial could not have exceeded; None: not known."""
        return None if launch.possible is None else self.score(launch.possible).value

    def bar(self, best: Measurement, *, noise: float | None) -> Bar | None:
        """Return what a running trial is compared with.

        Args:
            best: the best trial so far.
            noise: from part to part of a launch; None: not known.
        """
        if best.step_time_s is None or best.stability is None:
            return None
        return Bar(
            step_time_s=best.step_time_s,
            stability=best.stability,
            mfu_exponent=self.study.score.mfu,
            stability_exponent=self.study.score.stability,
            noise=noise or 0.0,
        )
