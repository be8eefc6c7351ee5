"""NVML, for real through pynvml, against a library that answers from a file."""

import pytest

from mindtune.controller.device.nvml import NvmlProbe
from mindtune.controller.device.reading import ProbeError

GIB = 2**30
PLAIN = (
    "count 1",
    "name NVIDIA A100-SXM4-80GB",
    "utilization 73",
    f"memory {20 * GIB} {80 * GIB}",
    "temperature 61",
    "power 254321",
)
READ = """
from dataclasses import asdict
from mindtune.controller.device.nvml import NvmlProbe
probe = NvmlProbe()
print(json.dumps([probe.name, asdict(probe.read())]))
"""


def test_every_field_is_read_in_its_unit(run_with_nvml):
    name, reading = run_with_nvml(READ, *PLAIN)
    assert name == "nvml:0 (NVIDIA A100-SXM4-80GB)"
    assert reading == {
        "device_utilization": 0.73,
        "device_memory_used_bytes": 20 * GIB,
        "device_memory_total_bytes": 80 * GIB,
        "device_temperature_c": 61.0,
        "device_power_w": 254.321,
    }


@pytest.mark.parametrize(
    ("missing", "field"),
    [
        ("utilization", "device_utilization"),
        ("memory", "device_memory_used_bytes"),
        ("temperature", "device_temperature_c"),
        ("power", "device_power_w"),
    ],
)
# INVALID_ARGUMENT (as MIG slices answer), NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND
@pytest.mark.parametrize("code", [2, 3, 4, 13])
def test_an_unsupported_field_is_none_and_the_others_stay(run_with_nvml, missing, field, code):
    _, reading = run_with_nvml(READ, *PLAIN, f"error.{missing} {code}")
    assert reading[field] is None
    assert [k for k, v in reading.items() if v is None and not k.startswith(field[:13])] == []


def test_utilization_is_the_mean_of_the_samples_since_the_last_read(run_with_nvml):
    code = """
from mindtune.controller.device.nvml import NvmlProbe
def samples(*pairs):
    state("count 1", "utilization 99", *(f"sample {t} {p}" for t, p in pairs))
samples((1000, 100), (2000, 100))
probe = NvmlProbe()            # what was before belongs to no interval
samples((1000, 100), (2000, 100), (3000, 10), (4000, 30))
first = probe.read().device_utilization
samples((3000, 10), (4000, 30), (5000, 80))
second = probe.read().device_utilization
third = probe.read().device_utilization  # no new sample: the driver's current figure
print(json.dumps([first, second, third]))
"""
    assert run_with_nvml(code, *PLAIN) == [0.20, 0.80, 0.99]


def test_a_lost_device_raises_and_is_found_again(run_with_nvml):
    code = f"""
from mindtune.controller.device.nvml import NvmlProbe
from mindtune.controller.device.reading import ProbeError
plain = {PLAIN!r}
probe = NvmlProbe()
seen = []
for lines in ((*plain, "error.memory 15"), (*plain, "error.init 9"), plain):
    state(*lines)
    try:
        seen.append(probe.read().device_utilization)
    except ProbeError as error:
        seen.append(str(error))
probe.close()
probe.close()
print(json.dumps(seen))
"""
    lost, no_driver, again = run_with_nvml(code, *PLAIN)
    assert "nvml:0" in lost
    assert "GPU is lost" in lost
    assert "NVML does not start" in no_driver
    assert again == 0.73


FOUR = ("count 4", *(f"name.{i} card {i}" for i in range(4)), *(
    f"uuid.{i} GPU-{u}" for i, u in enumerate(["aa11", "aa22", "bb33", "cc44"])
))  # fmt: skip
NAME = """
from mindtune.controller.device.nvml import NvmlProbe
from mindtune.controller.device.reading import ProbeError
try:
    print(json.dumps(NvmlProbe().name))
except ProbeError as error:
    print(json.dumps("error: " + str(error)))
"""


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "nvml:0 (card 0)"),
        ({"DEVICE_ID": "2"}, "nvml:2 (card 2)"),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, "nvml:3 (card 3)"),
        ({"CUDA_VISIBLE_DEVICES": "3, 1", "LOCAL_RANK": "1"}, "nvml:1 (card 1)"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bb33"}, "nvml:GPU-bb33 (card 2)"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-cc,GPU-aa22", "DEVICE_ID": "1"}, "nvml:GPU-aa22 (card 1)"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b"}, "nvml:GPU-b (card 2)"),
    ],
)
def test_the_device_is_the_one_that_this_process_sees(run_with_nvml, environ, name):
    assert run_with_nvml(NAME, *FOUR, **environ) == name


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa"}, "fits 2 of 4 devices"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-zz"}, "fits 0 of 4 devices"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "makes 0 device(s) visible"),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2", "DEVICE_ID": "1"}, "makes 1 device(s) visible"),
        ({"CUDA_VISIBLE_DEVICES": "7"}, "NVIDIA device 7"),
    ],
)
def test_a_device_that_is_not_there_is_named(run_with_nvml, environ, message):
    assert message in run_with_nvml(NAME, *FOUR, **environ)


def test_a_slow_driver_delays_no_step(run_with_nvml):
    code = """
import time
from mindtune.controller.device import SamplingThread, choose_probe
choice = choose_probe("GPU")
state("count 1", "utilization 50", "sleep_ms 400")
with SamplingThread(choice.probe, period_s=0.2) as sampler:
    slowest, seen, end = 0.0, None, time.monotonic() + 10
    while seen is None and time.monotonic() < end:
        begin = time.perf_counter()
        seen = sampler.latest()
        sampler.mean_utilization(5.0)
        slowest = max(slowest, time.perf_counter() - begin)
        time.sleep(0.001)
print(json.dumps([choice.why, seen.reading.device_utilization, slowest]))
"""
    why, utilization, slowest_s = run_with_nvml(code, *PLAIN)
    assert why == "device target GPU, read by nvml:0 (NVIDIA A100-SXM4-80GB)"
    assert utilization == 0.5
    assert slowest_s < 0.2


def test_without_a_driver_the_probe_says_so(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ProbeError, match="NVML does not start"):
        NvmlProbe()
