"""From what a step reported and the host measured to one Observation.

On one rank, an observation holds what the host measured about the very step. On several ranks the
host's measurements travel with the next step's gradient reduction, so that all ranks see, and
decide by, the same numbers: there the times, rates and device columns of a row are those of the
step before, and so is its `phase`, which says what that time was spent on.

The slow rank. In synchronous training every rank's step takes as long as the slowest rank's: the
others wait in the reduction, inside their call of the step. A rank's own time is what precedes
that wait. Where gradients and update are two graphs (accumulation, a hand-written loop, sampled
steps) it is taken: from the end of the step before to the point where the rank's own gradients
are there. Where they are one graph, it ends where that graph is launched: a slow host is seen
(data wait, callbacks, Python's own work), a slow device is not, since each rank's graph ends with
the last one's. There the shortest run of the graph on any rank, that of the rank which came last
and so waited least, stands for the computation that each of them has. Ranks of one
tensor-parallel group wait for each other in every block: of them the slow group is told, not the
slow rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mindtune.controller.device.reading import EMPTY_READING, DeviceReading
from mindtune.controller.live.packed import NUM_HOST_SIGNALS, StepReport
from mindtune.policies.signals import Observation
from mindtune.search.efficiency import flops_utilization

__all__ = ["PHASES", "BatchFacts", "HostSignals", "StepSignals", "observe", "reduce_rows"]

PHASES: Final = ("train", "profile", "compile", "eval", "save")
"""Values of the column `phase`; over ranks the last one named here wins."""

_ROW: Final = (
    "step_time_s",
    "data_time_s",
    "wall_time_s",
    "phase",
    "device_utilization",
    "device_memory_used_bytes",
    "device_memory_total_bytes",
    "memory_allocated_bytes",
    "own_time_s",
    "host_time_s",
)


@dataclass(frozen=True, kw_only=True)
class StepSignals:
    """What a training step reported about itself; None: it does not say."""

    loss: float | None = None
    grad_norm: float | None = None
    overflow: float | None = None
    update_skipped: float | None = None
    loss_scale: float | None = None
    learning_rate: float | None = None
    learning_rate_scale: float | None = None
    clip_norm: float | None = None
    skip_threshold: float | None = None
    compression_ratio: float | None = None
    num_microbatches: int | None = None
    micro_batch_split: int = 1
    update_norm: float | None = None
    rank_rows: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def from_report(cls, report: StepReport) -> StepSignals:
        """Return the signals of our own training step."""
        return cls(
            loss=report.loss,
            grad_norm=report.grad_norm,
            overflow=float(report.overflow),
            update_skipped=float(report.update_skipped),
            loss_scale=report.loss_scale,
            learning_rate=report.learning_rate,
            learning_rate_scale=report.learning_rate_scale,
            clip_norm=report.clip_norm,
            skip_threshold=report.skip_threshold,
            compression_ratio=report.compression_ratio,
            num_microbatches=report.num_microbatches,
            micro_batch_split=report.micro_batch_split,
            rank_rows=report.rank_rows,
        )


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """How much data one optimizer step took."""

    micro_batch_size: int | None = None
    """Samples per rank and micro-batch."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks."""
    tokens: int | None = None
    """Over all ranks."""
    flops: float | None = None
    """Model FLOPs of the step, over all ranks; None without a model shape."""


@dataclass(frozen=True, kw_only=True)
class HostSignals:
    """What one rank's host measured, or what all ranks' hosts did, reduced."""

    step_time_s: float | None = None
    data_time_s: float | None = None
    wall_time_s: float | None = None
    phase: str | None = None
    reading: DeviceReading = EMPTY_READING
    memory_allocated_bytes: int | None = None
    own_time_s: float | None = None
    """Of the step, up to where this rank's gradients were there; None: it ran as one graph."""
    host_time_s: float | None = None
    """Of the step, before and between the graphs; see `StepTiming`."""
    straggler_rank: int | None = None
    """The rank whose own time was longest; of several ranks together only."""
    straggler_ratio: float | None = None
    """Its own time over that of the median rank, of two the other one."""

    def to_row(self) -> tuple[float, ...]:
        """Return the numbers that travel to the other ranks; NaN: not measured."""
        values = {
            "step_time_s": self.step_time_s,
            "data_time_s": self.data_time_s,
            "wall_time_s": self.wall_time_s,
            "phase": None if self.phase is None else PHASES.index(self.phase),
            "device_utilization": self.reading.device_utilization,
            "device_memory_used_bytes": self.reading.device_memory_used_bytes,
            "device_memory_total_bytes": self.reading.device_memory_total_bytes,
            "memory_allocated_bytes": self.memory_allocated_bytes,
            "own_time_s": self.own_time_s,
            "host_time_s": self.host_time_s,
        }
        numbers = [values[name] for name in _ROW]
        row = [math.nan if number is None else float(number) for number in numbers]
        return tuple(row + [math.nan] * (NUM_HOST_SIGNALS - len(row)))


