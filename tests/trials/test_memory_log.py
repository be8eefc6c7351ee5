"""The peak of MindSpore's memory pool is read from its own log lines."""

import pytest

from mindtune.controller.trials.memory_log import log_environment, pool_peaks, worst_pool_peak

MIB = 1 << 20


def lines(pid, peak):
    """Return what MindSpore 2.10 logs at exit, of which the first line is the pool's sum."""
    head = f"[INFO] PRE_ACT({pid},7f64f1e36b80,python):2026-11-30-00:01:58.002.721 "
    return (
        "[INFO] PRE_ACT(1,7f2,python):2026-11-30 [mem_dynamic_allocator.cc:161] Initialize] Skip "
        "initialization of memory pool since init size is not configured.\n"
        + head + "[mindspore/ccsrc/runtime/memory/mem_pool/mem_dynamic_allocator.cc:1179] "
        f"operator()] Common mem pool info: Total allocated mem:1024M, peak used mem:{peak}M, in "
        "used mem:0M, total use by event mem:0M, total idle mem:1023M. Block unit size:1024M\n"
        + head + "[mem_dynamic_allocator.cc:1211] DumpDynamicMemPoolStateInfo] The dynamic memory "
        f"pool total allocated mem:1024M, min addr :0, max addr: 0, peak used mem:{peak}M, actual "
        f"peak used mem:{peak + 1000}M, in used mem:0M.\n"
    )  # fmt: skip


def test_peaks_are_told_apart_by_process():
    assert pool_peaks(lines(7, 48) + lines(8, 267)) == {7: 48 * MIB, 8: 267 * MIB}
    assert pool_peaks("peak used mem:534M\n") == {}


@pytest.mark.parametrize(
    ("peaks", "num_ranks", "expected"),
    [
        ((66, 133), 2, 133 * MIB),
        ((133, 66), 2, 133 * MIB),
        ((66,), 1, 66 * MIB),
        # The rank that was killed logged nothing; it may be the worst.
        ((66,), 2, None),
        # A pool that was never used is no measurement.
        ((0, 0), 2, None),
        ((), 1, None),
    ],
)
def test_the_worst_rank_counts_and_a_missing_one_leaves_it_unknown(
    tmp_path, peaks, num_ranks, expected
):
    logs = []
    for rank, peak in enumerate(peaks):
        logs.append(tmp_path / f"worker_{rank}.log")
        logs[-1].write_text(lines(100 + rank, peak))
    assert worst_pool_peak(logs, num_ranks=num_ranks) == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "{PRE_ACT:1}"),
        ({"MS_SUBMODULE_LOG_v": "{PRE_ACT:1}"}, "{PRE_ACT:1}"),
        ({"MS_SUBMODULE_LOG_v": "{PRE_ACT:3,PIPELINE:0}"}, "{PIPELINE:0,PRE_ACT:1}"),
        ({"MS_SUBMODULE_LOG_v": "{}"}, "{PRE_ACT:1}"),
    ],
)
def test_the_levels_that_the_user_set_are_kept(before, after):
    assert log_environment(before) == {"MS_SUBMODULE_LOG_v": after}
