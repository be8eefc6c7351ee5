"""How well devices are used, and how steadily: the definitions that every report shares."""

from __future__ import annotations

__all__ = ["flops_utilization", "steadiness"]


def flops_utilization(flops_per_s: float, peak_flops: float, num_devices: int = 1) -> float:
    """Return FLOPs per second over what all devices could do.

    With model FLOPs it is MFU (PaLM, arXiv 2204.02311, appendix B); with those of recomputation
    added, HFU (Korthikanti et al., arXiv 2205.05198). Above 1 a figure that went in is wrong.

    Args:
        flops_per_s: Of the whole job.
        peak_flops: Of one device, FLOP/s.
        num_devices: Idle ones included.
    """
    return flops_per_s / (peak_flops * num_devices)


def steadiness(*, bad_share: float, median_s: float, mean_s: float) -> float:
    """Return stability, 0..1: the share of good steps, less what slow ones cost.

    Args:
        bad_share: Share of steps that were non-finite, skipped or loss-spiking.
        median_s: Median step time.
        mean_s: Mean step time.
    """
    return (1.0 - bad_share) * min(1.0, median_s / mean_s)
