"""Verdicts of `doctor`: each says of one feature whether it works here, and why or why not."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mindtune.controller.alerts.alert import doctor_alert
from mindtune.controller.alerts.courier import send_once
from mindtune.controller.alerts.send import CHANNELS
from mindtune.controller.device.host import cpu_name, usable_cores

if TYPE_CHECKING:
    from mindtune.controller.device.npu_smi import NpuDescription
    from mindtune.controller.device.nvml import GpuDescription

__all__ = [
    "Verdict",
    "check_alerts",
    "check_ascend",
    "check_below",
    "check_cpu",
    "check_gpu",
    "check_mindformers",
    "check_mindspore",
    "check_modules",
    "check_msrun",
    "check_numpy",
    "check_postgresql",
    "check_search",
    "check_tool",
    "send_test_alert",
]

_MINDSPORE_LEAST = (2, 7, 2)
_MINDSPORE_TESTED = "2.7.2 to 2.10"
_MINDSPORE_UNTESTED = (2, 11)
# The wheel's CUDA kernels are built for compute capabilities up to 8.6; such code also runs on
# later 8.x, not on 9.0 and above.
_CUDA_CAPABILITY_LIMIT = (9, 0)
_CUDA_LIBRARIES = ("libcudart.so.11*", "libcudnn.so.8*")
_LIBRARY_FOLDERS = ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")
_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH")
_CANN_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")


class Verdict(NamedTuple):
    """Whether a feature works, and why or why not."""

    ok: bool
    why: str


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: `2.10.0rc1` is (2, 10, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def check_mindspore(versions: dict[str, str | None]) -> Verdict:
    """MindSpore is installed in a version that this package works with."""
    version = versions["mindspore"]
    if version is None:
        return Verdict(
            ok=False,
            why="not installed; wheels exist for Linux with Python 3.10 to 3.12: "
            "pip install 'mindspore>=2.7.2,<3'",
        )
    numbers = _numbers(version)
    if numbers < _MINDSPORE_LEAST or numbers >= (3,):
        return Verdict(
            ok=False, why=f"{version} is outside the range >=2.7.2,<3; tested: {_MINDSPORE_TESTED}"
        )
    if numbers >= _MINDSPORE_UNTESTED:
        return Verdict(ok=True, why=f"{version}, newer than tested ({_MINDSPORE_TESTED})")
    return Verdict(ok=True, why=f"{version}, in the tested range {_MINDSPORE_TESTED}")


def check_numpy(versions: dict[str, str | None]) -> Verdict:
    """NumPy is of the series that MindSpore's wheel is compiled against."""
    return check_below(
        versions,
        "numpy",
        (2,),
        "MindSpore's wheel is compiled against NumPy 1: PyNative mode crashes with NumPy 2",
    )


def check_below(
    versions: dict[str, str | None], package: str, limit: tuple[int, ...], reason: str
) -> Verdict:
    """A package is installed below a version; `reason` says why that matters."""
    version = versions[package]
    bound = ".".join(map(str, limit))
    if version is None:
        return Verdict(ok=False, why=f"not installed: pip install '{package}<{bound}'")
    if _numbers(version) >= limit:
        return Verdict(ok=False, why=f"{version}; {reason}: pip install '{package}<{bound}'")
    return Verdict(ok=True, why=version)


def check_cpu(mindspore: Verdict, numpy: Verdict) -> Verdict:
    """Training on the CPU target."""
    for name, verdict in (("mindspore", mindspore), ("numpy", numpy)):
        if not verdict.ok:
            return Verdict(ok=False, why=f"{name}: {verdict.why}")
    return Verdict(ok=True, why=f"{usable_cores():g} usable core(s) of {cpu_name()}")


def check_gpu(mindspore: Verdict, gpus: list[GpuDescription], problem: str) -> Verdict:
    """Training on NVIDIA devices; `problem` says why there are none."""
    if not gpus:
        return Verdict(ok=False, why=problem)
    if not mindspore.ok:
        return Verdict(ok=False, why=f"mindspore: {mindspore.why}")
    if not _plugin("gpu*"):
        return Verdict(ok=False, why="this build of MindSpore has no CUDA back end")
    too_new = [
        gpu
        for gpu in gpus
        if gpu.compute_capability and gpu.compute_capability >= _CUDA_CAPABILITY_LIMIT
    ]
    if len(too_new) == len(gpus):
        major, minor = too_new[0].compute_capability or _CUDA_CAPABILITY_LIMIT
        return Verdict(
            ok=False,
            why=f"{too_new[0].name} has compute capability {major}.{minor}, but MindSpore's CUDA "
            "kernels are built up to 8.6 and do not run on 9.0 and above",
        )
    missing = [name for name in _CUDA_LIBRARIES if not _library(name)]
    if missing:
        return Verdict(
            ok=False,
            why=f"the CUDA back end needs CUDA 11 and cuDNN 8, but {' and '.join(missing)} is in "
            "no library folder; add theirs to LD_LIBRARY_PATH",
        )
    return Verdict(ok=True, why=f"{len(gpus) - len(too_new)} device(s), first: {gpus[0].name}")


