"""Drivers that hang, crawl or die beside a training: no step waits, and memory still alarms."""

import os
import time

import pytest

from mindtune.controller.contract import RunConditions, read_document
from mindtune.controller.device import DeferredProbe, SamplingThread
from mindtune.controller.device.npu_smi import NpuSmiProbe
from mindtune.controller.live.conditions import write_conditions
from mindtune.controller.live.workload import Workload
from mindtune.policies import detectors
from mindtune.policies.detectors import DetectorState
from mindtune.policies.findings import FindingKind
from mindtune.policies.signals import Observation

TABLE = """\
| 0     910B3               | OK            | 101.8       43                0    / 0             |
| 0                         | 0000:C1:00.0  | 87          0    / 0          {used}/ 65536         |
"""
WAIT = "while [ ! -e {} ]; do sleep 0.02; done"


@pytest.fixture
def on_path(npu_smi, monkeypatch):
    """Writes an `npu-smi` and puts it in front of PATH."""

    def write(body):
        tool = npu_smi(body)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
        for name in ("DEVICE_ID", "ASCEND_RT_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        return tool

    return write


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("the condition did not come true")


def printing(used):
    return "cat <<'END'\n" + TABLE.format(used=used) + "END"


def test_a_tool_that_hangs_from_its_first_call_on_holds_up_nothing(on_path, tmp_path):
    gate, waiting = tmp_path / "gate", tmp_path / "waiting"
    on_path(f"echo > {waiting}; {WAIT.format(gate)}\n{printing(9999)}")
    with SamplingThread(DeferredProbe("Ascend"), period_s=0.01) as sampler:
        until(waiting.exists)
        # The tool waits for the gate, which opens after these steps only.
        readings = [sampler.reading() for _ in range(1000)]
        assert all(reading.device_memory_used_bytes is None for reading in readings)
        assert sampler.mean_utilization(5.0) is None
        gate.touch()
        until(lambda: sampler.latest() is not None)
        assert sampler.reading().device_utilization == 0.87


def test_a_tool_that_dies_says_so_once_and_comes_back(on_path, tmp_path, caplog):
    broken = tmp_path / "broken"
    tool = on_path(f"[ ! -e {broken} ] || exit 1\n{printing(9999)}")
    probe = NpuSmiProbe(command=str(tool))
    probe.min_period_s = 0.01  # its own is 2 s
    with SamplingThread(probe, period_s=0.01) as sampler:
        until(lambda: sampler.latest() is not None)
        broken.touch()
        until(lambda: sampler.last_error is not None)
        assert "exit code 1" in sampler.last_error
        assert sampler.reading() is not None
        broken.unlink()
        until(lambda: sampler.last_error is None)
    assert sum("cannot be read" in record.message for record in caplog.records) == 1


def test_a_device_without_a_driver_reads_nothing(monkeypatch):
    monkeypatch.setenv("PATH", "")
    probe = DeferredProbe("Ascend")
    assert probe.read().device_memory_used_bytes is None
    assert (probe.name, probe.min_period_s) == ("none", 10.0)
    probe.close()


@pytest.mark.parametrize(("used", "alarms"), [(55_600, False), (55_800, True)])
def test_memory_alarms_above_85_percent_as_the_driver_tells_it(on_path, used, alarms):
    on_path(printing(used))
    reading = DeferredProbe("Ascend").read()
    step = Observation(
        step=1,
        loss=1.0,
        device_memory_used_bytes=reading.device_memory_used_bytes,
        device_memory_total_bytes=reading.device_memory_total_bytes,
    )
    findings, _ = detectors.update(step, DetectorState())
    assert [entry.kind for entry in findings] == [FindingKind.MEMORY_PRESSURE] * alarms


def test_the_conditions_do_not_wait_for_a_driver(on_path, tmp_path):
    gate = tmp_path / "gate"
    on_path(f"{WAIT.format(gate)}\n{printing(9999)}")
    thread = write_conditions(tmp_path, Workload(), num_devices=8, device="Ascend", seed=0)
    told = read_document(RunConditions, tmp_path / RunConditions.FILE)
    assert (told.num_devices, told.hardware) == (8, None)
    gate.touch()
    thread.join(20)
    assert read_document(RunConditions, tmp_path / RunConditions.FILE).hardware == "910B3"
