"""Thresholds that all detectors share; every default says where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from mindtune.policies.settings import bounded

__all__ = ["DetectorThresholds"]


@dataclass(frozen=True, kw_only=True)
class DetectorThresholds:
    """When the detectors report; given as the thresholds of the name `detectors`."""

    window: int = bounded(128, 16, 1024)
    """Samples of a signal's baseline (as OLMo-core's spike rule)."""
    arm_after: int = bounded(32, 8, 512)
    """Samples after which `score` holds; medians are safe earlier than the 64 samples that
    OLMo-core's mean and deviation need."""
    early_after: int = bounded(8, 4, 512)
    """Samples after which gross outliers are flagged already, by `early_score`."""
    score: float = bounded(6.0, 2.0, 100.0)
    """Robust deviations above the median that make a spike (OLMo-core: 6 sigma)."""
    early_score: float = bounded(20.0, 2.0, 1000.0)
    """The same before `arm_after`: the norm's fall in a warm-up never flags, a tenfold does."""
    rebase_after: int = bounded(32, 8, 512)
    """Flags in a row of low dispersion after which the level is declared to have shifted."""
    rate_window: int = bounded(48, 8, 52)
    """Samples over which flags are counted; 52 bits survive any JSON reader."""
    storm: int = bounded(5, 2, 100)
    """Overflows in a row that make a storm: 2 is the hysteresis of Megatron and DeepSpeed, and a
    scale that is searched from above needs 1 - 3 in mid-run."""
    storm_rate: int = bounded(12, 2, 52)
    """Overflows within `rate_window` that make a storm: 25 %; healthy probing of DeepSpeed-Chat
    is below 2 %."""
    search_overflows: int = bounded(40, 1, 200)
    """Overflows that a start-up search may take: 2^32 down to 2^-5 needs 37."""
    soft_floor: float = bounded(1.0, 2.0**-30, 2.0**16)
    """Loss scale at which a falling scale is reported (Megatron's and MindSpore's floor)."""
    runaway: float = bounded(2.0**24, 1.0, 2.0**120)
    """Loss scale above which growth is reported (MindSpore's usual start; apex' cap)."""
    frozen: int = bounded(8, 3, 1000)
    """Exactly equal non-zero losses in a row that count as frozen."""
    data_share: float = bounded(0.2, 0.01, 1.0)
    """Share of the step spent waiting for data that is a finding."""
    starved_share: float = bounded(0.5, 0.01, 1.0)
    """Share at which the pipeline, not the device, sets the pace."""
    low_utilization: float = bounded(0.55, 0.01, 1.0)
    """Median device utilization below which the device is under-fed: our reference workload reads
    0.49 - 0.53 on 2 cores with one sample per step, 0.60 - 0.86 with sensible batches."""
    sustained: int = bounded(32, 4, 512)
    """Steps over which utilization and data share are taken."""
    memory_share: float = bounded(0.85, 0.1, 1.0)
    """Share of the device memory above which memory is under pressure."""
    step_time_score: float = bounded(10.0, 2.0, 1000.0)
    """Robust deviations above the median that make a step-time spike; wall clocks are noisier
    than losses."""
    clip_share: float = bounded(0.95, 0.1, 1.0)
    """Share of clipped steps in `clip_window` above which clipping acts as a hidden learning
    rate."""
    clip_window: int = bounded(52, 8, 52)
    """Steps over which clipped ones are counted."""
    clip_ratio: float = bounded(4.0, 1.0, 1000.0)
    """Median norm over the clip threshold that a saturated clip must exceed as well."""
    cold_steps: int = bounded(20, 4, 1000)
    """Losses in which the cold start is judged most sharply."""
    cold_end: int = bounded(64, 8, 10_000)
    """Losses after which the cold start is over."""
    cold_rise: float = bounded(1.2, 1.01, 100.0)
    """Rise of the median of 3 losses over the lowest one that an explosion makes at least: our
    reference run rises at most 1.07 when healthy, 1.24 - 1.29 at 30 times its learning rate."""
    climb: float = bounded(1.03, 1.0, 100.0)
    """Rise over the first sample of a group that makes a loss that still climbs."""
    climb_steps: float = bounded(3.0, 1.0, 100.0)
    """Typical steps from loss to loss that an unbroken climb must make."""
