"""How fast a run is, and how much of what its devices could do that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mindtune.controller.contract import RunConditions
from mindtune.controller.contract.run_metrics import Throughput
from mindtune.controller.metrics.bootstrap import mean_interval, quantile_interval
from mindtune.controller.metrics.collect import Collected
from mindtune.controller.metrics.peaks import PRECISIONS, look_up_peak
from mindtune.search.efficiency import flops_utilization
from mindtune.search.model_shape import ModelShape

__all__ = ["Figures", "throughput"]


@dataclass
class Figures:
    """What stands beside the figures while they are taken."""

    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def interval(self, name: str, found: tuple[float, float] | None) -> None:
        """Keep the interval of a metric, where there is one."""
        if found is not None:
            self.intervals[name] = found


def throughput(
    found: Collected, known: RunConditions, figures: Figures, *, is_log: bool
) -> Throughput:
    """Return the speed of a run.

    Args:
        found: What its steps say.
        known: What it was made under.
        figures: Takes intervals, and why something is not known.
        is_log: Whether steps may be missing, so that shares of the wall time cannot be told.
    """
    times = np.asarray(found.step_times)
    if not len(times):
        figures.reasons["step_time_s"] = (
            "no step that only trained has a time"
            if found.excluded
            else "the records hold no step time"
        )
    rate = _rate("tokens_per_s", _token_rates(found, known), figures)
    utilization = _utilizations(rate, known, figures)
    share = None
    # Of a table that leaves steps out nobody knows what the time between two of them went into.
    if not is_log and found.covered <= found.recorded and found.wall_s > 0 and len(times):
        share = min(1.0, found.trained_s / found.wall_s)
    if len(times):
        figures.interval("step_time_s", quantile_interval(times, 0.5))
        figures.interval("step_time_mean_s", mean_interval(times))
        figures.interval("step_time_p95_s", quantile_interval(times, 0.95))
    recorded = _rate("mfu", found.mfus, figures) if utilization["mfu"] is None else None
    if recorded is not None:
        utilization["mfu"] = recorded
        figures.reasons["mfu"] = _of_peak("as the run has recorded it", known)
    return Throughput(
        step_time_s=float(np.median(times)) if len(times) else None,
        step_time_mean_s=float(times.mean()) if len(times) else None,
        step_time_p95_s=float(np.percentile(times, 95)) if len(times) else None,
        tokens_per_s=rate,
        samples_per_s=_rate("samples_per_s", found.sample_rates, figures),
        training_share=share,
        **utilization,
    )


def _token_rates(found: Collected, known: RunConditions) -> Sequence[float]:
    if found.token_rates or known.model is None:
        return found.token_rates
    return [rate * known.model.seq_length for rate in found.sample_rates]


def _rate(name: str, values: Sequence[float], figures: Figures) -> float | None:
    if not len(values):
        return None
    figures.interval(name, quantile_interval(values, 0.5))
    return float(np.median(np.asarray(values)))


def _utilizations(
    rate: float | None, known: RunConditions, figures: Figures
) -> dict[str, float | None]:
    """Return MFU by both counts, and HFU; None with a reason where one cannot be told."""
    empty: dict[str, float | None] = dict.fromkeys(("mfu", "mfu_6n", "hfu"))
    peak, source = _peak(known)
    missing = [
        what
        for what, value in (
            ("the model's shape", known.model),
            ("tokens per second", rate),
            ("the number of devices", known.num_devices),
            (f"the peak of a device ({source})", peak),
        )
        if value is None
    ]
    if missing:
        figures.reasons |= dict.fromkeys(empty, f"needs {', '.join(missing)}")
        return empty
    assert known.model is not None  # noqa: S101 - said above
    assert rate is not None and peak is not None and known.num_devices is not None  # noqa: S101, PT018
    shape = ModelShape(**known.model.model_dump())
    flops = {"mfu": shape.model_flops, "mfu_6n": shape.rule_of_six_flops}
    if known.recompute is None:
        figures.reasons["hfu"] = "it is not known what is recomputed"
    else:
        flops["hfu"] = shape.model_flops + shape.recompute_flops(known.recompute)
    told = {}
    for name, per_token in flops.items():
        told[name] = flops_utilization(rate * per_token, peak, known.num_devices)
        if "tokens_per_s" in figures.intervals:
            low, high = figures.intervals["tokens_per_s"]
            scale = told[name] / rate if rate else 0.0
            figures.intervals[name] = (low * scale, high * scale)
        figures.reasons[name] = f"of {peak / 1e12:.6g} TFLOP/s per device ({source})"
    return {**empty, **told}


def _peak(known: RunConditions) -> tuple[float | None, str]:
    """Return the peak of one device, and where it is from or why there is none."""
    if known.peak_flops is not None:
        return known.peak_flops, known.peak_source or "given without a source"
    if known.hardware is None or known.precision not in PRECISIONS:
        told = known.peak_source or "neither a figure, nor device and precision, are recorded"
        return None, told
    found = look_up_peak(known.hardware, known.precision)
    return None if found.peak is None else found.peak.flops, found.reason


def _of_peak(text: str, known: RunConditions) -> str:
    peak, source = _peak(known)
    return text if peak is None else f"{text}, of {peak / 1e12:.6g} TFLOP/s per device ({source})"
