"""The order of work of a careful hand: memory, then parallelism, then communication and data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mindtune.search.encoding import Flags

__all__ = ["STAGES", "changes_one_thing"]

STAGES: tuple[tuple[frozenset[str], ...], ...] = (
    (
        frozenset({"micro_batch_size"}),
        frozenset({"recompute"}),
        frozenset({"optimizer_sharding"}),
        frozenset({"optimizer_offload"}),
        frozenset({"precision"}),
    ),
    (
        # One thing, since the product of the degrees is fixed and the others hang on them.
        frozenset({
            "data_parallel", "model_parallel", "pipeline_stage", "context_parallel",
            "expert_parallel", "use_seq_parallel", "pp_interleave_num", "offset",
        }),
    ),
    (
        frozenset({"gradient_compression"}),
        frozenset({"comm_overlap", "comm_fusion"}),
    ),
    (
        frozenset({"data_workers", "prefetch"}),
    ),
)  # fmt: skip
"""Stages in order; each is a list of things, and a thing is the knobs that are turned together.
Knobs that stand nowhere, environment variables among them, are things of the last stage."""


def changes_one_thing(names: Sequence[str], differs: Flags) -> Iterator[Flags]:
    """Yield for each stage which configs differ in one of its things and in nothing else.

    Args:
        names: Of the knobs.
        differs: Per config and knob: whether it differs from the config to be changed.
    """
    placed = frozenset().union(*(thing for stage in STAGES for thing in stage))
    others = tuple(frozenset({name}) for name in names if name not in placed)
    total = differs.sum(axis=1)
    for stage in (*STAGES[:-1], (*STAGES[-1], *others)):
        found = np.zeros(len(differs), dtype=bool)
        for thing in stage:
            columns = [index for index, name in enumerate(names) if name in thing]
            own = differs[:, columns].sum(axis=1)
            found |= (own > 0) & (own == total)
        yield found
