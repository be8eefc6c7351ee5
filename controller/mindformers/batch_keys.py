"""MindFormers' two counts of micro-batches, of which one acts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindtune.search.knobs import KnobValue

__all__ = ["settled"]

_PIPELINED = "parallel_config.micro_batch_num"
_ACCUMULATED = "runner_config.gradient_accumulation_steps"


def settled(changes: Mapping[str, Any], knobs: Mapping[str, KnobValue]) -> dict[str, Any]:
    """Return changes of a YAML with the count that MindFormers ignores as it resets it, to 1.

    With a pipeline its steps take `micro_batch_num` micro-batches, without one they accumulate.

    Args:
        changes: dotted key -> value.
        knobs: the config; without `pipeline_stage` nothing is known.
    """
    if "pipeline_stage" not in knobs:
        return dict(changes)
    ignored = _PIPELINED if knobs["pipeline_stage"] == 1 else _ACCUMULATED
    return {key: 1 if key == ignored else value for key, value in changes.items()}
