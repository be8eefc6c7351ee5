"""Where and when an experiment was measured."""

from __future__ import annotations

import datetime as dt
import os
import platform
import resource
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from mindtune.controller.contract import ContractModel
from mindtune.controller.device.host import cpu_name, usable_cores

__all__ = ["OtherWork", "Provenance", "load_1m", "provenance"]


class Provenance(ContractModel):
    """Hardware, software and date of a measurement."""

    processor: str
    cores: float
    """Cores that the process may use."""
    python: str
    mindspore: str
    revision: str
    """Commit of the checkout, `-dirty` behind it if files differ; the package's version where
    there is no checkout."""
    date: str
    """UTC, ISO 8601, without the time of day."""

    def sentence(self) -> str:
        """Return the facts as one line of Markdown."""
        return (
            f"{self.processor}, {self.cores:g} cores; MindSpore {self.mindspore}, Python "
            f"{self.python}; {self.date}, revision `{self.revision}`."
        )


def provenance() -> Provenance:
    """Return the facts of this process."""
    return Provenance(
        processor=cpu_name(),
        cores=usable_cores(),
        python=platform.python_version(),
        mindspore=_version("mindspore"),
        revision=_revision(),
        date=dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
    )


def load_1m() -> float | None:
    """Return the machine's load of the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


class OtherWork:
    """What other processes take of the machine from now on, while this one waits for children."""

    def __init__(self) -> None:
        self._begin = (time.monotonic(), _machine_s(), _own_s())

    def share(self) -> float:
        """Return their share of the cores' time so far, 0..1; children must have ended."""
        begin_s, machine_s, own_s = self._begin
        elapsed_s = time.monotonic() - begin_s
        others_s = (_machine_s() - machine_s) - (_own_s() - own_s)
        return min(max(others_s / (elapsed_s * (os.cpu_count() or 1)), 0.0), 1.0)


def _machine_s() -> float:
    """Processor seconds that anybody has used."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _own_s() -> float:
    """Processor seconds of this process and of its children that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _revision() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*"]
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return _version("mindtune")
    return done.stdout.strip() if done.returncode == 0 else _version("mindtune")