def reduce_rows(rows: Sequence[Sequence[float]]) -> HostSignals:
    """Return what all ranks' hosts measured together.

    Times, allocated memory and phase are the largest of all ranks: ranks wait for the slowest.
    So is utilization: the busiest device bounds the step, and those that wait for it are not
    under-fed. Device memory is that of the rank whose share in use is largest.
    Temperature and power do not travel. Own times become the straggler, the slow rank.
    """
    columns = {name: [row[index] for row in rows] for index, name in enumerate(_ROW)}
    phase = _largest(columns["phase"])
    allocated = _largest(columns["memory_allocated_bytes"])
    used, total = _fullest(
        columns["device_memory_used_bytes"], columns["device_memory_total_bytes"]
    )
    straggler = _straggler(columns["own_time_s"], columns["host_time_s"], columns["step_time_s"])
    return HostSignals(
        step_time_s=_largest(columns["step_time_s"]),
        data_time_s=_largest(columns["data_time_s"]),
        wall_time_s=_largest(columns["wall_time_s"]),
        phase=None if phase is None else PHASES[round(phase)],
        reading=DeviceReading(
            device_utilization=_largest(columns["device_utilization"]),
            device_memory_used_bytes=used,
            device_memory_total_bytes=total,
        ),
        memory_allocated_bytes=None if allocated is None else round(allocated),
        straggler_rank=None if straggler is None else straggler[0],
        straggler_ratio=None if straggler is None else straggler[1],
    )


def observe(
    step: int,
    signals: StepSignals,
    *,
    host: HostSignals,
    batch: BatchFacts,
    timed_batch: BatchFacts,
    peak_flops: float | None,
) -> Observation:
    """Return the observation of one optimizer step.

    Args:
        step: Optimizer steps attempted so far.
        signals: What the step reported.
        host: What the host or hosts measured.
        batch: The data of this step.
        timed_batch: The data of the step whose time `host` holds; of the step before if several
            ranks agree on the times.
        peak_flops: Peak of all devices together, FLOP/s.
    """
    time_s = host.step_time_s
    per_s = 1 / time_s if time_s is not None and time_s > 0 else None
    tokens_per_s = None
    if per_s is not None and timed_batch.tokens is not None:
        tokens_per_s = timed_batch.tokens * per_s
    mfu = None
    if per_s is not None and timed_batch.flops is not None and peak_flops is not None:
        mfu = flops_utilization(timed_batch.flops * per_s, peak_flops)
    reading = host.reading
    return Observation(
        step=step,
        wall_time_s=host.wall_time_s,
        phase=host.phase,
        loss=signals.loss,
        grad_norm=signals.grad_norm,
        overflow=signals.overflow,
        update_skipped=signals.update_skipped,
        loss_scale=signals.loss_scale,
        learning_rate=signals.learning_rate,
        learning_rate_scale=signals.learning_rate_scale,
        clip_norm=signals.clip_norm,
        skip_threshold=signals.skip_threshold,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        num_microbatches=signals.num_microbatches,
        compression_ratio=signals.compression_ratio,
        tokens=batch.tokens,
        step_time_s=time_s,
        data_time_s=host.data_time_s,
        tokens_per_s=tokens_per_s,
        mfu=mfu,
        device_utilization=reading.device_utilization,
        device_memory_used_bytes=reading.device_memory_used_bytes,
        device_memory_total_bytes=reading.device_memory_total_bytes,
        memory_allocated_bytes=host.memory_allocated_bytes,
        device_temperature_c=reading.device_temperature_c,
        device_power_w=reading.device_power_w,
        update_norm=signals.update_norm,
        straggler_rank=host.straggler_rank,
        straggler_ratio=host.straggler_ratio,
    )


def _largest(values: Sequence[float]) -> float | None:
    return max((value for value in values if not math.isnan(value)), default=None)


def _straggler(
    own: Sequence[float], host: Sequence[float], step: Sequence[float]
) -> tuple[int, float] | None:
    """The rank that came last to the reduction, and its own time over the median rank's.

    None for a single rank, or where a rank did not tell.
    """
    times = list(own)
    if any(map(math.isnan, times)):
        computed = min(whole - outside for whole, outside in zip(step, host, strict=True))
        times = [outside + computed for outside in host]
    if len(times) < 2 or any(map(math.isnan, times)):
        return None
    typical = statistics.median_low(times)
    slowest = max(times)
    return (times.index(slowest), slowest / typical) if typical > 0 else None


def _fullest(used: Sequence[float], total: Sequence[float]) -> tuple[int | None, int | None]:
    """Memory in use and in all of the rank with the largest share in use."""
    pairs = [
        (in_use, in_all)
        for in_use, in_all in zip(used, total, strict=True)
        if not math.isnan(in_use)
    ]
    if not pairs:
        return None, None
    in_use, in_all = max(pairs, key=lambda pair: pair[0] / pair[1] if pair[1] > 0 else pair[0])
    return round(in_use), None if math.isnan(in_all) else round(in_all)
