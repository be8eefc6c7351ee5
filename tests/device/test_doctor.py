"""What `doctor` says of this machine and of machines with drivers that the tests bring."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from mindtune.controller import doctor
from mindtune.controller.cli.app import main
from mindtune.controller.contract.outputs import DoctorOutput
from mindtune.controller.doctor import collect_doctor
from mindtune.controller.doctor_checks import check_below, check_mindspore
from mindtune.controller.metrics.calibrate import CalibrationError, HostMeasurement
from mindtune.controller.metrics.links import LinkMeasurement
from mindtune.controller.metrics.peaks import Peak

A2_TABLE = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     910B3               | OK            | 101.8       43                0    / 0             |
| 0                         | 0000:C1:00.0  | 87          0    / 0          57784/ 65536         |
"""
GPU_DOCTOR = """
from mindtune.controller.doctor import collect_doctor
print(json.dumps(collect_doctor()))
"""


def usable(document):
    return {row["feature"]: (row["ok"], row["why"]) for row in document["usable"]}


def test_the_document_follows_the_contract():
    document = collect_doctor()
    DoctorOutput.model_validate(document)
    json.dumps(document, allow_nan=False)
    assert document["schema"] == 1
    assert document["versions"]["mindspore"] == importlib.metadata.version("mindspore")
    assert document["versions"]["python"] == sys.version.split()[0]
    assert document["devices"][0]["target"] == "CPU"
    assert document["peaks"] == []
    features = usable(document)
    assert len(features) == len(document["usable"])
    assert features["device_cpu"][0] is True
    assert features["launcher_msrun"][0] is True
    assert "graph_compile" not in features
    assert all(why for _, why in features.values())


def test_nothing_heavy_is_imported():
    code = (
        "import sys\nfrom mindtune.controller.doctor import collect_doctor\ncollect_doctor()\n"
        "print([m for m in ('mindspore', 'pandas', 'scipy', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("capability", "ok", "part"),
    [
        ("9 0", False, "compute capability 9.0, but MindSpore's CUDA kernels are built up to 8.6"),
        ("8 0", False, "libcudart.so.11* and libcudnn.so.8* is in no library folder"),
    ],
)
def test_an_nvidia_device_that_mindspore_cannot_use(run_with_nvml, capability, ok, part):
    document = run_with_nvml(
        GPU_DOCTOR, "count 1", "name NVIDIA H100 PCIe", "driver 550.1", "uuid.0 GPU-1",
        f"capability {capability}", "memory 0 85899345920",
    )  # fmt: skip
    DoctorOutput.model_validate(document)
    features = usable(document)
    assert features["signals_nvml"] == (True, "1 device(s)")
    assert features["device_gpu"][0] is ok
    assert part in features["device_gpu"][1]
    device = document["devices"][1]
    assert (device["name"], device["memory_bytes"]) == ("NVIDIA H100 PCIe", 80 * 2**30)
    assert device["peaks"]["bfloat16"]["flops"] == 756e12


def test_an_nvidia_device_with_cuda_11_is_usable(run_with_nvml, tmp_path, nvml_folder):
    for name in ("libcudart.so.11.0", "libcudnn.so.8"):
        (tmp_path / name).write_text("")
    document = run_with_nvml(
        GPU_DOCTOR, "count 2", "name NVIDIA A100-SXM4-40GB", "capability 8 0",
        LD_LIBRARY_PATH=f"{nvml_folder}{os.pathsep}{tmp_path}",
    )  # fmt: skip
    assert usable(document)["device_gpu"] == (True, "2 device(s), first: NVIDIA A100-SXM4-40GB")


@pytest.mark.parametrize("toolkit", [True, False])
def test_an_ascend_machine(npu_smi, monkeypatch, tmp_path, capsys, toolkit):
    tool = npu_smi(f"cat <<'TABLE'\n{A2_TABLE}TABLE")
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.delenv("ASCEND_OPP_PATH", raising=False)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path if toolkit else tmp_path / "none"))
    document = collect_doctor()
    features = usable(document)
    assert features["signals_npu_smi"] == (True, "1 device(s)")
    assert features["device_ascend"][0] is toolkit
    assert ("910B3" if toolkit else "CANN toolkit is not found") in features["device_ascend"][1]
    assert document["devices"][1]["peaks"]["float16"]["flops"] == 313e12
    assert document["devices"][1]["peaks"]["float32"]["flops"] is None
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "  peak in float16: 313 TFLOP/s (published: Atlas 800T A2" in shown
    assert "  peak in float32: - (no float32 peak is known for" in shown


@pytest.mark.parametrize(
    ("version", "ok", "part"),
    [
        ("2.7.2", True, "in the tested range"),
        ("2.10.0", True, "in the tested range"),
        ("2.10.0rc1", True, "in the tested range"),
        ("2.7.1", False, "outside the range"),
        ("2.7", False, "outside the range"),
        ("2.11.0", True, "newer than tested"),
        ("3.0.0", False, "outside the range"),
        (None, False, "not installed"),
    ],
)
def test_mindspore_versions(version, ok, part):
    verdict = check_mindspore({"mindspore": version})
    assert verdict.ok is ok
    assert part in verdict.why


@pytest.mark.parametrize(
    ("version", "ok"), [("1.26.4", True), ("2.0.0", False), ("2.1", False), (None, False)]
)
def test_numpy_2_is_refused(version, ok):
    assert check_below({"numpy": version}, "numpy", (2,), "reason").ok is ok


def test_measured_values_stand_in_the_document(monkeypatch):
    peak = Peak(
        flops=1e11, precision="float32", device="x", source="measured: x", certainty="measured"
    )
    measured = HostMeasurement(
        peaks=(peak,), copy_bytes_per_s=2e10, graph_compile_s=0.5, cores=2, cores_used=1.0,
        wall_s=6.0,
    )  # fmt: skip
    links = LinkMeasurement(
        num_ranks=2, bytes_per_s=2.5e8, latency_s=0.002, spread=0.1, wall_s=30.0
    )
    monkeypatch.setattr(doctor, "measure_host", lambda: measured)
    monkeypatch.setattr(doctor, "measure_links", lambda: links)
    document = collect_doctor(measure=True)
    DoctorOutput.model_validate(document)
    assert document["peaks"] == [peak.to_dict()]
    assert document["devices"][0]["copy_bytes_per_s"] == 2e10
    assert document["devices"][0]["measurement_disturbed"] is True
    assert document["devices"][0]["allreduce_bytes_per_s"] == 2.5e8
    assert usable(document)["graph_compile"][0] is True
    assert usable(document)["ranks_meet"] == (
        True, "2 ranks met under msrun and reduced at 250 MB/s, 30 s from start to end",
    )  # fmt: skip


def test_a_measurement_that_fails_is_a_verdict(monkeypatch):
    def fail():
        raise CalibrationError("the calibration ended with code 139: ")

    monkeypatch.setattr(doctor, "measure_host", fail)
    monkeypatch.setattr(doctor, "measure_links", fail)
    document = collect_doctor(measure=True)
    assert document["peaks"] == []
    for feature in ("graph_compile", "ranks_meet"):
        assert usable(document)[feature] == (False, "the calibration ended with code 139: ")
