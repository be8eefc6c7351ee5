"""Copies of everything that an update changes, in the host's memory or on disk.

A copy holds the weights, the network's running statistics, the optimizer's moments and powers,
what compression held back, and the count of clean steps: with Adam about three times the weights.
Not in it are

- the optimizer's `global_step`: it is the schedule's position and follows the samples seen, which
  go on with the next data after a return; wound back, the schedule would be late by the steps
  passed over, for ever;
- the learning rate, the loss scale and the other knobs: who turns them has turned them on purpose,
  perhaps in the very step of the return.

A copy is brought back by `ops.assign` alone: after `set_data` or `load_param_into_net` a compiled
update goes on with the old buffers. It compiles nothing.

Where a hand-written loop computes its own gradients, the step knows no network: there the weights
and everything of the optimizer's are copied, but no running statistics.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindtune.controller.errors import ConfigError
from mindtune.controller.live.ranks import JobRank, equal_on_all_ranks, numbers_of_all_ranks
from mindtune.controller.live.settings import RewindSection
from mindtune.controller.live.snapshots import Snapshots, Storage
from mindtune.controller.live.update_step import UpdateStep
from mindtune.controller.units import format_size

__all__ = ["DiskStorage", "MemoryStorage", "changed_by_updates", "open_snapshots"]

_LOGGER = logging.getLogger(__name__)

_MARK: Final = "mindtune_snapshot"
"""Entry of a checkpoint that says whose it is; its value is the layout's version."""
_VERSION: Final = 1


def changed_by_updates(step: UpdateStep) -> tuple[Parameter, ...]:
    """Return the Parameters of a training step that belong into a copy, in a fixed order."""
    update = step.update
    kept = {id(update.clean_steps)}
    if step.compression.kind == "topk":
        kept.add(id(update.residual))
    left_out = {id(parameter) for parameter in update.learning_rate.rates}
    schedule = getattr(step.optimizer, "learning_rate", None)
    if isinstance(schedule, nn.Cell):
        left_out |= {id(parameter) for parameter in schedule.get_parameters()}
    position = getattr(step.optimizer, "global_step", None)
    left_out.add(id(position))
    return tuple(
        parameter
        for parameter in step.get_parameters()
        if id(parameter) in kept
        or (id(parameter) not in left_out and not parameter.name.startswith("mindtune."))
    )


class MemoryStorage:
    """Keeps copies in the host's memory; they end with the process.

    What has not changed since the last copy, such as frozen weights, is shared with it.

    Args:
        parameters: What is copied.
    """

    survives = False

    def __init__(self, parameters: tuple[Parameter, ...]) -> None:
        self._parameters = parameters
        self._copies: dict[int, tuple[Any, ...]] = {}

    @property
    def num_bytes(self) -> int:
        """Size of one copy; see `_to_host` for bfloat16."""
        return sum(
            int(parameter.nbytes) * (2 if parameter.dtype == ms.bfloat16 else 1)
            for parameter in self._parameters
        )

    def write(self, step: int) -> None:
        """Copy the state to the host."""
        last = self._copies[max(self._copies)] if self._copies else None
        copies = []
        for index, parameter in enumerate(self._parameters):
            array = _to_host(parameter)
            if last is not None and not parameter.requires_grad:
                same = np.array_equal(array, last[index], equal_nan=True)
                array = last[index] if same else array
            copies.append(array)
        self._copies[step] = tuple(copies)

    def load(self, step: int) -> tuple[Any, ...]:
        """Return the copy."""
        if step not in self._copies:
            raise ConfigError(f"the state of step {step} is no longer in memory.")
        return self._copies[step]

    def assign(self, copy: tuple[Any, ...]) -> None:
        """Write a copy into the Parameters."""
        for parameter, array in zip(self._parameters, copy, strict=True):
            ops.assign(parameter, Tensor(array, parameter.dtype))

    def holds(self, step: int) -> bool:
        """Tell whether there is a copy of this step."""
        return step in self._copies

    def retain(self, steps: Collection[int]) -> None:
        """Drop the copies of all other steps."""
        for step in set(self._copies) - set(steps):
            del self._copies[step]


