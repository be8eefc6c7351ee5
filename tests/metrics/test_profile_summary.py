"""Summaries of what MindSpore's profiler writes on CPU, and of the tables of its Ascend analysis."""

import json

import pytest

from mindtune.controller.metrics.profile_summary import (
    KernelRun,
    Shares,
    kernel_shares,
    read_ascend_shares,
    read_cpu_kernels,
)

# As MindSpore 2.10.0 wrote it on CPU, shortened; then two lines that a killed process left.
TIMES = """\
MatMul;HostCpuOps;1796047855000000000,1.5,0 1796047855010000000,2.5,1 
Gradients/Default/network-L/l-CrossEntropyLoss/Grad_Log/Div-op0;HostCpuOps;1796047855020000000,4,0 
Default/AllReduce-op12;HostCpuOps;1796047855022000000,4,0 
Default/BroadcastTo-op3;HostCpuOps;1796047855040000000,0.5,0 179604785
Default/Add-op1
"""  # noqa: W291


def test_kernels_are_read_from_the_files_of_a_cpu(tmp_path):
    folder = tmp_path / "vm_1_ascend_ms" / "FRAMEWORK"
    folder.mkdir(parents=True)
    (folder / "cpu_op_execute_timestamp_0.txt").write_text(TIMES)
    runs = read_cpu_kernels(tmp_path)
    assert [run.kind for run in runs] == ["MatMul", "MatMul", "Div", "AllReduce", "BroadcastTo"]
    first = runs[0].begin_s
    spans = [(run.begin_s - first, run.end_s - first) for run in runs]
    assert spans[1] == pytest.approx((0.010, 0.0125), abs=1e-6)
    shares = kernel_shares(runs, [(first, first + 0.05)])
    # Div until 24 ms, AllReduce from 22 to 26: two of the four overlap.
    assert shares.compute == pytest.approx((1.5 + 2.5 + 4 + 0.5) / 50, abs=1e-4)
    assert shares.communication == pytest.approx(4 / 50, abs=1e-4)
    assert shares.overlap == pytest.approx(0.5, abs=1e-3)
    assert shares.busy == pytest.approx((1.5 + 2.5 + 6 + 0.5) / 50, abs=1e-4)
    assert shares.kernels[0][0] in ("MatMul", "Div", "AllReduce")
    assert len(shares.kernels) == 4


def test_only_what_ran_inside_the_steps_counts_and_side_by_side_counts_once():
    runs = [
        KernelRun("MatMul", 0.0, 2.0),
        KernelRun("Mul", 1.0, 3.0),
        KernelRun("Add", 8.0, 9.0),
    ]
    shares = kernel_shares(runs, [(1.0, 2.0), (2.5, 4.5)])
    assert shares.compute == pytest.approx((1.0 + 0.5) / 3)
    assert dict(shares.kernels) == pytest.approx({"MatMul": 1 / 3, "Mul": 1.5 / 3})
    assert shares.communication == 0.0
    assert shares.overlap is None
    assert kernel_shares(runs, [(20.0, 21.0)]) == Shares()


def test_the_tables_of_the_ascend_analysis(tmp_path):
    output = tmp_path / "rank_0_ascend_ms" / "ASCEND_PROFILER_OUTPUT"
    assert read_ascend_shares(tmp_path, 1.0) is None
    output.mkdir(parents=True)
    (output / "step_trace_time.csv").write_text(
        "Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free,Stage,Bubble,"
        "Communication(Not Overlapped and Exclude Receive),Preparing\n"
        "10,300000,50000,50000,100000,50000,0,0,50000,\n"
        "11,300000,50000,50000,100000,50000,0,0,50000,\n"
    )
    shares = read_ascend_shares(tmp_path, 1.0)
    assert (shares.compute, shares.communication) == pytest.approx((0.6, 0.2))
    assert (shares.overlap, shares.busy) == pytest.approx((0.5, 0.7))
    assert shares.bytes_per_s is None
    total = {
        "Communication Time Info": {"Transit Time(ms)": 20.0, "Wait Time(ms)": 5.0},
        "Communication Bandwidth Info": {
            "RDMA": {"Transit Size(MB)": 300.0, "Transit Time(ms)": 15.0},
            "HCCS": {"Transit Size(MB)": 100.0, "Transit Time(ms)": 5.0},
        },
    }
    steps = {
        "step10": {"p2p": {}, "collective": {"hcom_allReduce__1": {}, "Total Op Info": total}}
    }
    (output / "communication.json").write_text(json.dumps(steps))
    assert read_ascend_shares(tmp_path, 1.0).bytes_per_s == pytest.approx(400e6 / 0.02)
