"""What programs print where they end a training themselves, since it is not finite any more.

The step has no line of its own then: without this word such a log looks healthy to its end.
"""

from __future__ import annotations

import math

from mindtune.controller.records.log_readers.fields import make
from mindtune.controller.records.log_readers.reader import Record

__all__ = ["ended_by"]

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
