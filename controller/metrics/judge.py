"""Which metrics of a run are beyond what is healthy."""

from __future__ import annotations

from mindtune.controller.contract import FindingRecord
from mindtune.controller.contract.run_metrics import ResourceUse, Throughput
from mindtune.controller.metrics.collect import Collected
from mindtune.policies.detectors import DetectorThresholds
from mindtune.policies.findings import FindingKind, Severity

__all__ = ["LEAST_MFU", "impossible", "judge"]

LEAST_MFU = 0.3
"""Below it something is to be gained: public trainings of dense transformers report 0.3 to 0.6
(PaLM 0.46, Megatron-LM up to 0.56, Llama 3 0.38 to 0.43)."""
_LIMITS = DetectorThresholds()
_OF_PEAK = ("mfu", "mfu_6n", "hfu")


def impossible(metric: str, value: float) -> bool:
    """Tell whether a metric is wrong by itself: more than the devices can do."""
    return metric in _OF_PEAK and value > 1


def judge(found: Collected, speed: Throughput, resources: ResourceUse) -> list[FindingRecord]:
    """Return the findings over a whole run.

    Args:
        found: What its steps say.
        speed: Its throughput.
        resources: Its resources.
    """
    findings = []
    for name in _OF_PEAK:
        value = getattr(speed, name)
        if value is not None and impossible(name, value):
            findings.append(
                _finding(
                    found, FindingKind.MFU_INVALID, name, value, 1.0,
                    f"{name} is {value:.3g}, above 1: the peak, the model's shape, the number of "
                    "devices or the step time is wrong, and so is every figure made of them.",
                )
            )  # fmt: skip
    mfu = speed.mfu
    if mfu is not None and mfu < LEAST_MFU:
        findings.append(
            _finding(
                found, FindingKind.LOW_UTILIZATION, "mfu", mfu, LEAST_MFU,
                f"MFU is {mfu:.1%}, below {LEAST_MFU:.0%}: look at the wait for data, the size of "
                "the micro-batch, recomputation, and what the ranks exchange.",
            )
        )  # fmt: skip
    share = resources.data_share
    if share is not None and share > _LIMITS.data_share:
        findings.append(
            _finding(
                found, FindingKind.DATA_STALL, "data_share", share,
                _LIMITS.data_share,
                f"{share:.0%} of the step time was spent waiting for data (limit "
                f"{_LIMITS.data_share:.0%}).",
            )
        )  # fmt: skip
    full = resources.memory_share
    if full is not None and full > _LIMITS.memory_share:
        findings.append(
            _finding(
                found, FindingKind.MEMORY_PRESSURE, "memory_share", full,
                _LIMITS.memory_share,
                f"{full:.0%} of the device's memory was in use at the peak (limit "
                f"{_LIMITS.memory_share:.0%}).",
            )
        )  # fmt: skip
    return findings


def _finding(
    found: Collected,
    kind: FindingKind,
    name: str,
    value: float,
    threshold: float,
    message: str,
) -> FindingRecord:
    return FindingRecord(
        step=found.first_step,
        last_step=found.last_step,
        kind=kind.value,
        severity=Severity.WARNING.value,
        message=message,
        evidence={"metric": name, name: value, "threshold": threshold},
    )
