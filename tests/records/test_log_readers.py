"""Readers of other programs' logs, line by line as those programs print them."""

import math

import pytest

from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers import READERS, read_log
from mindtune.controller.trials.log_result import result_from_logs

CONSOLE = "2026-11-29 22:26:53,647 - mindformers/core[callback.py:616] - INFO - "
MINDFORMERS = (
    CONSOLE + "{ Epoch:[  1/  2], step:[    1/    3], loss:[5.507/5.507], per_step_time: 5207ms, "
    "lr: 0.0, overflow cond: True, loss_scale: 1073741800.0, global_norm: [inf], "
    "train_throughput_per_npu: 0.000T\n"
    + CONSOLE + "   0.8% |          | 3.07254 samples/s/p  0:10:19 }\n"
    "\x1b[32m[INFO] 2026 [callback.py:616] print_output_info: { Epoch:[  1/  2], "
    "step:[    2/    3], loss:[  nan/  nan], per_step_time: 76ms, lr: 5e-05, "
    "overflow cond: False, loss_scale: 65536.0, global_norm: [1.5]\x1b[0m\n"
    "{ Epoch:[  2/  2], step:[    1/    3], loss: 4.25, per_step_time: 77ms, is_skip: [ True]\n"
    "{ step:[    5/   10], loss:   4.123456, per_step_time:     41ms, lr: 1.000000e-05, "
    "grad_norm:   2.631860, throughput:   1.23T }\n"
)  # fmt: skip


def test_mindformers_lines_of_every_form(tmp_path):
    path = tmp_path / "log"
    path.write_text(MINDFORMERS)
    log = read_log(path)
    assert (log.format, log.records) == ("mindformers", 4)
    first, second, third, fourth = log.observations
    assert (first.step, first.phase, first.loss, first.step_time_s) == (1, "compile", 5.507, 5.207)
    assert (first.overflow, first.grad_norm, first.learning_rate) == (1.0, math.inf, 0.0)
    assert first.loss_scale == 2.0**31, "the scale that acted, not the lowered and rounded one"
    assert (second.step, second.loss_scale, second.learning_rate) == (2, 65536.0, 5e-05)
    assert math.isnan(second.loss)
    assert (third.step, third.loss, third.update_skipped, third.grad_norm) == (4, 4.25, 1.0, None)
    assert (fourth.step, fourth.grad_norm, fourth.step_time_s) == (5, 2.63186, 0.041)


def test_mindspore_monitor_counts_on_over_epochs(tmp_path):
    path = tmp_path / "log"
    path.write_text(
        "2024-08-19 08:56:17 epoch: 1 step: 1, loss is 2.5\n"
        "epoch: 1 step: 2, loss is nan\n"
        "Train epoch time: 24.6 ms, per step time: 12.3 ms\n"
        "epoch: 2 step: 1, loss is 1e-3\n"
        "an error that means nothing\n"
    )
    log = read_log(path)
    assert (log.format, log.records) == ("mindspore_monitor", 4)
    assert [o.step for o in log.observations] == [1, 2, 3]
    assert [o.step_time_s for o in log.observations] == [None, pytest.approx(0.0123), None]
    assert math.isnan(log.observations[1].loss)
    assert log.observations[2].loss == 1e-3


def test_a_log_that_no_reader_knows_is_none_and_a_missing_one_is_refused(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe some text\nloss was fine\n")
    assert read_log(path) is None
    with pytest.raises(ConfigError, match="must be readable"):
        read_log(tmp_path / "none")


@pytest.mark.parametrize("entry", READERS, ids=lambda entry: entry.name)
@pytest.mark.parametrize(
    "line", ["", "{ step:[", "{ Epoch:[1/1], step:[1/0], loss:[", "epoch: 1 step: 1, loss is",
             "per step time: 3 ms", "\x00\x01", "loss: " * 5000]
)  # fmt: skip
def test_no_line_makes_a_reader_raise(entry, line):
    entry.start().feed(line)


def test_a_trial_without_a_result_is_measured_by_its_log(tmp_path):
    (tmp_path / "a.log").write_text("nothing to see\n")
    (tmp_path / "b.log").write_text(MINDFORMERS)
    logs = [tmp_path / "missing.log", tmp_path / "a.log", tmp_path / "b.log"]
    result = result_from_logs(logs, warmup_steps=2)
    assert result.step_time_s == [0.077, 0.041]
    assert result.loss == [4.25, 4.123456]
    assert result.grad_norm is None, "one step did not tell it"
    assert "b.log (mindformers, 4 lines)" in result.message
    assert result_from_logs(logs[:2], warmup_steps=2) is None
