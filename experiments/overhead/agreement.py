"""What it costs that all ranks of a job see the same: `msrun --worker_num 4 ...` this file.

Every optimizer step gathers one row of a few numbers from each rank, beside the reduction of the
gradients. Measured, alternating in one job: the gather alone, and the reduction of the reference
workload's gradients with and without it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, nn

from mindtune.controller.contract import write_atomic
from mindtune.controller.live.compression import parse_compression
from mindtune.controller.live.layout import ParallelLayout
from mindtune.controller.live.packed import NUM_ROW_FIELDS
from mindtune.controller.live.reduction import RowGather, make_reduction
from mindtune.experiments.gpt.config import ModelConfig
from mindtune.experiments.gpt.model import Gpt
from mindtune.experiments.overhead.report import quartiles
from mindtune.experiments.provenance import load_1m, provenance

__all__ = ["main"]


class _Exchange(nn.Cell):
    """Reduces gradients, gathers the row, or both."""

    def __init__(self, reduction: nn.Cell | None, gather: nn.Cell | None) -> None:
        super().__init__(auto_prefix=False)
        self._reduction = reduction
        self._gather = gather

    def construct(self, row: Any, one: Any, *gradients: Any) -> Any:
        """Return one number that needs all of it."""
        total = one
        if self._gather is not None:
            total = total + self._gather(row).sum()
        if self._reduction is not None:
            for gradient in self._reduction(gradients, one, one)[0]:
                total = total + gradient.reshape((-1,))[0]
        return total


def main(arguments: list[str] | None = None) -> int:
    """Measure on all ranks; rank 0 writes agreement_R.md into --out and prints it."""
    parser = argparse.ArgumentParser(
        prog="agreement.py",
        description="Milliseconds of the agreement of all ranks. Launch R ranks with msrun --join "
        "True; one rank alone with python.",
    )
    parser.add_argument("--out", type=Path, default=Path("overhead"), help="default: overhead")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each way (default: 30)")
    parser.add_argument("--block", type=int, default=10, help="calls of a turn (default: 10)")
    options = parser.parse_args(arguments)
    before = load_1m()
    layout = _layout()
    times = _measure(layout, rounds=options.rounds, block=options.block)
    if layout.rank:
        return 0
    text = _table(times, ranks=layout.world_size)
    text += (
        f"\n{options.rounds} rounds of {options.block} calls; {NUM_ROW_FIELDS} numbers a rank; "
        f"load before and after: {before} and {load_1m()}. {provenance().sentence()}\n"
    )
    write_atomic(options.out / f"agreement_{layout.world_size}.md", text)
    print(text)
    return 0


def _layout() -> ParallelLayout:
    ms.set_context(mode=ms.GRAPH_MODE)
    ranks = int(os.environ.get("RANK_SIZE", "1"))
    if ranks == 1:
        return ParallelLayout()
    communication.init()
    return ParallelLayout(
        data_parallel=ranks,
        data_parallel_group=communication.GlobalComm.WORLD_COMM_GROUP,
        rank=communication.get_rank(),
        world_size=ranks,
    )


def _measure(layout: ParallelLayout, *, rounds: int, block: int) -> dict[str, list[float]]:
    """Return the seconds of each call; the first of a turn is not measured."""
    weights = tuple(Gpt(ModelConfig(), seed=0).trainable_params())
    gradients = tuple(Tensor(np.ones(weight.shape, np.float32)) for weight in weights)
    reduction = make_reduction(layout, parse_compression("none"), weights)
    gather = RowGather(layout)
    row = Tensor(np.full(NUM_ROW_FIELDS, 0.5, np.float32))
    one = Tensor(1.0, ms.float32)
    ways = {
        "row": (_Exchange(None, gather), ()),
        "gradients": (_Exchange(reduction, None), gradients),
        "both": (_Exchange(reduction, gather), gradients),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            cell, given = ways[name]
            for call in range(block + 1):
                begin_s = time.perf_counter()
                cell(row, one, *given).asnumpy()
                # The first round compiles.
                if number and call:
                    times[name].append(time.perf_counter() - begin_s)
    return times


def _table(times: dict[str, list[float]], *, ranks: int) -> str:
    meanings = {
        "row": "the row of every rank to every rank, alone",
        "gradients": "reduction of 875264 gradient entries",
        "both": "reduction and row in one graph",
    }
    lines = [f"| {ranks} ranks | ms: median [quartiles] |", "| --- | --- |"]
    for name, seconds in times.items():
        spread = quartiles(seconds, unit=1e-3)
        lines.append(
            f"| {meanings[name]} | {spread.median:.2f} [{spread.low:.2f}, {spread.high:.2f}] |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
