"""Which devices each of several trials on one machine gets."""

import pytest

from mindtune.controller.device import hardware, slots
from mindtune.controller.device.host import cpu_name
from mindtune.controller.device.nvml import GpuDescription
from mindtune.controller.device.reading import ProbeError
from mindtune.controller.device.slots import DevicePool, device_pool, device_slots


def absent():
    raise ProbeError("no driver")


def gpus(count):
    return [
        GpuDescription(index=i, name="H200", uuid=None, memory_bytes=None,
                       compute_capability=None, driver=None)
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """Return what sets the numbers of devices that the drivers show."""

    def show(*, num_gpus=0, npus=0):
        monkeypatch.setattr(slots, "list_gpus", lambda: gpus(num_gpus))
        monkeypatch.setattr(slots, "list_npus", (lambda: [None] * npus) if npus else absent)

    return show


@pytest.mark.parametrize(
    ("environ", "pool"),
    [
        ({}, DevicePool("CUDA_VISIBLE_DEVICES", ("0", "1", "2", "3"))),
        # The user's own list is the pool, in its order, up to the first entry that CUDA ends at.
        ({"CUDA_VISIBLE_DEVICES": "3, 1"}, DevicePool("CUDA_VISIBLE_DEVICES", ("3", "1"))),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ab,-1,2"}, DevicePool("CUDA_VISIBLE_DEVICES", ("GPU-ab",))),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None),  # as Slurm sets it without devices
        ({"CUDA_VISIBLE_DEVICES": "1,1,2"}, DevicePool("CUDA_VISIBLE_DEVICES", ("1", "2"))),
        ({"CUDA_VISIBLE_DEVICES": "1,4,2"}, DevicePool("CUDA_VISIBLE_DEVICES", ("1",))),
        (
            {"CUDA_VISIBLE_DEVICES": "MIG-1a,GPU-2b"},
            DevicePool("CUDA_VISIBLE_DEVICES", ("MIG-1a", "GPU-2b")),
        ),
        # A list for devices of another kind, such as one that a profile sets.
        (
            {"ASCEND_RT_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "2"},
            DevicePool("CUDA_VISIBLE_DEVICES", ("2",)),
        ),
    ],
)
def test_the_pool_is_what_the_user_made_visible_or_all(machine, environ, pool):
    machine(num_gpus=4)
    assert device_pool("H200", environ) == pool
    assert device_pool("cpu", environ) is None


def test_the_pool_of_an_ascend_host_is_its_dies(machine):
    machine(npus=8)
    pool = device_pool("Ascend910B-A2", {"CUDA_VISIBLE_DEVICES": "0"})
    assert pool == DevicePool("ASCEND_RT_VISIBLE_DEVICES", tuple("01234567"))
    # CANN takes numbers in ascending order alone.
    pool = device_pool("Ascend910B-A2", {"ASCEND_RT_VISIBLE_DEVICES": "5,4,GPU-1,2"})
    assert pool == DevicePool("ASCEND_RT_VISIBLE_DEVICES", ("4", "5"))
    machine()
    assert device_pool("Ascend910B-A2", {}) is None
    # Where the driver cannot be asked, the list is believed.
    pool = device_pool("Ascend910B-A2", {"ASCEND_RT_VISIBLE_DEVICES": "4,5"})
    assert pool == DevicePool("ASCEND_RT_VISIBLE_DEVICES", ("4", "5"))


def test_a_divided_gpu_stands_in_the_pool_with_its_instances(run_with_nvml):
    code = """
from dataclasses import asdict
from mindtune.controller.device.slots import device_pool, device_slots
pool = device_pool("H100", {})
print(json.dumps([pool.devices, device_slots(pool, 1), device_slots(pool, 2)]))
"""
    state = (
        "count 4",
        *(f"uuid.{i} GPU-{i}" for i in range(4)),
        "mig.0 MIG-a - MIG-b",
        "mig.2 MIG-c",
    )
    devices, alone, pairs = run_with_nvml(code, *state)
    assert devices == ["MIG-a", "MIG-b", "1", "MIG-c", "3"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in alone] == devices
    # A process sees one instance at most, so that a trial on two devices gets whole ones.
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in pairs] == ["1,3"]


def test_slots_share_no_device():
    pool = DevicePool("CUDA_VISIBLE_DEVICES", tuple("76543210"))
    assert [s["CUDA_VISIBLE_DEVICES"] for s in device_slots(pool, 2)] == [
        "7,6",
        "5,4",
        "3,2",
        "1,0",
    ]
    # What is left over serves no trial.
    assert [s["CUDA_VISIBLE_DEVICES"] for s in device_slots(pool, 3)] == ["7,6,5", "4,3,2"]
    assert device_slots(pool, 9) == []


def test_hardware_is_named_by_kind(monkeypatch):
    monkeypatch.setattr(hardware, "list_npus", absent)
    monkeypatch.setattr(hardware, "list_gpus", lambda: gpus(4))
    assert hardware.describe_hardware("H200") == "H200"
    assert hardware.describe_hardware("cpu").startswith(cpu_name())
    monkeypatch.setattr(hardware, "list_gpus", absent)
    assert hardware.describe_hardware("H200").startswith(cpu_name())
