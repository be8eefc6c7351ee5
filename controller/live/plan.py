"""Tells in plan.json how many steps the run is going to make, where that is known."""

from __future__ import annotations

import logging
from pathlib import Path

from mindtune.controller.contract import RunPlan, write_json
from mindtune.controller.errors import ConfigError

__all__ = ["EpochPlan", "PlanWriter"]

_LOGGER = logging.getLogger(__name__)


class PlanWriter:
    """Writes how far a training goes; a disk that fails costs the file alone.

    What an earlier segment of the run has said holds no more: it is removed.

    Args:
        folder: The run's folder.
        basis: What the number of steps follows from.
    """

    def __init__(self, folder: Path, *, basis: str) -> None:
        self._path: Path | None = folder / RunPlan.FILE
        self._basis = basis
        self._told: int | None = None
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            self._give_up(error)

    def tell(self, steps: int | None) -> None:
        """Say the number of the last step, where it is another than before; None: not known."""
        if self._path is None or steps is None or steps == self._told:
            return
        self._told = steps
        try:
            write_json(self._path, RunPlan(steps=steps, basis=self._basis))
        except ConfigError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        _LOGGER.warning("the plan cannot be kept, so no end is told: %s", error)
        self._path = None


class EpochPlan:
    """How many optimizer steps `Model.train` makes of its epochs.

    The newest step tells how many calls of the training step one takes: several where
    micro-batches are accumulated, of which a policy may change the number, and less than one where
    a loop on the device hides steps.

    Args:
        folder: The run's folder.
        epochs: That are left.
        batches: Of an epoch, one for each call.
        calls: Of these epochs, made already.
        step: Optimizer step that the training goes on from.
    """

    def __init__(self, folder: Path, *, epochs: int, batches: int, calls: int, step: int) -> None:
        self._writer = PlanWriter(folder, basis=f"epochs x batches = {epochs} x {batches}")
        self._total = epochs * batches
        self._calls = calls
        self._step = step

    def take(self, *, calls: int, step: int) -> None:
        """Take in a call that has ended.

        Args:
            calls: Calls by now.
            step: Newest optimizer step.
        """
        made, steps = calls - self._calls, step - self._step
        if made <= 0 or steps <= 0 or self._total <= 0:
            return
        self._calls, self._step = calls, step
        self._writer.tell(step + max(0, self._total - calls) * steps // made)
