"""Tells under what a run is made, for its conditions.json."""

from __future__ import annotations

import mindspore as ms

from mindtune.controller.contract import RunConditions
from mindtune.controller.device.hardware import describe_hardware
from mindtune.controller.live.workload import Workload
from mindtune.controller.versions import installed_versions

__all__ = ["run_conditions"]

_PACKAGES = ("mindtune", "mindspore", "mindformers", "numpy")


def run_conditions(workload: Workload, *, num_devices: int, device: str) -> RunConditions:
    """Return the conditions of the run that begins.

    Args:
        workload: What the user told about the training.
        num_devices: Ranks of the job.
        device: MindSpore's name of the device target.
    """
    peak = workload.peak_flops
    return RunConditions(
        hardware=describe_hardware(device),
        num_devices=num_devices,
        seed=ms.get_seed(),
        versions=installed_versions(_PACKAGES),
        model=workload.model,
        peak_flops=peak,
        peak_source=None if peak is None else "given by the program",
    )
