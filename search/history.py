"""What has been tried, and what follows from it for configs that have not.

More memory needed is the one direction that holds for certain: a config that differs from one
that ran out of memory only by a larger micro-batch, less recomputation or less sharding runs out
of memory too: in-flight samples are min(batch of a rank, stages x micro-batch), which a larger
micro-batch never lowers. Anything else that differs makes it another question. More pipeline
stages need less memory per rank; an offloaded optimizer may have filled the host instead of the
device, and sequence parallelism pays for its saving with buffers.

No other outcome says anything for certain of another config: a timeout is a habit of speed, a
non-finite loss one of precision, a crash one of the program. They are left to the sampler's model,
and only the config itself is never tried again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from mindtune.search.knobs import Config, KnobValue
from mindtune.search.stage_list import parse_stage_list

__all__ = [
    "MAX_STARTS",
    "MEMORY_KNOBS",
    "Attempt",
    "Inference",
    "infer",
    "memory_need",
    "needs_at_least",
]

Outcome = Literal[
    "running", "ok", "oom", "bad_config", "non_finite", "crash", "timeout", "interrupted",
    "pruned", "infeasible",
]  # fmt: skip

MAX_STARTS = 3
"""How often a config is started in all, where the process that measures it keeps dying."""
MEMORY_KNOBS = ("micro_batch_size", "recompute", "optimizer_sharding")
"""Knobs with a certain direction of memory, everything else equal."""

_SHARDING = {"none": 3.0, "optimizer": 2.0, "gradient": 1.0, "parameter": 0.0}


@dataclass(frozen=True)
class Attempt:
    """One config that was started."""

    number: int
    config: Config
    """Knobs of the space."""
    outcome: str
    value: float | None = None
    """Measured; None: nothing to compare with."""
    objectives: tuple[float, ...] = ()
    """Measured, of a study with several; empty: it has one, or nothing was measured."""
    ended_on_request: bool = False
    """It was interrupted because the search was asked to end: no start that failed."""


@dataclass(frozen=True)
class Inference:
    """What another config's failure says about one that was never run: inferred, not measured."""

    outcome: Literal["oom"]
    cause: int
    """Number of the trial it follows from."""
    reason: str


def memory_need(name: str, value: KnobValue) -> float | None:
    """Return a number that rises with the device memory that a value needs; None: no order.

    `selective` recomputation saves the attention scores only, which `interval:K` does not order
    against, and a list per stage says nothing of another stage: see `needs_at_least`.
    """
    if name == "micro_batch_size":
        return float(value)
    if name == "optimizer_sharding":
        return _SHARDING[str(value)]
    if name == "optimizer_offload":
        return 0.0 if value else 1.0
    if name == "recompute":
        kind, _, interval = str(value).partition(":")
        if kind == "interval":
            return 1.0 - 1.0 / int(interval)
        return {"none": 1.0, "full": 0.0}.get(kind)
    return None


def needs_at_least(config: Mapping[str, KnobValue], other: Mapping[str, KnobValue]) -> bool:
    """Return whether `config` certainly needs as much memory as `other`, or more."""
    if set(config) != set(other):
        return False
    for name, value in config.items():
        if value == other[name]:
            continue
        if name not in MEMORY_KNOBS:
            return False
        need, reference = memory_need(name, value), memory_need(name, other[name])
        if name == "recompute" and {need, reference} & {None}:
            if not _repeats_no_more(str(value), str(other[name])):
                return False
        elif need is None or reference is None or need < reference:
            return False
    return True


def _repeats_no_more(recompute: str, other: str) -> bool:
    """Return whether one value certainly repeats nothing that the other does not."""
    if recompute == "none" or other == "full":
        return True
    (kind, _, listed), (other_kind, _, other_listed) = (
        recompute.partition(":"),
        other.partition(":"),
    )
    if kind != other_kind or not listed:
        return False
    if not other_listed:
        return True  # attention of some layers against that of all
    rows, others = parse_stage_list(listed), parse_stage_list(other_listed)
    if [len(row) for row in rows] != [len(row) for row in others]:
        return False
    pairs = zip(chain(*rows), chain(*others), strict=True)
    return all(layers <= most for layers, most in pairs)


def infer(config: Config, attempts: Iterable[Attempt]) -> Inference | None:
    """Return what the failures of other configs say about this one; None: nothing."""
    for attempt in attempts:
        if attempt.outcome != "oom" or not needs_at_least(config, attempt.config):
            continue
        changed = ", ".join(
            f"{name} = {value} instead of {attempt.config[name]}"
            for name, value in config.items()
            if value != attempt.config[name]
        )
        return Inference(
            "oom",
            attempt.number,
            f"trial {attempt.number} ran out of memory, and this config needs no less: "
            f"{changed or 'it is the same config'}",
        )
    return None
