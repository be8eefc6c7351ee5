"""Drivers to probe: a small NVML compiled from C, and an npu-smi that prints what a test says."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def compile_c():
    """Compiles a C file of this folder: source, target, further options."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")

    def compile_file(source, target, *options):
        command = [compiler, "-Wall", "-Werror", *options, "-o", str(target), str(HERE / source)]
        subprocess.run(command, check=True, timeout=60)
        return target

    return compile_file


@pytest.fixture(scope="session")
def nvml_folder(compile_c, tmp_path_factory):
    """Folder with the compiled stub `libnvidia-ml.so.1`."""
    folder = tmp_path_factory.mktemp("nvml")
    compile_c("nvml_stub.c", folder / "libnvidia-ml.so.1", "-shared", "-fPIC")
    return folder


@pytest.fixture(scope="session")
def worker_thread(compile_c, tmp_path_factory):
    """Program with one thread of a given name that `yield`s in a loop or does `work`."""
    folder = tmp_path_factory.mktemp("worker")
    return compile_c("worker_thread.c", folder / "worker_thread", "-O1", "-pthread")


@pytest.fixture
def run_with_nvml(nvml_folder, tmp_path):
    """Runs Python code against the stub; `state(...)` there rewrites what the driver answers."""
    file = tmp_path / "nvml_state"
    prelude = (
        "import json, os\n"
        "from pathlib import Path\n"
        "def state(*lines):\n"
        "    fresh = Path(os.environ['NVML_STUB_FILE'] + '.new')\n"
        "    fresh.write_text('\\n'.join(lines) + '\\n')\n"
        "    fresh.replace(os.environ['NVML_STUB_FILE'])\n"
    )

    def run(code, *lines, **environ):
        file.write_text("\n".join(lines) + "\n")
        base = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "DEVICE_ID"))}
        done = subprocess.run(
            [sys.executable, "-c", prelude + code],
            env={**base, "LD_LIBRARY_PATH": str(nvml_folder), "NVML_STUB_FILE": str(file)}
            | environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def npu_smi(tmp_path):
    """Writes an executable `npu-smi` with the given shell body; returns its path."""

    def write(body):
        folder = tmp_path / "ascend_bin"
        folder.mkdir(exist_ok=True)
        tool = folder / "npu-smi"
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        return tool

    return write
