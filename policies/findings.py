"""What detectors report: kinds, severities and the finding itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Evidence", "Finding", "FindingKind", "Severity"]

Evidence = Mapping[str, float | int | str | None]
"""Named facts behind a finding or decision: value, baseline, threshold, window."""


class Severity(str, Enum):
    """How bad a finding is; a verdict over a run is `faulty` iff one finding is critical."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class FindingKind(str, Enum):
    """Closed list of what can be found; the values are part of the file formats."""

    NON_FINITE_LOSS = "non_finite_loss"
    NON_FINITE_GRAD = "non_finite_grad"
    LOSS_SPIKE = "loss_spike"
    GRAD_NORM_SPIKE = "grad_norm_spike"
    GRAD_NORM_VANISHING = "grad_norm_vanishing"
    DIVERGENCE = "divergence"
    PLATEAU = "plateau"
    FROZEN_LOSS = "frozen_loss"
    OVERFLOW = "overflow"
    OVERFLOW_STORM = "overflow_storm"
    OVERFLOW_WITHOUT_EFFECT = "overflow_without_effect"
    LOSS_SCALE_FLOOR = "loss_scale_floor"
    LOSS_SCALE_RUNAWAY = "loss_scale_runaway"
    LEVEL_SHIFT = "level_shift"
    PERIODIC_SPIKES = "periodic_spikes"
    DATA_STALL = "data_stall"
    LOW_UTILIZATION = "low_utilization"
    MEMORY_PRESSURE = "memory_pressure"
    STEP_TIME_SPIKE = "step_time_spike"
    STRAGGLER = "straggler"
    HANG = "hang"
    MFU_INVALID = "mfu_invalid"
    CLIP_SATURATION = "clip_saturation"
    KNOB_INEFFECTIVE = "knob_ineffective"
    HIDDEN_STEPS = "hidden_steps"
    NO_TRAINABLE_PARAMETERS = "no_trainable_parameters"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault or remarkable fact, seen at `step` and lasting to `last_step`."""

    step: int
    last_step: int
    kind: FindingKind
    severity: Severity
    message: str
    """One sentence with the numbers, for a reader who has not seen the run."""
    evidence: Evidence = field(default_factory=dict)

    def number(self, key: str) -> float:
        """Return a number of the evidence, or 0 if it is missing or no number."""
        value = self.evidence.get(key)
        return float(value) if isinstance(value, (int, float)) else 0.0
