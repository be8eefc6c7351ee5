"""What it costs to keep an earlier state, and to return to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from mindtune.controller import TrainStep
from mindtune.controller.live.snapshot_storage import (
    DiskStorage,
    MemoryStorage,
    changed_by_updates,
)
from mindtune.controller.live.snapshots import Storage
from mindtune.experiments.overhead.costs import CopyTimes

__all__ = ["copy_times"]

_NUM_COPIES = 30


def copy_times(step: TrainStep, train: Callable[[], object], folder: Path) -> CopyTimes:
    """Copy a step's state and return to it, after a training step each time.

    Args:
        step: The training step.
        train: Makes one optimizer step, so that no cache is full of the last copy.
        folder: For the files.
    """
    parameters = changed_by_updates(step)
    memory = MemoryStorage(parameters)
    disk = DiskStorage(parameters, folder, rank=0)

    def settle() -> None:
        # Assignments may be queued; reading the last one waits for all.
        parameters[-1].asnumpy()

    return CopyTimes(
        num_bytes=memory.num_bytes,
        memory=_timed(memory, train, settle),
        disk=_timed(disk, train, settle),
    )


def _timed(
    storage: Storage, train: Callable[[], object], settle: Callable[[], None]
) -> tuple[list[float], list[float]]:
    copies, returns = [], []
    # The first round is not counted: it makes what later ones find made.
    for number in range(_NUM_COPIES + 1):
        train()
        begin_s = time.perf_counter()
        storage.write(number)
        copies.append(time.perf_counter() - begin_s)
        train()
        begin_s = time.perf_counter()
        storage.assign(storage.load(number))
        settle()
        returns.append(time.perf_counter() - begin_s)
        storage.retain({number})
    return copies[1:], returns[1:]
