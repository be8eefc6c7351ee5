"""Layouts of `npu-smi info` as public reports show them, and a tool that misbehaves."""

import pytest

from mindtune.controller.device.npu_smi import NpuSmiProbe, list_npus, parse_npu_smi
from mindtune.controller.device.reading import DeviceReading, ProbeError

MIB = 2**20

A2 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc1                 Version: 24.1.rc1                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 101.8       43                0    / 0             |
| 0                         | 0000:C1:00.0  | 87          0    / 0          57784/ 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Warning       | 92.0        39                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3314 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 3141          | python                   | 54000                   |
+===========================+===============+====================================================+
"""
A3 = """\
| npu-smi 25.2.1                   Version: 25.2.1                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 166.5       38                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 12          0    / 0          3131 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           37                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 34          0    / 0          2886 / 65536         |
+===========================+===============+====================================================+
| 1     Ascend910           | OK            | 168.1       37                0    / 0             |
| 0     2                   | 0000:99:00.0  | 0           0    / 0          3125 / 65536         |
"""
OLD_910A = """\
| NPU   Name           | Health        | Power(W)   Temp(C)                          |
| Chip                 | Bus-Id        | AICore(%)  Memory-Usage(MB)  HBM-Usage(MB)  |
+======================+===============+=============================================+
| 0     910A           | OK            | 68.6       36                               |
| 0                    | 0000:C1:00.0  | 5          591  / 14795      0    / 32768   |
"""
CARD_310P = """\
| NPU   Name   | Health      | Power(W)  Temp(C)           Hugepages-Usage(page|
| Chip  Device | Bus-Id      | AICore(%) Memory-Usage(MB)                      |
+============================+===========+====================================+
| 0     310P3  | OK          | NA        51                996   / 996         |
| 0     0      | 0000:01:00.0| 0         3841 / 21527                          |
+==============+=============+=================================================+
| 64    310P3  | OK          | NA        48                0     / 0           |
| 0     1      | NA          | NA        1764 / 21527                          |
"""

CARD_WITHOUT_HBM = """\
| 0     310P3               | OK            | 17.0        50                0    / 0             |
| 0                         | 0000:01:00.0  | 12          512  / 21527      0     / 0            |
"""


def reading(utilization, used, total, temperature, power):
    return DeviceReading(
        device_utilization=utilization,
        device_memory_used_bytes=used * MIB,
        device_memory_total_bytes=total * MIB,
        device_temperature_c=temperature,
        device_power_w=power,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            A2,
            [
                (0, 0, "910B3", "OK", reading(0.87, 57784, 65536, 43.0, 101.8)),
                (1, 0, "910B3", "Warning", reading(0.0, 3314, 65536, 39.0, 92.0)),
            ],
        ),
        (
            A3,
            [
                (0, 0, "Ascend910", "OK", reading(0.12, 3131, 65536, 38.0, 166.5)),
                (0, 1, "Ascend910", "OK", reading(0.34, 2886, 65536, 37.0, None)),
                (1, 0, "Ascend910", "OK", reading(0.0, 3125, 65536, 37.0, 168.1)),
            ],
        ),
        (OLD_910A, [(0, 0, "910A", "OK", reading(0.05, 0, 32768, 36.0, 68.6))]),
        (
            CARD_310P,
            [
                (0, 0, "310P3", "OK", reading(0.0, 3841, 21527, 51.0, None)),
                (64, 0, "310P3", "OK", reading(None, 1764, 21527, 48.0, None)),
            ],
        ),
        (CARD_WITHOUT_HBM, [(0, 0, "310P3", "OK", reading(0.12, 512, 21527, 50.0, 17.0))]),
    ],
    ids=["A2", "A3", "910A", "310P", "310P with an empty HBM column"],
)
def test_each_layout_is_read(text, expected):
    found = [(d.npu, d.chip, d.name, d.health, d.reading) for d in parse_npu_smi(text)]
    assert found == expected


@pytest.mark.parametrize(
    "text", ["", "DrvMngGetConsoleLogLevel failed", "| a | b |\n| 0 | x | y |"]
)
def test_text_without_a_table_gives_no_device(text):
    assert parse_npu_smi(text) == []


def test_a_table_cut_anywhere_never_raises():
    counts = [len(parse_npu_smi(A2[:cut])) for cut in range(len(A2) + 1)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 2)


def printing(text):
    return f"cat <<'TABLE'\n{text}TABLE"


@pytest.mark.parametrize(
    ("environ", "power"),
    [
        ({}, 101.8),
        ({"DEVICE_ID": "1"}, 92.0),
        ({"ASCEND_RT_VISIBLE_DEVICES": "1"}, 92.0),
        ({"ASCEND_RT_VISIBLE_DEVICES": "1,0", "DEVICE_ID": "1"}, 101.8),
    ],
)
def test_the_device_is_the_one_that_this_process_sees(npu_smi, environ, power):
    probe = NpuSmiProbe(command=str(npu_smi(printing(A2))), environ=environ)
    assert probe.read().device_power_w == power


def test_a_device_beyond_the_table_is_an_error(npu_smi):
    with pytest.raises(ProbeError, match=r"shows 2 device\(s\), so there is no number 5"):
        NpuSmiProbe(command=str(npu_smi(printing(A2))), environ={}, device_id=5)


def test_a_tool_that_hangs_is_killed(npu_smi):
    with pytest.raises(ProbeError, match="no answer within 0.3 s"):
        list_npus(command=str(npu_smi("exec sleep 30")), timeout_s=0.3)


def test_what_a_failing_tool_says_is_told(npu_smi):
    tool = npu_smi("echo 'dcmi module initialize failed. ret is -8005' >&2; exit 1")
    with pytest.raises(ProbeError, match=r"exit code 1.*ret is -8005"):
        list_npus(command=str(tool))


def test_a_missing_tool_is_named():
    with pytest.raises(ProbeError, match="no-such-smi is not on PATH"):
        list_npus(command="no-such-smi")