def check_ascend(mindspore: Verdict, npus: list[NpuDescription], problem: str) -> Verdict:
    """Training on Ascend devices; `problem` says why there are none."""
    if not npus:
        return Verdict(ok=False, why=problem)
    if not mindspore.ok:
        return Verdict(ok=False, why=f"mindspore: {mindspore.why}")
    if not _plugin("ascend"):
        return Verdict(ok=False, why="this build of MindSpore has no Ascend back end")
    toolkit = [os.environ[name] for name in _CANN_VARIABLES if os.environ.get(name)]
    if not any(Path(folder).exists() for folder in (*toolkit, *_CANN_FOLDERS)):
        return Verdict(
            ok=False,
            why="the CANN toolkit is not found; install it and source its set_env.sh, which sets "
            f"{_CANN_VARIABLES[0]}",
        )
    unhealthy = [f"{npu.npu}.{npu.chip}: {npu.health}" for npu in npus if npu.health != "OK"]
    note = f"; not healthy: {', '.join(unhealthy)}" if unhealthy else ""
    return Verdict(
        ok=len(unhealthy) < len(npus), why=f"{len(npus)} device(s), {npus[0].name}{note}"
    )


def _plugin(pattern: str) -> bool:
    """Whether MindSpore's folder holds a back end; the package itself is not imported."""
    spec = importlib.util.find_spec("mindspore")
    if spec is None or spec.origin is None:
        return False
    return any((Path(spec.origin).parent / "lib" / "plugin").glob(pattern))


def _library(pattern: str) -> bool:
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *_LIBRARY_FOLDERS]
    return any(any(Path(folder).glob(pattern)) for folder in folders if folder)


def check_msrun() -> Verdict:
    """MindSpore's launcher of several ranks is installed."""
    # The console script stands beside the interpreter even where the environment is not active.
    beside = Path(sys.executable).parent / "msrun"
    found = shutil.which("msrun") or (str(beside) if beside.exists() else None)
    if found is None:
        return Verdict(ok=False, why="msrun is not found; it comes with MindSpore")
    return Verdict(ok=True, why="found; starts trials of several ranks")


def check_tool(command: str, title: str, otherwise: str) -> Verdict:
    """A command is on PATH; `otherwise` says who needs it."""
    if shutil.which(command) is None:
        return Verdict(ok=False, why=f"{title} is not on PATH; {otherwise}")
    return Verdict(ok=True, why=f"{title} is on PATH")


def check_modules(*names: str, purpose: str) -> Verdict:
    """Modules are installed; `purpose` says what for."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        return Verdict(ok=False, why=f"pip install {' '.join(missing)}: {purpose}")
    return Verdict(ok=True, why=f"{', '.join(names)} installed")


def check_search(versions: dict[str, str | None]) -> Verdict:
    """Optuna is installed in the series that the search works with."""
    version = versions["optuna"]
    if version is None or not (5,) <= _numbers(version) < (6,):
        return Verdict(ok=False, why=f"needs optuna>=5,<6, but has {version or 'none'}")
    return Verdict(ok=True, why=f"Optuna {version}")


def check_postgresql() -> Verdict:
    """A PostgreSQL driver for SQLAlchemy is installed."""
    for driver in ("psycopg", "psycopg2", "pg8000"):
        if importlib.util.find_spec(driver) is not None:
            return Verdict(ok=True, why=f"driver {driver} installed")
    return Verdict(
        ok=False, why="pip install 'psycopg[binary]'; only searches on several machines need it"
    )


def check_alerts(versions: dict[str, str | None]) -> Verdict:
    """Apprise is installed in the series that alerts are sent with."""
    version = versions["apprise"]
    if version is None or not (1, 9, 4) <= _numbers(version) < (3,):
        return Verdict(ok=False, why=f"needs apprise>=1.9.4,<3, but has {version or 'none'}")
    forms = ", ".join(f"{service} {form}" for service, form in CHANNELS.items())
    return Verdict(ok=True, why=f"apprise {version}; {forms}")


def send_test_alert(address: str) -> Verdict:
    """Send an alert to what an environment variable names, and wait for the answer.

    Args:
        address: env:NAME.
    """
    target, problem = send_once(address, doctor_alert(socket.gethostname()))
    why = f"{target}: {problem}" if problem else f"{target} took a test alert"
    return Verdict(ok=not problem, why=why)


def check_mindformers(versions: dict[str, str | None]) -> Verdict:
    """MindFormers is installed."""
    version = versions["mindformers"]
    if version is None:
        return Verdict(ok=False, why="not installed; only trials that run MindFormers need it")
    return Verdict(ok=True, why=version)
