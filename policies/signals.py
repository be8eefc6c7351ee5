"""What was measured at one optimizer step.

`None` always means "not measured"; NaN and infinity are measured values. Units stand in the names:
`_s` seconds, `_bytes` bytes, `_c` degrees Celsius, `_w` watts. Ratios are 0..1.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

__all__ = ["SIGNAL_NAMES", "Observation", "comparable"]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The signals of one attempted optimizer step; the fields are the columns of `signals.csv`."""

    step: int
    """Optimizer steps attempted so far, from 1; skipped updates count."""
    wall_time_s: float | None = None
    """Seconds since the run started, at the end of this step."""
    phase: str | None = None
    """What the interval was spent on besides training: train for nothing else, profile for an open
    profiler, compile, eval or save. Times are comparable in train alone."""
    run: int | None = None
    """Segment of the run: 0 at first, one more after each resume."""
    loss: float | None = None
    """Mean loss over the micro-batches and data-parallel ranks, unscaled."""
    eval_loss: float | None = None
    """Validation loss, where it was computed at this step."""
    grad_norm: float | None = None
    """Global L2 norm over all ranks, unscaled, before clipping."""
    overflow: float | None = None
    """1 where a gradient or the loss was not finite; a log may give a rate between 0 and 1."""
    update_skipped: float | None = None
    """1 where the optimizer did not run, for overflow or for the skip threshold."""
    loss_scale: float | None = None
    """The scale that was used in this step."""
    learning_rate: float | None = None
    """The rate that acted in this step, scale included; the first group's if there are several."""
    learning_rate_scale: float | None = None
    """The factor over the schedule that acted in this step."""
    clip_norm: float | None = None
    """Threshold of clipping by global norm that acted; infinity where clipping is off."""
    skip_threshold: float | None = None
    """Gradient norm above which this step would have skipped its update; infinity where off."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks."""
    micro_batch_size: int | None = None
    """Samples per rank and micro-batch."""
    num_microbatches: int | None = None
    """Micro-batches per rank that were accumulated into this step."""
    compression_ratio: float | None = None
    """Share of gradient entries that were exchanged; 1 without top-k compression."""
    tokens: int | None = None
    """Tokens of this step over all ranks."""
    step_time_s: float | None = None
    """Seconds of the whole optimizer step, data wait included."""
    data_time_s: float | None = None
    """Seconds of it spent waiting for data."""
    tokens_per_s: float | None = None
    """Tokens over all ranks per second of this step."""
    mfu: float | None = None
    """Model FLOPs utilization of this step."""
    device_utilization: float | None = None
    """Share of time in which the device was busy (NVML: any kernel ran), newest sample."""
    device_memory_used_bytes: int | None = None
    """Memory in use on the device, by anyone; worst rank."""
    device_memory_total_bytes: int | None = None
    """Memory of the device."""
    memory_allocated_bytes: int | None = None
    """What the framework's own allocator holds; the better figure where it exists."""
    device_temperature_c: float | None = None
    """Device temperature."""
    device_power_w: float | None = None
    """Device power draw."""
    update_norm: float | None = None
    """Global L2 norm of the weights' change in this step; sampled."""
    straggler_rank: int | None = None
    """The rank that computed longest in this step, where several ranks told their times."""
    straggler_ratio: float | None = None
    """Its own time over that of the median rank."""


SIGNAL_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Observation))
"""Columns of `signals.csv` in the order in which they are written."""


def comparable(observation: Observation) -> Observation:
    """Return the observation without what is not comparable with that of other steps.

    The time of an interval that held a compilation, an evaluation or a save says nothing about a
    step, and neither do the rates made of it. What the step itself reports holds in any phase: the
    loss of a run's first step, which compiles, is the one that all later ones are judged by.
    """
    if observation.phase in (None, "train"):
        return observation
    return replace(
        observation,
        step_time_s=None,
        data_time_s=None,
        tokens_per_s=None,
        mfu=None,
        device_utilization=None,
        straggler_rank=None,
        straggler_ratio=None,
    )
