"""What a config will cost: memory and step time, predicted by formula, corrected by trials.

Three kinds of knowledge never mix: `Prediction` (a formula), `Measurement` (a trial) and
`history.Inference` (drawn from another config's failure). Unknown is None, never 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mindtune.search.facts import StudyFacts
from mindtune.search.knobs import Config, KnobValue
from mindtune.search.layout import DEGREES
from mindtune.search.memory_model import MemoryParts, memory_parts
from mindtune.search.time_model import TimeParts, time_parts

__all__ = ["COST_KNOBS", "CostModel", "Measurement", "Prediction", "calibrate"]

COST_KNOBS = (
    *DEGREES, "expert_parallel", "pp_interleave_num", "offset", "use_seq_parallel",
    "micro_batch_size",
    "optimizer_sharding", "precision", "recompute", "optimizer_offload", "gradient_compression",
    "comm_overlap",
)  # fmt: skip
"""Every knob that the formulas read."""


@dataclass(frozen=True)
class Prediction:
    """What the formulas expect of a config; None: unknown."""

    memory_bytes: float | None = None
    step_time_s: float | None = None
    mfu: float | None = None


@dataclass(frozen=True)
class Measurement:
    """What a trial of a complete config showed; None: not measured."""

    config: Config
    memory_bytes: float | None = None
    step_time_s: float | None = None


@dataclass(frozen=True)
class CostModel:
    """The formulas with this study's corrections."""

    facts: StudyFacts
    memory_scale: float = 1.0
    memory_offset: float = 0.0
    """Bytes that every rank needs besides: runtime, buffers, fragmentation."""
    time_scale: float = 1.0
    calibrated_by: int = 0
    """Measurements behind the corrections; 0: formulas alone."""
    _known: dict[tuple[KnobValue | None, ...], tuple[MemoryParts | None, TimeParts | None]] = (
        field(default_factory=dict, init=False, compare=False, repr=False)
    )
    """Parts by the knobs that decide them: most configs of a large space share theirs."""

    @property
    def memory_limit(self) -> float | None:
        """Bytes that a config may use; None: unknown, then memory rejects nothing."""
        memory = self.facts.cluster.device_memory
        return None if memory is None else memory * (self.facts.limits.memory_utilization or 1.0)

    def memory_parts(self, config: Config) -> MemoryParts | None:
        """Return the formula's parts of a complete config."""
        return self._parts(config)[0]

    def time_parts(self, config: Config) -> TimeParts | None:
        """Return the formula's parts of a complete config."""
        return self._parts(config)[1]

    def _parts(self, config: Config) -> tuple[MemoryParts | None, TimeParts | None]:
        key = tuple(map(config.get, COST_KNOBS))
        known = self._known.get(key)
        if known is None:
            known = (memory_parts(config, self.facts), time_parts(config, self.facts))
            self._known[key] = known
        return known

    def memory_bytes(self, config: Config) -> float | None:
        """Return the predicted memory of the worst rank.

        Offset and scale are never negative, so it cannot fall below the scaled static part.
        """
        parts = self.memory_parts(config)
        return None if parts is None else self.memory_offset + self.memory_scale * parts.total

    def step_time_s(self, config: Config) -> float | None:
        """Return the predicted time of a step."""
        parts = self.time_parts(config)
        total = None if parts is None else parts.total
        return None if total is None else self.time_scale * total

    def relative_cost(self, config: Config) -> float | None:
        """Return a number that orders configs by expected time, known even without a peak.

        It is the step time where peak and bandwidths of the cluster are known, and the FLOPs on a
        rank's critical path otherwise; compare it only between configs of one study.
        """
        parts = self.time_parts(config)
        if parts is None:
            return None
        return parts.total if self.facts.cluster.is_timed else parts.work

    def predict(self, config: Config) -> Prediction:
        """Return what is expected of a complete config."""
        step_time = self.step_time_s(config)
        return Prediction(self.memory_bytes(config), step_time, self.mfu(step_time))

    def mfu(self, step_time_s: float | None) -> float | None:
        """Return the model FLOP utilisation of all devices at a step time.

        None: unknown peak, model or time. Idle devices count.
        """
        model, cluster = self.facts.model, self.facts.cluster
        if model is None or cluster.peak_flops is None or step_time_s is None:
            return None
        tokens = self.facts.training.global_batch_size * model.seq_length
        return model.step_flops(tokens) / (step_time_s * cluster.peak_flops * cluster.num_devices)


def calibrate(model: CostModel, measurements: Sequence[Measurement]) -> CostModel:
    """Return the model whose corrections fit the measurements best.

    Time: one factor, the median ratio. Memory: the median ratio, or, from three different
    configs on, the line measured = offset + scale * predicted (least squares, scale > 0); the
    allocator's peak is linear in the micro-batch size. What a trial did not measure is left out:
    a crashed one is no evidence of 0 bytes.
    """
    plain = CostModel(model.facts)
    times, memories = [], []
    for seen in measurements:
        step_time = plain.step_time_s(seen.config)
        if step_time and seen.step_time_s and math.isfinite(seen.step_time_s):
            times.append(seen.step_time_s / step_time)
        parts = plain.memory_parts(seen.config)
        if parts is not None and seen.memory_bytes and math.isfinite(seen.memory_bytes):
            memories.append((parts.total, seen.memory_bytes))
    offset, scale = _line(memories)
    return replace(
        plain,
        time_scale=statistics.median(times) if times else 1.0,
        memory_scale=scale,
        memory_offset=offset,
        calibrated_by=max(len(times), len(memories)),
    )


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return offset and scale of measured over predicted bytes."""
    if not points:
        return 0.0, 1.0
    ratio = statistics.median(measured / predicted for predicted, measured in points)
    if len({predicted for predicted, _ in points}) < 3:
        return 0.0, ratio
    mean_x = statistics.fmean(predicted for predicted, _ in points)
    mean_y = statistics.fmean(measured for _, measured in points)
    spread = sum((predicted - mean_x) ** 2 for predicted, _ in points)
    scale = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    offset = mean_y - scale * mean_x
    # A falling line, or one that starts below zero, is noise: keep the ratio.
    return (offset, scale) if scale > 0 and offset >= 0 else (0.0, ratio)
