"""What programs print where they end a training that is not finite, or where they fail.

No step has a line of its own then: without these words such a log looks healthy to its end.
"""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from mindtune.controller.records.log_readers.fields import make
from mindtune.controller.records.log_readers.reader import Record

__all__ = ["Failure", "ended_by", "failure_in"]

_OUT_OF_MEMORY = (
    "OutOfMemoryError", "CUDA out of memory", "HIP out of memory", "NPU out of memory",
    "CUDA error: out of memory", "MemoryError", "Memory not enough", "Allocate memory failed",
    "Out of memory: Kill", "oom-kill event", "oom_kill event",
)  # fmt: skip
"""PyTorch, CUDA, the kernel and Slurm, and MindSpore's memory pool."""
_STANDSTILL = (
    "Watchdog caught collective operation timeout",  # PyTorch's NCCL watchdog
    "Notify wait execution timeout", "EI0002",  # Huawei's HCCL
)  # fmt: skip
_ERROR = re.compile(r"^[\w.]{0,80}(?:Error|Exception|Interrupt|Exit)\b(?:: .*)?$")
_CRASHED = ("Traceback (most recent call last)", "Segmentation fault", "core dumped")
_MAY_FAIL = re.compile(
    "|".join(map(re.escape, (*_OUT_OF_MEMORY, *_STANDSTILL, *_CRASHED))) + "|" + _ERROR.pattern
)
_LOOKED_AT = 400
"""Characters of a line in which such words are looked for."""
_TOLD = 200
"""Characters that are told of one."""


FailureKind = Literal["oom", "hang", "crash"]
_CAUSES: tuple[FailureKind, ...] = ("oom", "hang", "crash")
"""A rank that has no memory lets the others hang, and both end in errors."""


class Failure(NamedTuple):
    """What a program said as it failed."""

    kind: FailureKind
    text: str

    @property
    def order(self) -> int:
        """Where it stands among the causes: of two failures, the lower one explains the other."""
        return _CAUSES.index(self.kind)


_WORDS = {
    "Loss is nan, stopping training": "loss",  # DETR, MAE, DeiT and what was made from them
    "Loss is inf, stopping training": "loss",
    "Loss is -inf, stopping training": "loss",
    "found NaN in local forward loss calculation": "loss",  # Megatron-LM
    "found NaN in local grad norm": "grad_norm",
    "The loss returned in `training_step` is nan": "loss",  # Lightning
    "The loss returned in `training_step` is inf": "loss",
    "gradients are Nan/Inf": "grad_norm",  # fairseq without a loss scale
}


def ended_by(line: str, last_step: int) -> Record | None:
    """Return the record of the step that ended a training; None where the line tells of none.

    Args:
        line: a line that no reader understood.
        last_step: the last step that had a line; it was the next one that failed.
    """
    for words, signal in _WORDS.items():
        if words in line:
            return Record(make(last_step + 1, {signal: math.nan}))
    return None


def failure_in(line: str, before: Failure | None) -> Failure | None:
    """Return what a line adds to how a program failed.

    Args:
        line: a line that no reader understood.
        before: what the lines since the last step have told.
    """
    text = line[:_LOOKED_AT].strip()
    if _MAY_FAIL.search(text) is None:
        return before
    kind: FailureKind = "crash"
    if any(words in text for words in _OUT_OF_MEMORY):
        kind = "oom"
    elif any(words in text for words in _STANDSTILL):
        kind = "hang"
    found = Failure(kind, text[:_TOLD])
    if before is None or found.order < before.order:
        return found
    # What is caused on other ranks and on the way out explains nothing; of plain errors the last
    # one names what its traceback led to.
    is_news = kind == before.kind == "crash" and not text.startswith("Traceback")
    return found if is_news else before
