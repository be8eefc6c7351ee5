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
def nvml_folder(tmp_path_factory):
    """Folder with the compiled stub `libnvidia-ml.so.1`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    target = folder / "libnvidia-ml.so.1"
    command = [compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(target)]
    subprocess.run([*command, str(HERE / "nvml_stub.c")], check=True, timeout=60)
    return folder


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
