"""Finding and reading logs: files of every make, detection, refusal, and MindSpore's own lines."""

import gzip
import math

import pytest

from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers import READERS, open_log, read_log
from mindtune.controller.trials.log_result import result_from_logs

CONSOLE = "2026-11-29 22:26:53,647 - mindformers/core[callback.py:616] - INFO - "
MINDFORMERS = (
    CONSOLE + "{ Epoch:[  1/  2], step:[    1/    3], loss:[5.507/5.507], per_step_time: 5207ms, "
    "lr: 0.0, overflow cond: True, loss_scale: 1073741800.0, global_norm: [inf], "
    "train_throughput_per_npu: 0.000T\n"
    + CONSOLE + "   0.8% |          | 3.07254 samples/s/p  0:10:19 }\n"
    "\x1b[32m[INFO] 2026 [callback.py:616] print_output_info: { Epoch:[  1/  2], "
    "step:[    2/    3], loss:[  nan/  nan], per_step_time: 76ms, lr: 5e-05, "
    "overflow cond: True, loss_scale: 536870900.0, global_norm: [1.5]\x1b[0m\n"
    "{ Epoch:[  2/  2], step:[    1/    3], loss: 4.25, per_step_time: 77ms, is_skip: [ True]\n"
    "{ step:[    5/   10], loss:   4.123456, per_step_time:     41ms, lr: 1.000000e-05, "
    "grad_norm:   2.631860, throughput:   1.23T }\n"
)  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a text as a log."""

    def read_text(text, name="log"):
        path = tmp_path / name
        path.write_text(text)
        return read_log(path)

    return read_text


def test_mindformers_lines_of_every_form(read):
    log = read(MINDFORMERS)
    assert (log.format, log.records) == ("mindformers", 4)
    first, second, third, fourth = log.observations
    assert (first.step, first.phase, first.loss, first.step_time_s) == (1, "compile", 5.507, 5.207)
    assert (first.overflow, first.grad_norm, first.learning_rate) == (1.0, math.inf, 0.0)
    assert first.loss_scale == 2.0**31, "the scale that acted, not the lowered and rounded one"
    assert (second.step, second.loss_scale, second.learning_rate) == (2, 2.0**30, 5e-05)
    assert math.isnan(second.loss)
    assert (third.step, third.loss, third.update_skipped, third.grad_norm) == (4, 4.25, 1.0, None)
    assert (fourth.step, fourth.grad_norm, fourth.step_time_s) == (5, 2.63186, 0.041)


def mindformers_line(step, **values):
    told = ", ".join(
        f"{name.replace('_cond', ' cond')}: {value}" for name, value in values.items()
    )
    return f"{{ Epoch:[  1/  1], step:[{step:5d}/  100], {told}\n"


def test_mindformers_scale_is_that_of_the_line_before(read):
    log = read(
        mindformers_line(7, loss=2.0, overflow_cond=False, loss_scale=1024.0)
        + mindformers_line(8, loss=2.0, overflow_cond=True, loss_scale=1024.0)
        + mindformers_line(9, loss=2.0, overflow_cond=False, loss_scale=2048.0)
        + mindformers_line(20, loss=2.0, overflow_cond=True, loss_scale=1024.0)
        + mindformers_line(21, loss=2.0, overflow_cond=True, loss_scale=1.0)
    )
    scales = [o.loss_scale for o in log.observations]
    assert scales == [1024.0, 1024.0, 1024.0, 2048.0, 1024.0], "8: fixed; 9: grows for the next"


def test_mindformers_skips_damaged_and_missing_norms(read):
    log = read(
        mindformers_line(1, loss=10.649, global_norm="[1 31049]", train_throughput="2T")
        + mindformers_line(2, loss=10.6).replace("10.6", "10.6, global_norm [10.5]")
        + "- INFO - opt_global_step: 0, skip_data_grad_norm_threshold: 3.0, is_skip: [ True]\n"
        "{ step:[    3/   10], loss: N/A (non-last PP stage), per_step_time: 41ms, grad_norm: NaN, "
        "throughput: 1T }\n"
        "{ step:[    4/   10], loss: 2.5, per_step_time: 41ms, grad_norm:   nan, throughput: 1T }\n"
    )
    first, second, third, fourth = log.observations
    assert first.grad_norm is None, "two numbers: which one, nobody knows"
    assert (second.grad_norm, second.skip_threshold, second.update_skipped) == (10.5, 3.0, 1.0)
    assert (third.loss, third.grad_norm) == (None, None), "NaN is its word for none"
    assert fourth.loss == 2.5
    assert math.isnan(fourth.grad_norm)


def test_mindformers_of_old_releases(read):
    log = read(
        "mindformers - INFO - Epoch:[  1/ 10], step:[    2/  100], loss:[2.312/2.500], "
        "time:505.125 ms, lr:1e-05, overflow cond: False, loss_scale: 65536.0\n"
        "Epoch:[  1/ 10], step:[    2/  100] weight_norm: 19.22\n"
    )
    only = log.observations[0]
    assert (log.format, only.step, only.loss, only.step_time_s) == (
        "mindformers", 2, 2.312, 0.505125,
    )  # fmt: skip


def test_mindspore_monitor_counts_on_over_epochs(read):
    log = read(
        "2024-08-19 08:56:17 epoch: 1 step: 1, loss is 2.5\n"
        "epoch: 1 step: 2, loss is nan\n"
        "Train epoch time: 24.6 ms, per step time: 12.3 ms\n"
        "epoch: 2 step: 1, loss is 1e-3\n"
        "epoch: 2 step: 2, loss is (Tensor(shape=[], dtype=Float32, value= 3.25), False)\n"
        "an error that means nothing\n"
    )
    assert (log.format, log.records) == ("mindspore_monitor", 5)
    assert [o.step for o in log.observations] == [1, 2, 3, 4]
    times = [o.step_time_s for o in log.observations]
    assert times == [None, pytest.approx(0.0123), None, None]
    assert [o.phase for o in log.observations] == ["compile", "compile", None, None]
    assert math.isnan(log.observations[1].loss)
    assert [o.loss for o in log.observations[2:]] == [1e-3, 3.25]


def test_mindspore_epoch_lines_alone_are_counted(read):
    log = read(
        "Epoch time: 191331.499 ms, per step time: 7972.146 ms, avg loss: 2.256\n"
        "Epoch time: 117044.351 ms, per step time: 4876.848 ms, avg loss: 2.037\n"
    )
    first, second = log.observations
    assert (first.step, first.loss, first.phase) == (1, 2.256, "compile")
    assert (second.step, second.loss, second.phase) == (2, 2.037, None)
    assert second.step_time_s == pytest.approx(4.876848)


def test_mindspore_runs_in_one_file_are_segments(read):
    log = read(
        "2024-08-19 08:56:17 epoch: 1 step: 300, loss is 0.44\n"
        "2024-08-19 13:21:38 epoch: 1 step: 300, loss is 0.43\n"
        "2024-08-19 13:41:47 epoch: 2 step: 300, loss is 0.41\n"
        "2024-11-14 07:50:00 epoch: 1 step: 1, loss is 0.69\n"
        "2024-11-14 07:50:01 epoch: 1 step: 2, loss is 0.68\n"
    )
    assert [(o.run, o.step) for o in log.observations] == [
        (0, 300), (1, 300), (1, 600), (2, 1), (2, 2),
    ]  # fmt: skip


LOSS_LINES = "epoch: 1 step: 1, loss is 2.5\nepoch: 1 step: 2, loss is 2.25\n"


@pytest.mark.parametrize(
    "content",
    [
        LOSS_LINES.encode(),
        b"\xef\xbb\xbf" + LOSS_LINES.encode(),
        LOSS_LINES.encode("utf-16"),
        LOSS_LINES.replace("\n", "\r\n").encode(),
        LOSS_LINES.replace("\n", "\r").encode(),
        LOSS_LINES.encode() + b"epoch: 1 step: 3, loss is 2.12",
        gzip.compress(LOSS_LINES.encode()),
        b"\xff\xfa\x80 not text\n" + LOSS_LINES.encode() + b"epoch: 1 step: 3, loss i",
        LOSS_LINES.replace("loss", "\x1b[31mloss\x1b[0m").encode(),
        b"[rank3]: 2024-01-01 " + LOSS_LINES.encode(),
    ],
    ids=["plain", "bom", "utf-16", "crlf", "cr", "no last line end: there may be more digits", "gzip", "damaged", "colours",
         "prefix"],
)  # fmt: skip
def test_a_log_is_read_whatever_file_it_is_in(tmp_path, content):
    path = tmp_path / "log"
    path.write_bytes(content)
    log = read_log(path)
    assert [(o.step, o.loss) for o in log.observations] == [(1, 2.5), (2, 2.25)]


def test_a_compressed_log_that_is_still_written_is_read_to_its_end(tmp_path):
    path = tmp_path / "log.gz"
    lines = "".join(f"epoch: 1 step: {i}, loss is {i * 0.37:.6f}\n" for i in range(1, 20_001))
    whole = gzip.compress(lines.encode())
    path.write_bytes(whole[: len(whole) // 2])
    steps = [o.step for o in read_log(path).observations]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 5000


def test_a_log_that_no_reader_knows_is_refused_with_those_that_are_known(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe some text\nloss was fine\n")
    assert read_log(path) is None
    with pytest.raises(ConfigError, match="must be a training log of a known format") as refusal:
        open_log(path)
    assert all(entry.name in str(refusal.value) for entry in READERS)
    with pytest.raises(ConfigError, match=r"--format must be auto or one of .*, but got 'xml'"):
        open_log(path, "xml")
    with pytest.raises(ConfigError, match="must be readable|must be a readable"):
        read_log(tmp_path / "none")
    with pytest.raises(ConfigError, match="does not exist"):
        open_log(tmp_path / "none")


def test_a_named_format_is_taken_at_its_word(tmp_path):
    path = tmp_path / "log"
    path.write_text(LOSS_LINES)
    assert list(open_log(path, "megatron")) == []
    assert len(list(open_log(path, "mindspore_monitor"))) == 2


def test_prose_about_training_is_no_log(read):
    prose = (
        "At step 3 the loss: 5 became 44, and loss 12.4 at iteration 2 was normal.\n"
        "Loss 2.77 to 7.3 at step 29050; in epoch 3 it recovered.\n"
        "step 1 time (about 160 s) is compile time\n"
        "The loss is 5 times larger in epoch 7 than before.\n"
    )
    assert read(prose) is None


@pytest.mark.parametrize("entry", READERS, ids=lambda entry: entry.name)
@pytest.mark.parametrize(
    "line", ["", "\n", "{ step:[", "{ Epoch:[1/1], step:[1/0], loss:[", "epoch: 1 step: 1, loss is",
             "Epoch time: 3 ms, per step time: 3 ms", "\x00\x01", "loss: " * 5000, "{'loss': }",
             '{"step": 1e400}', '{"current_steps": NaN, "loss": {}}', "[" * 3000, "step,loss\n",
             " iteration 1/ 2 | lm loss: | number of nan iterations: 0 |", "100%|#| 1/1 [, loss=]"]
)  # fmt: skip
def test_no_line_makes_a_reader_raise(entry, line):
    reader = entry.start()
    reader.feed(line)
    reader.feed(line)
    reader.finish()


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
