"""The host as a device, with real processes."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from mindtune.controller.device import choose_probe
from mindtune.controller.device.host import (
    HostProbe,
    _busy_s,
    host_memory_bytes,
    usable_cores,
)
from mindtune.controller.device.reading import ProbeError
from mindtune.controller.errors import ConfigError


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_utilization_is_processor_time_over_wall_time_and_cores(monkeypatch):
    monkeypatch.setattr("mindtune.controller.device.host._busy_s", lambda: 0.0)
    now = [100.0]
    probe = HostProbe(clock=lambda: now[0])
    burn(0.2)
    now[0] += 1.0
    # 0.2 s of processor time in one second of the injected clock; the kernel counts in ticks.
    assert probe.read().device_utilization == pytest.approx(0.2 / usable_cores(), abs=0.03)
    now[0] += 1.0
    assert probe.read().device_utilization == pytest.approx(0.0, abs=0.03)


def test_time_that_others_take_is_not_idleness(monkeypatch):
    now, busy = [100.0], [50.0]
    monkeypatch.setattr("mindtune.controller.device.host._busy_s", lambda: busy[0])
    probe = HostProbe(clock=lambda: now[0])
    burn(0.2)
    now[0] += 1.0
    # All cores were busy for the whole second: there was nothing more to have.
    busy[0] += usable_cores()
    assert probe.read().device_utilization == pytest.approx(1.0, abs=0.01)
    now[0] += 1.0
    busy[0] += 0.5 * usable_cores()
    burn(0.1)
    assert probe.read().device_utilization == pytest.approx(
        0.1 / (0.5 * usable_cores() + 0.1), abs=0.04
    )


def test_a_reading_over_almost_no_time_has_no_utilization(monkeypatch):
    monkeypatch.setattr("mindtune.controller.device.host._busy_s", lambda: 0.0)
    now = [100.0]
    probe = HostProbe(clock=lambda: now[0])
    now[0] += 0.01
    first = probe.read()
    assert first.device_utilization is None
    assert first.device_memory_used_bytes > 0
    burn(0.2)
    now[0] += 0.99
    assert probe.read().device_utilization == pytest.approx(0.2 / usable_cores(), abs=0.03)


def test_busy_time_counts_every_process_of_the_machine():
    before = _busy_s()
    burn(0.3)
    assert _busy_s() - before >= 0.25 or usable_cores() < len(os.sched_getaffinity(0))


def test_time_of_child_processes_counts(monkeypatch):
    monkeypatch.setattr("mindtune.controller.device.host._busy_s", lambda: 0.0)

    code = "import sys\nprint('ready', flush=True)\nsys.stdin.readline()\nwhile True: pass"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "ready\n"
        now = [0.0]
        probe = HostProbe(clock=lambda: now[0])
        before = psutil.Process(child.pid).cpu_times().user
        child.stdin.write("go\n")
        child.stdin.flush()
        end = time.monotonic() + 30
        while psutil.Process(child.pid).cpu_times().user < before + 0.3:
            assert time.monotonic() < end
            time.sleep(0.01)
        now[0] += 1.0
        assert probe.read().device_utilization >= 0.25 / usable_cores()
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    ("thread", "kind", "low", "high"),
    [
        ("KernelThread_0", "yield", 0.0, 0.4),
        ("KernelThread_0", "work", 0.9, 1.1),
        # Only the framework's workers are known to wait in this way.
        ("my) thread 1 2", "yield", 0.9, 1.1),
    ],
)
def test_a_worker_that_waits_in_a_loop_is_idle(
    worker_thread, monkeypatch, thread, kind, low, high
):
    monkeypatch.setattr("mindtune.controller.device.host._busy_s", lambda: 0.0)
    program = subprocess.Popen([worker_thread, thread, kind], stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout.readline() == "ready\n"
        now, process = [0.0], psutil.Process(program.pid)
        probe = HostProbe(pid=program.pid, clock=lambda: now[0])
        before, end = sum(process.cpu_times()[:2]), time.monotonic() + 20
        while (used := sum(process.cpu_times()[:2]) - before) < 0.5:
            if time.monotonic() > end:
                pytest.skip("a thread that yields its core gets none beside other work")
            time.sleep(0.01)
        now[0] += 1.0
        share = probe.read().device_utilization * usable_cores() / used
        assert low <= share <= high
    finally:
        program.kill()
        program.communicate()


def test_a_worker_seen_late_counts_from_then_on(monkeypatch):
    monkeypatch.setattr("mindtune.controller.device.host._busy_s", lambda: 0.0)
    workers = {"seen": {}}
    monkeypatch.setattr(
        "mindtune.controller.device.host.WorkerThreads.waited_s", lambda self: workers["seen"]
    )
    now = [0.0]
    probe = HostProbe(clock=lambda: now[0])
    burn(0.2)
    now[0], workers["seen"] = 1.0, {"7": 90.0}
    assert probe.read().device_utilization == pytest.approx(0.2 / usable_cores(), abs=0.03)
    burn(0.2)
    now[0], workers["seen"] = 2.0, {"7": 90.1}
    assert probe.read().device_utilization == pytest.approx(0.1 / usable_cores(), abs=0.03)


@pytest.mark.parametrize(("others", "worked"), [(0.1, 0.1), (0.3, 0.2)])
def test_workers_that_wait_because_others_hold_the_cores_are_not_idle(monkeypatch, others, worked):
    busy, waited, now = [0.0], {}, [0.0]
    monkeypatch.setattr("mindtune.controller.device.host._busy_s", lambda: busy[0])
    monkeypatch.setattr(
        "mindtune.controller.device.host.WorkerThreads.waited_s", lambda self: dict(waited)
    )
    waited["7"] = 0.0
    probe = HostProbe(clock=lambda: now[0])
    burn(0.2)
    now[0], waited["7"] = 1.0, 0.1
    busy[0] = others * usable_cores() + 0.2
    left = (1.0 - others) * usable_cores()
    assert probe.read().device_utilization == pytest.approx(worked / left, abs=0.04)


def test_memory_is_that_of_the_process_and_the_machine():
    block = bytearray(64 * 2**20)
    probe = HostProbe()
    with_block = probe.read()
    del block
    without = probe.read()
    freed = with_block.device_memory_used_bytes - without.device_memory_used_bytes
    assert 56 * 2**20 <= freed <= 72 * 2**20
    assert with_block.device_memory_total_bytes == host_memory_bytes()
    assert host_memory_bytes() <= psutil.virtual_memory().total
    assert with_block.device_power_w is None


def test_a_process_that_is_gone_is_an_error():
    child = subprocess.Popen(["sleep", "60"])
    probe = HostProbe(pid=child.pid)
    child.kill()
    child.wait()
    with pytest.raises(ProbeError, match="is gone"):
        probe.read()


def test_usable_cores_follow_the_affinity():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert 0 < usable_cores() <= 1.0
    finally:
        os.sched_setaffinity(0, allowed)
    assert 0 < usable_cores() <= len(allowed)


@pytest.mark.parametrize(
    ("own", "files"),
    [
        # Version 2: a container's root, and a batch job's group with the limit above it.
        ("0::/", {"cpu.max": "50000 100000", "memory.max": "1048576"}),
        ("0::/job_7/step_0", {
            "job_7/cpu.max": "50000 100000", "job_7/memory.max": "1048576",
            "job_7/step_0/cpu.max": "max 100000", "job_7/step_0/memory.max": "max",
        }),
        # Version 1, in a container that shows its own groups as the roots.
        ("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/x", {
            "cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": "1048576",
        }),
    ],
)  # fmt: skip
def test_limits_of_containers_and_batch_jobs_hold(tmp_path, monkeypatch, own, files):
    (tmp_path / "own").write_text(own + "\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr("mindtune.controller.device.host._CGROUP", tmp_path)
    monkeypatch.setattr("mindtune.controller.device.host._OWN_CGROUPS", tmp_path / "own")
    assert (usable_cores(), host_memory_bytes()) == (0.5, 2**20)


def test_without_limits_the_machine_counts(tmp_path, monkeypatch):
    (tmp_path / "own").write_text("4:memory:/\n3:cpu,cpuacct:/\n")
    for name, text in (("cpu/cpu.cfs_quota_us", "-1"), ("cpu/cpu.cfs_period_us", "100000"),
                       ("memory/memory.limit_in_bytes", "9223372036854771712")):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr("mindtune.controller.device.host._CGROUP", tmp_path)
    monkeypatch.setattr("mindtune.controller.device.host._OWN_CGROUPS", tmp_path / "own")
    assert usable_cores() == len(os.sched_getaffinity(0))
    assert host_memory_bytes() == psutil.virtual_memory().total


def test_the_cpu_target_is_read_from_the_host():
    choice = choose_probe("CPU")
    assert choice.why.startswith("device target CPU, read by host")
    choice.probe.close()


@pytest.mark.parametrize("target", ["GPU", "Ascend"])
def test_a_device_without_driver_is_never_replaced_by_the_host(target, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    choice = choose_probe(target)
    assert choice.probe.name == "none"
    assert choice.probe.read().device_utilization is None
    assert choice.why.startswith("device signals are not available: ")


def test_an_unknown_target_is_refused():
    with pytest.raises(ConfigError, match="must be CPU, GPU or Ascend, but got 'TPU'"):
        choose_probe("TPU")
