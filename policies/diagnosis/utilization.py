"""Why little of the devices is used: they wait, have too little to do, or are misjudged."""

from __future__ import annotations

from mindtune.policies.diagnosis.case import Case
from mindtune.policies.diagnosis.cause import Cause
from mindtune.policies.diagnosis.model import DECISIVE, STRONG, WEAK, Clues
from mindtune.policies.diagnosis.pace import COMMUNICATION, DATA_STARVED, STRAGGLER
from mindtune.policies.findings import FindingKind

__all__ = ["LOW_MFU"]

_BUSY, _IDLE = 0.9, 0.55
_HOST = 0.3
"""Share of a step without any kernel from which the host is a cause."""


def _too_small(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.LOW_UTILIZATION)
    busy = case.course("device_utilization")
    if found is not None:
        clues.speaks(found.message, STRONG)
    elif busy is not None and busy.median < _IDLE:
        clues.speaks(f"the device is busy {busy.median:.0%} of the time", STRONG)
    elif busy is not None:
        clues.denies(f"the device is busy {busy.median:.0%} of the time", STRONG)
    else:
        clues.lacks("device_utilization: a low one without data wait means too little work")
    host = case.context.host_share
    if host is not None and host >= _HOST:
        clues.speaks(
            f"{host:.0%} of the time of {case.context.profiled} the device waited for the host",
            STRONG,
        )
    used, total = case.course("device_memory_used_bytes"), case.course("device_memory_total_bytes")
    if used is not None and total is not None and used.high < 0.5 * total.high:
        clues.speaks(
            f"at most {used.high / total.high:.0%} of the memory is in use: there is room"
        )


def _ranks_idle(case: Case, clues: Clues) -> None:
    if case.context.idle_ranks is not None:
        clues.speaks(case.context.idle_ranks, DECISIVE)
        return
    busy = case.course("device_utilization")
    if busy is None or case.found(FindingKind.LOW_UTILIZATION) is None:
        return
    for parts in (2, 4, 8):
        if abs(busy.median - 1.0 / parts) < 0.04 and busy.scatter < 0.05:
            clues.speaks(
                f"the mean utilization stands at {busy.median:.0%}, as if one of {parts} devices "
                "worked",
                WEAK,
            )
            clues.lacks("the utilization of each device")
            return


def _wrong_peak(case: Case, clues: Clues) -> None:
    wrong = next((f for f in case.others if f.evidence.get("signal") == "mfu"), None)
    busy = case.course("device_utilization")
    if wrong is not None:
        clues.speaks(wrong.message, STRONG)
    clues.lacks("the model's shape and the peak behind the figure (mindtune doctor --measure)")
    if busy is not None and busy.median >= _BUSY:
        clues.speaks(f"the device is busy {busy.median:.0%} of the time")


def _recompute(case: Case, clues: Clues) -> None:
    used, total = case.course("device_memory_used_bytes"), case.course("device_memory_total_bytes")
    clues.lacks("the share of recomputation (HFU beside MFU), and of pipeline bubbles")
    if used is not None and total is not None and total.high > 0:
        share = used.high / total.high
        if share < 0.7:
            clues.speaks(f"at most {share:.0%} of the memory is in use: less recompute would fit")


LOW_MFU = (
    DATA_STARVED,
    Cause(
        "too_little_work",
        "the batch per device is too small for it",
        (
            "raise micro_batch_size while memory lasts, then the sequence length per device",
            "look at what the host does between steps; use graph mode and data sinking",
        ),
        _too_small,
    ),
    Cause(
        "idle_ranks",
        "some of the devices do nothing",
        ("compare the utilization of each device; do the degrees multiply to all of them?",),
        _ranks_idle,
    ),
    STRAGGLER,
    Cause(
        "recompute_or_bubbles",
        "recomputation or pipeline bubbles take the time",
        (
            "recompute fewer layers; raise micro_batch_num to at least 4 times the stages",
            "search the layout: mindtune search",
        ),
        _recompute,
    ),
    COMMUNICATION,
    Cause(
        "wrong_figure",
        "the figure is wrong: the peak, the model's shape, or the number of devices",
        ("check peak_flops, num_devices and the model block of the study",),
        _wrong_peak,
    ),
)
"""Causes of a low MFU, in the order in which to look."""
