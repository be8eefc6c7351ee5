"""From lines to steps: repeats, ranks, restarts, and what is told of a step later."""

import math

import pytest

from mindtune.controller.records.log_readers.merge import TimedRecord, merge_records
from mindtune.controller.records.log_readers.reader import Record
from mindtune.policies.signals import Observation


def merge(lines, *, lag=1):
    """Return run, step and loss of each; a line is step, loss and perhaps a time."""
    timed = [
        TimedRecord(Record(Observation(step=step, loss=loss)), *written)
        for step, loss, *written in lines
    ]
    return [(o.run, o.step, o.loss) for o in merge_records(timed, lag=lag)]


def test_repeated_lines_are_one_step_and_the_first_holds():
    assert merge([(1, 5.0), (1, 5.5), (2, 4.0)]) == [(0, 1, 5.0), (0, 2, 4.0)]


def test_no_rank_hides_that_another_is_not_finite():
    merged = merge([(1, 5.0), (1, math.nan), (1, 5.0)])
    assert math.isnan(merged[0][2])


def test_ranks_that_interleave_are_one_run():
    steps = [1, 1, 2, 1, 2, 2, 3, 4, 3, 4, 5, 4, 5, 6]
    lines = [(step, 1.0, 100.0 + i) for i, step in enumerate(steps)]
    assert [step for _, step, _ in merge(lines)] == [1, 2, 3, 4, 5, 6]


def test_a_step_that_goes_back_begins_a_segment_and_nothing_is_lost():
    assert merge([(100, 3.0), (110, 2.9), (120, 2.8), (105, 2.7), (115, 2.6)]) == [
        (0, 100, 3.0), (0, 110, 2.9), (0, 120, 2.8), (1, 105, 2.7), (1, 115, 2.6),
    ]  # fmt: skip


def test_the_first_step_again_is_a_restart():
    assert merge([(1, 9.0), (2, 8.0), (1, 9.5), (2, 8.5)]) == [
        (0, 1, 9.0), (0, 2, 8.0), (1, 1, 9.5), (1, 2, 8.5),
    ]  # fmt: skip


def test_the_same_step_long_after_is_a_restart():
    assert merge([(300, 0.4, 0.0), (300, 0.5, 16_000.0), (600, 0.3, 17_200.0)]) == [
        (0, 300, 0.4), (1, 300, 0.5), (1, 600, 0.3),
    ]  # fmt: skip


def test_a_restart_within_the_minute_is_one():
    first = [(step, 1.0, 0.1 * step) for step in range(1, 41)]
    again = [(step, 2.0, 12.0 + 0.1 * step) for step in range(1, 41)]
    resumed = [(step, 3.0, 30.0 + 0.1 * step) for step in range(38, 45)]
    merged = merge(first + again + resumed)
    assert [run for run, _, _ in merged] == [0] * 40 + [1] * 40 + [2] * 7


def test_the_log_of_another_rank_behind_the_first_is_passed_over():
    first = [(step, 1.0, 1000.0 + step) for step in range(1, 201)]
    second = [(step, 2.0, 1000.3 + step) for step in range(1, 200)]
    assert merge(first + second) == [(0, step, 1.0) for step in range(1, 201)]
    later = [(step, 3.0, 5000.0 + step) for step in range(150, 160)]
    assert [run for run, _, _ in merge(first + second + later)] == [0] * 200 + [1] * 10


def test_the_clock_of_the_process_tells_a_restart_that_does_not_go_back():
    records = [
        TimedRecord(Record(Observation(step=step, loss=1.0), elapsed_s=elapsed))
        for step, elapsed in ((10, 100.0), (20, 200.0), (30, 10.0), (40, 110.0))
    ]
    assert [o.run for o in merge_records(records, lag=3)] == [0, 0, 1, 1]


def test_a_run_column_is_taken_as_it_is():
    records = [
        TimedRecord(Record(Observation(step=step, run=run, loss=1.0)))
        for step, run in ((1, 402), (2, 402), (3, 403), (4, 403))
    ]
    assert [(o.run, o.step) for o in merge_records(records, lag=1)] == [
        (402, 1), (402, 2), (403, 3), (403, 4),
    ]  # fmt: skip


def test_later_lines_add_to_a_step_and_the_slowest_rank_counts():
    records = [
        Observation(step=0, eval_loss=11.0),
        Observation(step=1, loss=5.0, step_time_s=1.0),
        Observation(step=1, step_time_s=1.5, overflow=1.0, phase="compile"),
        Observation(step=2, loss=4.0),
        Observation(step=1, eval_loss=4.5),
        Observation(step=7, eval_loss=4.25),
    ]
    merged = list(merge_records([TimedRecord(Record(o)) for o in records], lag=1))
    assert merged == [
        Observation(step=1, run=0, loss=5.0, step_time_s=1.5, overflow=1.0, phase="compile",
                    eval_loss=11.0),
        Observation(step=2, run=0, loss=4.0, eval_loss=4.25),
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_no_step_is_lost_when_steps_leave_the_window(count):
    lines = [(step, float(step)) for step in range(1, count + 1)]
    assert merge(lines) == [(0, step, float(step)) for step in range(1, count + 1)]