class DiskStorage:
    """Keeps copies as MindSpore checkpoints, one file per rank and step; they can be resumed from.

    A file is written beside its place and moved into it when it is whole. Only files with this
    storage's mark, a right checksum and exactly the expected Parameters are read.

    Args:
        parameters: What is copied.
        folder: Where the files lie; made if need be. What a process that was killed left half
            written there is removed.
        rank: This process, whose own files these are: what compression held back differs by rank.
    """

    survives = True

    def __init__(self, parameters: tuple[Parameter, ...], folder: Path, *, rank: int) -> None:
        self._parameters = dict(zip(_unique_names(parameters), parameters, strict=True))
        self._folder = folder
        self._prefix = f"snapshot_rank{rank}_"
        for partial in self._files(f".{self._prefix}*"):
            _remove(partial)

    def write(self, step: int) -> None:
        """Write the state to disk.

        Raises:
            ConfigError: The folder cannot be written.
        """
        path = self._path(step)
        partial = path.with_name(f".{path.name}.partial.ckpt")
        entries = [
            {"name": name, "data": parameter} for name, parameter in self._parameters.items()
        ]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.unlink(missing_ok=True)
            ms.save_checkpoint(
                entries, str(partial), append_dict={_MARK: _VERSION, "step": step}, crc_check=True
            )
            partial.replace(path)
        except (OSError, RuntimeError) as error:
            # MindSpore turns a full disk into a RuntimeError of its own.
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise ConfigError(f"{path} cannot be written: {error}") from None

    def load(self, step: int) -> dict[str, Any]:
        """Return the state from disk.

        Raises:
            ConfigError: The file is not there, is damaged, or is not of this storage and run.
        """
        path = self._path(step)
        if not self.holds(step):
            raise ConfigError(f"{path} is not there.")
        try:
            found = ms.load_checkpoint(str(path), crc_check=True)
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from None
        marks = [_number(found.pop(name, None)) for name in (_MARK, "step")]
        if marks != [_VERSION, step]:
            raise ConfigError(f"{path} was not written as a state of step {step}.")
        expected = {name: (p.shape, p.dtype) for name, p in self._parameters.items()}
        if {name: (p.shape, p.dtype) for name, p in found.items()} != expected:
            raise ConfigError(f"{path} holds other Parameters than this training step.")
        return dict(found)

    def assign(self, copy: dict[str, Any]) -> None:
        """Write a loaded state into the Parameters."""
        for name, parameter in self._parameters.items():
            ops.assign(parameter, Tensor(copy[name]))

    def holds(self, step: int) -> bool:
        """Tell whether there is a file of this step."""
        return os.path.isfile(self._path(step))  # noqa: PTH113 - a closed folder has none

    def retain(self, steps: Collection[int]) -> None:
        """Remove the files of all other steps; one that cannot be removed stays."""
        kept = {self._path(step) for step in steps}
        for path in self._files(f"{self._prefix}*.ckpt"):
            if path not in kept:
                _remove(path)

    def _files(self, pattern: str) -> list[Path]:
        """Return this rank's files; none where the folder cannot be read."""
        try:
            return sorted(self._folder.glob(pattern))
        except OSError as error:
            _LOGGER.warning("%s cannot be read: %s", self._folder, error)
            return []

    def _path(self, step: int) -> Path:
        return self._folder / f"{self._prefix}{step:09d}.ckpt"


def open_snapshots(
    section: RewindSection, step: UpdateStep, place: JobRank, *, folder: Path | None
) -> Snapshots | None:
    """Return what copies the states of a step; None, with a reason in the log, where nothing can.

    Every rank calls it.

    Args:
        section: What the user asked for; enabled.
        step: The training step.
        place: This process's rank.
        folder: For files; None: this rank has none.
    """
    parameters = changed_by_updates(step)
    storage: Storage | None = None
    if section.storage == "memory":
        memory = MemoryStorage(parameters)
        needed = section.keep * memory.num_bytes
        if needed <= section.max_memory:
            storage = memory
        else:
            _LOGGER.warning(
                "no earlier states are kept: %d copies of %s need %s of host memory per rank, "
                "rewind.max_memory allows %s; raise it, or set rewind.storage to disk.",
                section.keep,
                format_size(memory.num_bytes),
                format_size(needed),
                format_size(section.max_memory),
            )
    elif folder is not None:
        storage = DiskStorage(parameters, folder, rank=place.rank)
    else:
        _LOGGER.warning(
            "no earlier states are kept: rewind.storage is disk, but rank %d has no run folder; "
            "set out_dir.",
            place.rank,
        )
    # Shards of unequal size may fit on one rank and not on another: then no rank keeps any.
    if not equal_on_all_ranks(int(storage is not None), place) or storage is None:
        return None
    return Snapshots(
        storage,
        every=section.every,
        keep=section.keep,
        of_all_ranks=lambda number: numbers_of_all_ranks(number, place),
    )


def _remove(path: Path) -> None:
    """Remove a file. That it stays costs disk, but no training."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _LOGGER.warning("%s cannot be removed: %s", path, error)


def _to_host(parameter: Parameter) -> Any:
    """Return a copy of a Parameter's value as an array; `asnumpy` alone may share its memory."""
    if parameter.dtype == ms.bfloat16:
        # NumPy has no bfloat16; every value of it is one of float32.
        return parameter.astype(ms.float32).asnumpy().copy()
    return parameter.asnumpy().copy()


def _number(mark: Any) -> int | None:
    """Return the whole number in a checkpoint's entry; None where there is none."""
    if not isinstance(mark, Tensor) or mark.size != 1:
        return None
    return int(mark.asnumpy().reshape(-1)[0])


def _unique_names(parameters: tuple[Parameter, ...]) -> list[str]:
    """Return the Parameters' names, the second and later of equal ones numbered."""
    names: list[str] = []
    seen: set[str] = set()
    for index, parameter in enumerate(parameters):
        names.append(f"{parameter.name}.{index}" if parameter.name in seen else parameter.name)
        seen.add(parameter.name)
    return names
