"""Further workers on this machine, each a process with devices and a folder of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from mindtune.controller.device.slots import device_pool, device_slots
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.commands import ENV_STORAGE, module_path
from mindtune.controller.trials.process_tree import die_with_parent
from mindtune.controller.trials.storage import StorageAddress
from mindtune.controller.trials.study_setup import StudySetup

__all__ = ["LocalWorkers", "choose_slots", "tie_to_parent"]

_HOST = "cpu"
_MOST = 64
"""Workers of one machine: each is a process of some 150 MB that starts at the same time."""
_ENV_PARENT = "MINDTUNE_WORKER_OF"
_LEAVE_WAIT_S = 5.0
"""An idle worker looks twice a second whether the search is over."""
_END_WAIT_S = 20.0
"""A worker that is told to end stops its trial first, which takes up to 10 s."""


def choose_slots(
    setup: StudySetup, workers: int | None, environ: Mapping[str, str], *, at_most: bool = False
) -> list[dict[str, str]]:
    """Return the environment of each worker on this machine: which devices its trials get.

    Args:
        setup: the study.
        workers: how many; None: as many as the devices allow, one on the host's cores.
        environ: with the user's own list of visible devices.
        at_most: take one trial at a time without `workers`, with all devices as they are.

    Raises:
        ConfigError: if there are not devices enough, or more workers than a machine can start.
    """
    cluster = setup.study.cluster
    if workers is not None and workers > _MOST:
        raise ConfigError(
            f"--workers must be at most {_MOST}, since each is a process on this machine, but got "
            f"{workers}; start `mindtune worker` on other machines besides."
        )
    if at_most and workers is None:
        return [{}]
    if setup.study.trial.hosts is not None:
        if workers not in (None, 1):
            raise ConfigError(
                f"--workers must be 1 where a trial has all of trial.hosts, but got {workers}; "
                "start `mindtune worker` with hosts of its own on another machine."
            )
        return [{}]
    if setup.study.trial.launcher == "slurm":
        return [{} for _ in range(workers or 1)]  # Slurm shares its devices out itself
    pool = device_pool(cluster.device, environ)
    if pool is None and cluster.device.lower() != _HOST and workers not in (None, 1):
        raise ConfigError(
            f"--workers must be 1 here, since no device of {cluster.device} is seen that trials "
            f"side by side could have to themselves, but got {workers}; see `mindtune doctor`, or "
            "name the devices in CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES."
        )
    if pool is None:
        return [{} for _ in range(workers or 1)]
    per_trial = min(cluster.num_devices, cluster.devices_per_node or cluster.num_devices)
    slots = device_slots(pool, per_trial)
    if workers is None:
        return slots or [{}]
    most = max(len(slots), 1)
    if workers > most:
        raise ConfigError(
            f"--workers must be at most {most} here, since a trial takes {per_trial} of the "
            f"{len(pool.devices)} devices ({pool.variable}), but got {workers}."
        )
    return slots[:workers] or [{}]


def tie_to_parent() -> None:
    """End this process with the one that started it as a local worker, if any did."""
    parent = os.environ.pop(_ENV_PARENT, None)
    if parent is not None:
        die_with_parent()
        if os.getppid() != int(parent):
            sys.exit(128 + signal.SIGTERM)


@dataclass
class LocalWorkers:
    """Processes that run `mindtune worker`; a context manager that ends them."""

    study_file: Path
    root: Path
    """Folder in which each of them has its own, and a log beside it."""
    address: StorageAddress
    slots: Sequence[Mapping[str, str]]
    say: Callable[[str], None]
    """Told when one of them fails."""
    first: int = 1
    """Number of the first one."""
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)

    def __enter__(self) -> LocalWorkers:  # noqa: PYI034 - typing.Self needs Python 3.11
        try:
            for number, slot in enumerate(self.slots, start=self.first):
                self._processes[number] = self._start(number, slot)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(grace_s=_LEAVE_WAIT_S if error is None else 0.0)

    def look(self) -> None:
        """Tell of workers that have failed."""
        for number, process in list(self._processes.items()):
            if process.poll() is None:
                continue
            del self._processes[number]
            if process.returncode != 0:
                self.say(
                    f"worker {number} ended with code {process.returncode}; the others go on, "
                    f"see {self._log(number)}"
                )

    def wait(self) -> None:
        """Wait for all workers to end by themselves."""
        for process in self._processes.values():
            process.wait()
        self.look()

    def end(self, *, grace_s: float = 0.0) -> None:
        """End all workers and wait for them.

        Args:
            grace_s: time for them to end by themselves, as they do once the search is over.
        """
        last = time.monotonic() + grace_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, last - time.monotonic()))
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_WAIT_S)
            process.kill()
            process.wait()
        self._processes.clear()

    def _log(self, number: int) -> Path:
        return self.root / f"{number}.log"

    def _start(self, number: int, slot: Mapping[str, str]) -> subprocess.Popen[bytes]:
        folder = self.root / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        # A command line can be read by everybody, the environment by this user alone.
        environment = {
            **os.environ, **module_path(os.environ), **slot,
            ENV_STORAGE: self.address.url, _ENV_PARENT: str(os.getpid()),
        }  # fmt: skip
        if self.address.variable not in (None, ENV_STORAGE):
            environment.pop(str(self.address.variable), None)  # its trials would get it
        with self._log(number).open("ab") as log:
            return subprocess.Popen(
                [
                    sys.executable, "-m", "mindtune.controller.cli", "worker",
                    str(self.study_file.resolve()), "--storage", f"env:{ENV_STORAGE}",
                    "--out", str(folder.resolve()), "--workers", "1",
                ],
                # `-m` puts the working directory in front of the path: not the user's.
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in a terminal reaches this process, which then ends its workers.
                start_new_session=True,
            )  # fmt: skip
