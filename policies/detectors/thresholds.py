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
    """Equal non-zero losses in a row that count as frozen; a coarse log needs twice as many."""
    hard_floor: float = bounded(2.0**-5, 2.0**-60, 2.0**16)
    """Loss scale below which no training is known to go on (metaseq PR 115, for its 66B run)."""
    data_share: float = bounded(0.2, 0.01, 1.0)
    """Share of the step spent waiting for data that is a finding."""
    starved_share: float = bounded(0.5, 0.01, 1.0)
    """Share at which the pipeline, not the device, sets the pace."""
    low_utilization: float = bounded(0.55, 0.01, 1.0)
    """Device utilization below which three quarters of the readings of an under-fed device lie:
    our reference workload reads 0.49 - 0.53 on 2 cores with one sample per step, 0.60 - 0.86 with
    sensible batches, and swings around 0.54 in float16 on a shared machine."""
    sustained: int = bounded(32, 4, 512)
    """Steps over which utilization and data share are taken."""
    memory_share: float = bounded(0.85, 0.1, 1.0)
    """Share of the device memory above which memory is under pressure."""
    memory_full: float = bounded(0.95, 0.1, 1.0)
    """Share above which memory is about to run out: fragments alone took 10.7 % over the peak in
    MindSpore's example of a dry run."""
    memory_horizon: int = bounded(1000, 1, 1_000_000)
    """Steps within which steady growth must reach the limit to be reported: below one save
    interval of most runs."""
    memory_soon: int = bounded(64, 1, 1_000_000)
    """Steps left at which such growth is critical: two windows in which an answer can show."""
    straggler_window: int = bounded(16, 4, 512)
    """Reports over which a straggler is sought: one slow step is none."""
    straggler_ratio: float = bounded(1 / 0.75, 1.01, 100.0)
    """Time of the slowest rank over the median rank's (NVRx: best over own below 0.75)."""
    straggler_critical: float = bounded(2.0, 1.01, 1000.0)
    """The same for a rank that is all but broken (DLRover: twice the median)."""
    stuck: int = bounded(128, 8, 100_000)
    """Equal utilizations in a row that mean a counter that stands still: NVML's whole percents
    repeat for some steps, not for a window."""
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
    vanishing: float = bounded(1e-3, 1e-12, 0.5)
    """Norm over its reference below which it vanishes: public norms fall 50-fold from the first
    step on (llm.c: 15 to 0.3), their medians of 32 less than 8-fold over a run."""
    vanishing_after: int = bounded(16, 2, 10_000)
    """Steps in a row of it."""
    level_rise: float = bounded(1.6, 1.1, 100.0)
    """Norm over its level before that may be another level: half of a batch twice as large (noise
    alone, a factor of 1.4) is none, a threefold norm in a run whose norms still halve is one."""
    norm_climb: float = bounded(2.0, 1.1, 1000.0)
    """Rise of the norm in 32 steps that is a climb."""
    untrained_after: int = bounded(16, 16, 10_000)
    """Norms of exactly 0 from the first step on that mean that nothing is trained."""
    plateau: int = bounded(256, 64, 576)
    """Losses over which a plateau is sought: its halves must differ by what 128 losses can tell
    (0.4 % at a scatter of 2.5 %)."""
    plateau_fall: float = bounded(0.002, 0.0, 1.0)
    """Fall from the older half to the newer one that is none (plateau rules of Keras and torch:
    1e-4 from one evaluation to the next)."""
    drift: float = bounded(0.15, 0.01, 10.0)
    """Rise of the loss over its level in 64 steps that is a drift: pre-training logs of public
    runs that are healthy rise by at most 6 % there, fine-tuning by more but within its range."""
    leap: float = bounded(1.5, 1.05, 100.0)
    """Loss over that of earlier records that is a leap: public runs that diverged between two
    records stand at 1.6 to 2.6, healthy ones at most at 1.34."""
    rate_jump: float = bounded(3.0, 1.5, 1000.0)
    """Learning rate over the highest earlier one that is a jump: a doubled batch may double it."""
    cold_steps: int = bounded(20, 4, 1000)
    """Losses in which the cold start is judged most sharply."""
    cold_end: int = bounded(64, 8, 10_000)
    """Losses after which the cold start is over."""
    cold_rise: float = bounded(1.2, 1.01, 100.0)
    """Rise of the median of 3 losses over the lowest one that an explosion makes at least: our
    reference run rises at most 1.07 when healthy, 1.24 - 1.29 at 30 times its learning rate."""
    climb: float = bounded(1.03, 1.0, 100.0)
    """Rise over the first sample of a group that makes a loss that still climbs."""
    climb_steps: float = bounded(8.0, 1.0, 100.0)
    """Typical distances from loss to loss that an unbroken climb must make: in 60000 simulated
    steps independent noise makes 3, noise correlated over 10 steps makes 8."""
