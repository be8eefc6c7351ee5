"""What cannot be judged of a log, for want of a signal."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from mindtune.controller.contract import Unjudged

__all__ = ["note", "unjudged"]

_NEEDED_FOR = {
    ("loss",): "spikes, divergence, plateaus and a frozen loss",
    ("grad_norm",): "gradient spikes and clipping",
    ("learning_rate",): "what the schedule has to do with it",
    ("overflow",): "overflows and storms of them",
    ("loss_scale",): "floor and runaway of the loss scale",
    ("update_skipped",): "how many steps taught nothing",
    ("step_time_s",): "slow and stalled steps",
    ("data_time_s",): "a starved data pipeline",
    ("device_utilization",): "an idle device",
    ("device_memory_used_bytes", "memory_allocated_bytes"): "memory pressure",
    ("straggler_ratio",): "a slow rank",
    ("mfu",): "how much of the devices is used",
}


def unjudged(signals: AbstractSet[str]) -> list[Unjudged]:
    """Return what the signals of a log leave open."""
    return [
        Unjudged(signals=list(names), judgement=purpose)
        for names, purpose in _NEEDED_FOR.items()
        if not signals & set(names)
    ]


def note(entries: list[Unjudged]) -> list[str]:
    """Return the same as one sentence, or nothing where everything can be judged."""
    missing = [f"{entry.judgement} (no {' or '.join(entry.signals)})" for entry in entries]
    if not missing:
        return []
    return [f"this log does not tell, so nothing can be said of: {'; '.join(missing)}."]
