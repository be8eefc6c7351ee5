"""Says what works on this machine and why the rest does not.

Nothing heavy is imported: versions come from package metadata, libraries are looked for as files,
devices are asked through their drivers. What only a run can show is measured on request, in a
process of its own.
"""

from __future__ import annotations

import platform
import sqlite3
from typing import Any

from mindtune.controller.device.host import cpu_name, host_memory_bytes, usable_cores
from mindtune.controller.device.npu_smi import NpuDescription, list_npus
from mindtune.controller.device.nvml import GpuDescription, list_gpus
from mindtune.controller.device.reading import ProbeError
from mindtune.controller.doctor_checks import (
    Verdict,
    check_alerts,
    check_ascend,
    check_below,
    check_cpu,
    check_gpu,
    check_mindformers,
    check_mindspore,
    check_modules,
    check_msrun,
    check_numpy,
    check_postgresql,
    check_search,
    check_tool,
    send_test_alert,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.metrics.calibrate import (
    CalibrationError,
    HostMeasurement,
    measure_host,
)
from mindtune.controller.metrics.links import LinkMeasurement, measure_links
from mindtune.controller.metrics.peaks import PRECISIONS, look_up_peak
from mindtune.controller.versions import installed_versions

__all__ = ["collect_doctor"]

_PACKAGES = (
    "mindtune",
    "mindspore",
    "numpy",
    "pandas",
    "scipy",
    "optuna",
    "pydantic",
    "nvidia-ml-py",
    "psutil",
    "matplotlib",
    "jinja2",
    "apprise",
    "mindformers",
)


def collect_doctor(measure: bool = False, *, test_alert: str | None = None) -> dict[str, Any]:
    """Looks at this machine.

    Args:
        measure: Also run MindSpore: does a graph compile, do ranks meet under msrun, and what are
            the processor's peak, its copy bandwidth and the bandwidth between ranks. Takes 20 to
            60 seconds.
        test_alert: Also send an alert to this address, env:NAME.

    Returns:
        The document of `mindtune doctor --json`.
    """
    versions = _versions()
    gpus, gpu_problem = _gpus()
    npus, npu_problem = _npus()
    measured = _measurement() if measure else None
    links = _links() if measure else None
    mindspore = check_mindspore(versions)
    numpy = check_numpy(versions)
    usable = {
        "mindspore": mindspore,
        "numpy": numpy,
        "pandas": check_below(versions, "pandas", (3,), "pandas 3 needs NumPy 2"),
        "device_cpu": check_cpu(mindspore, numpy),
        "device_gpu": check_gpu(mindspore, gpus, gpu_problem),
        "device_ascend": check_ascend(mindspore, npus, npu_problem),
        "launcher_msrun": check_msrun(),
        "launcher_slurm": check_tool("srun", "Slurm's srun", "only `launcher: slurm` needs it"),
        "signals_host": Verdict(ok=True, why=f"psutil {versions['psutil']}"),
        "signals_nvml": Verdict(ok=bool(gpus), why=gpu_problem or f"{len(gpus)} device(s)"),
        "signals_npu_smi": Verdict(ok=bool(npus), why=npu_problem or f"{len(npus)} device(s)"),
        "search": check_search(versions),
        "storage_sqlite": Verdict(ok=True, why=f"SQLite {sqlite3.sqlite_version}"),
        "storage_postgresql": check_postgresql(),
        "report": check_modules("matplotlib", "jinja2", purpose="reports are drawn with them"),
        "alerts": check_alerts(versions),
        "mindformers": check_mindformers(versions),
    }
    if test_alert is not None:
        usable["test_alert"] = send_test_alert(test_alert)
    if measure:
        usable["graph_compile"] = _graph_compile(measured)
        usable["ranks_meet"] = _ranks_meet(links)
    return {
        "schema": 1,
        "versions": versions,
        "devices": [_host(measured, links), *map(_gpu, gpus), *map(_npu, npus)],
        "usable": [
            {"feature": feature, "ok": verdict.ok, "why": verdict.why}
            for feature, verdict in usable.items()
        ],
        "peaks": (
            [peak.to_dict() for peak in measured.peaks]
            if isinstance(measured, HostMeasurement)
            else []
        ),
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "platform": platform.platform(),
    }
    return {**versions, **dict.fromkeys(_PACKAGES), **installed_versions(_PACKAGES)}


def _graph_compile(measured: HostMeasurement | str | None) -> Verdict:
    if not isinstance(measured, HostMeasurement):
        return Verdict(ok=False, why=str(measured))
    if measured.graph_compile_s is None:
        return Verdict(ok=False, why="MindSpore is not installed")
    return Verdict(
        ok=True, why=f"a first graph compiled and ran in {measured.graph_compile_s:.2f} s"
    )


def _ranks_meet(links: LinkMeasurement | str | None) -> Verdict:
    if not isinstance(links, LinkMeasurement):
        return Verdict(ok=False, why=str(links))
    return Verdict(
        ok=True,
        why=f"{links.num_ranks} ranks met under msrun and reduced at "
        f"{links.bytes_per_s / 1e6:.0f} MB/s, {links.wall_s:.0f} s from start to end",
    )


def _measurement() -> HostMeasurement | str:
    try:
        return measure_host()
    except CalibrationError as error:
        return str(error)


def _links() -> LinkMeasurement | str:
    try:
        return measure_links()
    except (CalibrationError, ConfigError) as error:
        return str(error)


def _gpus() -> tuple[list[GpuDescription], str]:
    """NVIDIA devices, or the reason why there are none."""
    try:
        gpus = list_gpus()
    except ProbeError as error:
        return [], str(error)
    return gpus, "" if gpus else "NVML shows no device"


def _npus() -> tuple[list[NpuDescription], str]:
    """Ascend devices, or the reason why there are none."""
    try:
        return list_npus(), ""
    except ProbeError as error:
        return [], str(error)


def _host(
    measured: HostMeasurement | str | None, links: LinkMeasurement | str | None
) -> dict[str, Any]:
    device: dict[str, Any] = {
        "target": "CPU",
        "name": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": host_memory_bytes(),
    }
    if isinstance(measured, HostMeasurement):
        device["copy_bytes_per_s"] = measured.copy_bytes_per_s
        device["cores_used_while_measuring"] = measured.cores_used
        device["measurement_disturbed"] = measured.disturbed
    if isinstance(links, LinkMeasurement):
        device["allreduce_ranks"] = links.num_ranks
        device["allreduce_bytes_per_s"] = links.bytes_per_s
        device["allreduce_latency_s"] = links.latency_s
    return device


def _gpu(gpu: GpuDescription) -> dict[str, Any]:
    capability = gpu.compute_capability
    return {
        "target": "GPU",
        "index": gpu.index,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "memory_bytes": gpu.memory_bytes,
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
        "driver": gpu.driver,
        "peaks": _known_peaks(gpu.name),
    }


def _npu(npu: NpuDescription) -> dict[str, Any]:
    return {
        "target": "Ascend",
        "npu": npu.npu,
        "chip": npu.chip,
        "name": npu.name,
        "health": npu.health,
        "memory_bytes": npu.reading.device_memory_total_bytes,
        "peaks": _known_peaks(npu.name),
    }


def _known_peaks(device_name: str) -> dict[str, Any]:
    """By precision, FLOP/s and source from the table, or null and the reason."""
    found = {precision: look_up_peak(device_name, precision) for precision in PRECISIONS}
    return {
        precision: {"flops": None if peak is None else peak.flops, "source": reason}
        for precision, (peak, reason) in found.items()
    }
