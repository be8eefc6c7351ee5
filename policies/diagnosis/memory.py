"""What fills the memory.

The remedies stand in the order of what they cost: distribute, then shard over replicas, recompute,
offload, and the batch last.
"""

from __future__ import annotations

from mindtune.policies.diagnosis.case import Case
from mindtune.policies.diagnosis.cause import Cause
from mindtune.policies.diagnosis.model import DECISIVE, STRONG, WEAK, Clues
from mindtune.policies.findings import FindingKind

__all__ = ["MEMORY"]

_GIB = 2.0**30
_LADDER = (
    "distribute the model: model_parallel within a node, then pipeline_stage",
    "shard the optimizer's state over the replicas: optimizer_sharding: optimizer, then gradient",
    "recompute activations: recompute: selective, then interval:K, then full",
    "offload the optimizer's state: optimizer_offload",
    "last, halve micro_batch_size and double micro_batch_num: the batch stays as it is",
)


def _leak(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.MEMORY_PRESSURE)
    used = case.course("memory_allocated_bytes") or case.course("device_memory_used_bytes")
    if found is not None and found.number("bytes_per_step") > 0:
        clues.speaks(
            f"memory grows steadily, by {found.number('bytes_per_step') / 2**20:.3g} MiB a step",
            DECISIVE,
        )
    elif used is not None and used.count >= 32:
        early, late = used.part(0.1, 0.3), used.part(0.8, 1.0)
        text = f"memory went from {early / _GIB:.3g} to {late / _GIB:.3g} GiB over the run"
        if late > 1.1 * early:
            clues.speaks(text, STRONG)
        else:
            clues.denies(text, STRONG)
    else:
        clues.lacks("memory_allocated_bytes of many steps: a steady growth is a leak")


def _fragments(case: Case, clues: Clues) -> None:
    used = case.course("device_memory_used_bytes")
    held = case.course("memory_allocated_bytes")
    if used is None or held is None or used.high <= 0:
        clues.lacks("memory_allocated_bytes beside device_memory_used_bytes: a wide gap is unused")
        return
    share = held.high / used.high
    text = f"the allocator holds {held.high / _GIB:.3g} of the {used.high / _GIB:.3g} GiB in use"
    if share < 0.8:
        clues.speaks(text, STRONG)
    else:
        clues.denies(text, STRONG)


def _activations(case: Case, clues: Clues) -> None:
    used = case.course("memory_allocated_bytes") or case.course("device_memory_used_bytes")
    before = case.usual("micro_batch_size"), case.usual("tokens")
    peak = case.peak("micro_batch_size"), case.peak("tokens")
    for name, old, new in zip(("micro_batch_size", "tokens"), before, peak, strict=True):
        if old and new and new > 1.1 * old:
            clues.speaks(f"{name} rose from {old:g} to {new:g}", STRONG)
    if used is not None and used.count >= 8:
        swing = (used.high - used.low) / max(1.0, used.high)
        if swing > 0.1:
            clues.speaks(
                f"memory swings by {swing:.0%} from step to step, as activations of batches of "
                "different lengths do"
            )


def _steady_need(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.MEMORY_PRESSURE)
    outcome = case.context.outcome
    if outcome == "oom":
        early = case.history.steps <= 3
        when = f"after {case.history.steps} recorded steps"
        clues.speaks(f"the run ran out of memory {when}", STRONG if early else WEAK)
    if found is not None and found.number("bytes_per_step") <= 0:
        clues.speaks(found.message, STRONG)
    elif found is not None:
        clues.denies("it grows: what a step needs does not", STRONG)


MEMORY = (
    Cause(
        "leak",
        "something is kept from step to step",
        (
            "look for losses, outputs or gradients in a list or a log (keep loss.asnumpy())",
            "look for caches without a bound, shapes compiled anew, data workers that grow",
            "go on from the last checkpoint; a smaller batch only delays it",
        ),
        _leak,
    ),
    Cause(
        "fragments",
        "the device is filled with what is reserved and not used",
        (
            "let the framework reserve less (max_device_memory), or end other processes on it",
            "keep shapes fixed, so that blocks are used again",
        ),
        _fragments,
    ),
    Cause(
        "activations",
        "the activations of the largest batch fill it",
        ("bucket or cut the longest samples", *_LADDER[2:]),
        _activations,
    ),
    Cause("steady_need", "the model and its states need that much in every step", _LADDER,
          _steady_need),
)  # fmt: skip
"""Causes of short memory, in the order in which to look."""
