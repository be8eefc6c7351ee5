"""Tells under what a run is made, in its conditions.json."""

from __future__ import annotations

import threading
from pathlib import Path

from mindtune.controller.contract import RunConditions, write_json
from mindtune.controller.device.hardware import describe_hardware
from mindtune.controller.live.workload import Workload
from mindtune.controller.versions import installed_versions

__all__ = ["write_conditions"]

_PACKAGES = ("mindtune", "mindspore", "mindformers", "numpy")
_HOST = "CPU"


def write_conditions(
    folder: Path, workload: Workload, *, num_devices: int, device: str, seed: int | None
) -> threading.Thread | None:
    """Write the conditions of the run that begins.

    Args:
        folder: The run's folder.
        workload: What the user told about the training.
        num_devices: Ranks of the job.
        device: MindSpore's name of the device target.
        seed: MindSpore's global seed; None: not set.

    Returns:
        The thread that asks the driver for the device's name and completes the file, since a
        driver may hang; None: there is none to ask.

    Raises:
        ConfigError: The file cannot be written.
    """
    peak = workload.peak_flops
    known = RunConditions(
        hardware=describe_hardware(device) if device == _HOST else None,
        num_devices=num_devices,
        seed=seed,
        versions=installed_versions(_PACKAGES),
        model=workload.model,
        peak_flops=peak,
        peak_source=None if peak is None else "given by the program",
    )
    file = folder / RunConditions.FILE
    write_json(file, known)
    if device == _HOST:
        return None

    def complete() -> None:
        write_json(file, known.model_copy(update={"hardware": describe_hardware(device)}))

    thread = threading.Thread(target=complete, name="mindtune-conditions", daemon=True)
    thread.start()
    return thread
