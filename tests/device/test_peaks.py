"""The table of peaks: names, ambiguity, and that nothing is guessed."""

import pytest

from mindtune.controller.errors import ConfigError
from mindtune.controller.metrics.peaks import (
    PRECISIONS,
    Peak,
    known_devices,
    look_up_peak,
    peak_flops,
    shared_peak,
)


@pytest.mark.parametrize(
    ("name", "precision", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100 80GB PCIe", "float16", 312e12),
        ("NVIDIA A100-SXM-80GB", "bfloat16", 312e12),
        ("A100-80GB", "float32", 19.5e12),
        ("A100", "bfloat16", 312e12),
        ("Tesla V100-SXM2-32GB", "float16", 125e12),
        ("V100-32GB", "float16", 125e12),
        ("Tesla V100-PCIE-16GB", "float16", 112e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("H100-80GB", "bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "bfloat16", 989.4e12),
        ("NVIDIA H20", "bfloat16", 148e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA GeForce RTX 4090", "float16", 165.2e12),
        ("Tesla T4", "float16", 65e12),
        ("Ascend910B-A2", "bfloat16", 313e12),
        ("Ascend910B-PODc", "bfloat16", 353.9e12),
        ("Ascend910B1", "float16", 378.9e12),
        ("910B2", "bfloat16", 353.9e12),
        ("Ascend910B2C", "bfloat16", 353.9e12),
        ("910B3", "float16", 313e12),
        ("Ascend910B3", "bfloat16", 313e12),
        ("910B4", "float16", 280e12),
        ("Ascend910B4-1", "float16", 280e12),
        ("910A", "float16", 256e12),
        ("Ascend910C-A3", "bfloat16", 752e12),
    ],
)
def test_known_names(name, precision, flops):
    peak = peak_flops(name, precision)
    assert peak.flops == pytest.approx(flops)
    assert peak.precision == precision
    assert peak.source
    assert peak.spread is None


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("H100", "may be H100-80GB, H100-PCIE, H100-NVL, H100-96GB"),
        ("V100", "may be V100-16GB, V100-32GB, V100-PCIE"),
        ("Ascend910B", "may be Ascend910B-A2, Ascend910B-PODc"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "no peak is known"),
        ("NVIDIA GeForce RTX 4090 D", "no peak is known"),
        ("NVIDIA A10G", "no peak is known"),
        ("Ascend910", "no peak is known"),
        ("Ascend910_9391", "no peak is known"),
        ("AMD EPYC", "no peak is known"),
        ("80GB", "no peak is known"),
        ("PCIe", "no peak is known"),
        ("NVIDIA", "no peak is known"),
        ("", "no peak is known"),
    ],
)
def test_an_unknown_or_ambiguous_name_has_a_reason_and_no_peak(name, part):
    found = look_up_peak(name, "float16")
    assert found.peak is None
    assert part in found.reason
    assert peak_flops(name, "float16") is None


def test_a_precision_that_the_device_lacks_is_none():
    found = look_up_peak("Ascend910A", "bfloat16")
    assert found.peak is None
    assert found.reason == "no bfloat16 peak is known for Ascend910A."


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="float32, float16, bfloat16, but got 'fp8'"):
        peak_flops("A100", "fp8")


def test_every_device_of_the_table_is_found_by_its_own_name_and_is_plausible():
    assert len(set(known_devices())) == len(known_devices()) >= 30
    for device in known_devices():
        peaks = [peak for p in PRECISIONS if (peak := peak_flops(device, p)) is not None]
        assert peaks, device
        for peak in peaks:
            assert peak.device == device
            assert 1e12 < peak.flops < 1e16
            assert peak.certainty in {"vendor", "published", "derived", "unverified"}
        by_precision = {peak.precision: peak.flops for peak in peaks}
        if "float32" in by_precision:
            assert by_precision["float32"] < by_precision["float16"]


def test_memory_is_given_where_the_name_settles_it():
    assert peak_flops("A100-80GB", "float16").memory_bytes == 80 * 2**30
    assert peak_flops("A100", "float16").memory_bytes is None


MEASURED = Peak(
    flops=200e9, precision="float32", device="host", source="measured: matmul",
    certainty="measured", memory_bytes=8 * 2**30, spread=0.02,
)  # fmt: skip


def test_ranks_on_one_host_share_its_peak():
    assert shared_peak(MEASURED, 1) == MEASURED
    half = shared_peak(MEASURED, 2)
    assert half.flops == 100e9
    assert half.memory_bytes == 4 * 2**30
    assert half.source == "measured: matmul; shared by 2 ranks"
    with pytest.raises(ConfigError, match="at least 1, but got 0"):
        shared_peak(MEASURED, 0)


def test_a_stored_peak_comes_back_the_same():
    assert Peak.from_dict(MEASURED.to_dict()) == MEASURED


@pytest.mark.parametrize(
    "change", [{"flops": 0.0}, {"flops": float("nan")}, {"precision": "int8"}, {"colour": "red"}]
)
def test_a_stored_peak_that_makes_no_sense_is_refused(change):
    with pytest.raises(ConfigError, match="a stored peak"):
        Peak.from_dict(MEASURED.to_dict() | change)
