"""What a run needs: memory, the wait for data, the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindtune.controller.contract import ProfileRecord
from mindtune.controller.contract.run_metrics import ResourceUse
from mindtune.controller.metrics.bootstrap import Array, mean_interval
from mindtune.controller.metrics.collect import Collected
from mindtune.controller.metrics.run_source import RunSource
from mindtune.controller.metrics.throughput import Figures

__all__ = ["profile_mean", "resource_use"]


def resource_use(found: Collected, source: RunSource, figures: Figures) -> ResourceUse:
    """Return the resources of a run.

    Args:
        found: What its steps say.
        source: What else it left.
        figures: Takes intervals, and why something is not known.
    """
    peak = _peak_memory(found, source, figures)
    device = found.device_bytes
    figures.interval("device_utilization", mean_interval(found.utilizations))
    profiled = {
        name: profile_mean(source.profiles, name, figures)
        for name in ("compute_share", "host_share")
    }
    return ResourceUse(
        peak_memory_bytes=peak,
        device_memory_bytes=device,
        memory_share=peak / device if peak is not None and device else None,
        memory_fragmentation=_fragmentation(found, source, figures),
        data_share=_data_share(found, figures),
        **profiled,
        device_utilization=_mean(found.utilizations),
        device_temperature_c=found.temperature_c,
        device_power_w=_mean(found.powers),
    )


def profile_mean(profiles: Sequence[ProfileRecord], name: str, figures: Figures) -> float | None:
    """Return the mean of a share over all profiled steps; None, and why, where none tells it."""
    told = [
        (value, profile.steps)
        for profile in profiles
        if (value := getattr(profile, name)) is not None
    ]
    if not told:
        figures.reasons[name] = "no profiler window tells"
        return None
    steps = sum(count for _, count in told)
    figures.reasons[name] = f"of {steps} profiled steps in {len(told)} windows"
    return float(sum(value * count for value, count in told) / steps)


def _peak_memory(found: Collected, source: RunSource, figures: Figures) -> int | None:
    """Return the peak of the worst rank: the framework's own figures first."""
    own = [value for value in (source.peak_memory_bytes, found.allocated_bytes) if value]
    if own:
        return max(own)
    if found.used_bytes is not None:
        figures.reasons["peak_memory_bytes"] = (
            "the most that was in use on the device, by anyone: the framework counts nothing here"
        )
    return found.used_bytes


def _fragmentation(found: Collected, source: RunSource, figures: Figures) -> float | None:
    reserved = source.reserved_bytes
    own = [value for value in (source.peak_memory_bytes, found.allocated_bytes) if value]
    if not reserved or not own:
        figures.reasons["memory_fragmentation"] = (
            "the framework's allocator tells what it has reserved on GPU and Ascend alone, in the "
            "result of a run that ended"
        )
        return None
    return max(0.0, 1.0 - max(own) / reserved)


def _data_share(found: Collected, figures: Figures) -> float | None:
    """Return the share of all steps together, so that a long wait counts by its length."""
    waits, times = np.asarray(found.waits), np.asarray(found.waited_steps)
    if not len(waits) or times.sum() <= 0:
        return None
    share = float(waits.sum() / times.sum())
    shares = waits / times
    drawn = mean_interval(shares)
    if drawn is not None:
        # That of the mean of shares, moved to the share of the sums: equal for equal steps.
        moved = share - float(shares.mean())
        low, high = drawn
        figures.intervals["data_share"] = (max(0.0, low + moved), min(1.0, high + moved))
    return min(1.0, share)


def _mean(values: object) -> float | None:
    column: Array = np.asarray(values, dtype=np.float64)
    return float(column.mean()) if len(column) else None
