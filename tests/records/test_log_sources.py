"""Where logs come from: files of ranks, folders, standard input, other names; and what is said."""

import bz2
import io
import json
import lzma
import math
import subprocess
import sys
from pathlib import Path

import pytest

from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers import detect, open_log, read_log, read_mapping
from mindtune.controller.records.log_readers.numerals import Commas
from mindtune.controller.records.log_readers.several import in_time_order, rank_of
from mindtune.controller.replay import open_logs

LINES = [f"epoch: 1 step: {step}, loss is {3 - step / 10}\n" for step in range(1, 5)]


def told(log):
    return [(o.run, o.step, o.loss) for o in log]


def stamped(step, second, *, loss=2.5, ms=100, minute=0):
    return (
        f"2026-11-30 13:{minute:02d}:{second:02d},000 - mindformers - INFO - {{ Epoch:[  1/  1], "
        f"step:[{step:5d}/  100], loss:[{loss}/2.5], per_step_time: {ms}ms, lr: 0.001, overflow "
        "cond: False, loss_scale: 1.0, global_norm: [1.5]\n"
    )


@pytest.mark.parametrize("compress", [lzma.compress, bz2.compress], ids=["xz", "bzip2"])
def test_compressed_logs_are_read_and_a_cut_one_as_far_as_it_goes(tmp_path, compress):
    path = tmp_path / "log"
    lines = [f"epoch: 1 step: {i}, loss is {math.sin(i):.9f}\n" for i in range(1, 6001)]
    whole = compress("".join(lines).encode())
    path.write_bytes(whole)
    assert len(list(open_log(path))) == 6000
    path.write_bytes(whole[: len(whole) * 3 // 4])
    log = open_log(path, "mindspore_monitor")
    steps = [o.step for o in log]
    assert steps == list(range(1, len(steps) + 1))
    assert log.is_cut


def test_zstd_is_refused_with_the_command_that_helps(tmp_path):
    path = tmp_path / "log.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd and so on")
    with pytest.raises(ConfigError, match=r"zstd -dc log.zst \| mindtune replay -"):
        open_log(path)


def test_standard_input_is_a_log(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(LINES).encode())))
    assert [o.loss for o in open_log(Path("-"))] == [2.9, 2.8, 2.7, 2.6]


def test_standard_input_that_is_closed_or_no_log_is_refused_by_its_name(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="standard input must be a log, but it is closed"):
        open_log(Path("-"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"no log\n")))
    with pytest.raises(ConfigError, match="^standard input must be a training log"):
        open_log(Path("-"))


def test_what_a_shell_substitutes_is_a_log(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(LINES))
    script = (
        "from pathlib import Path\nfrom mindtune.controller.records.log_readers import open_log\n"
        "import sys\nprint(len(list(open_log(Path(sys.argv[1])))))"
    )
    command = f'"{sys.executable}" -c "$0" <(cat {path})'
    done = subprocess.run(
        ["bash", "-c", command, script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "4\n"


@pytest.mark.parametrize("encoding", ["latin-1", "gbk", "gb18030", "utf-16-le", "utf-16-be"])
def test_numbers_are_the_same_in_every_encoding(tmp_path, encoding):
    path = tmp_path / "log"
    words = "\u00e9tape \u00fc" if encoding == "latin-1" else "\u8bad\u7ec3\u4e2d \u6b65"
    path.write_bytes("".join(f"{words} {line}" for line in LINES).encode(encoding))
    assert [o.loss for o in read_log(path).observations] == [2.9, 2.8, 2.7, 2.6]


def test_a_bar_drawn_with_backspaces_is_a_bar(tmp_path):
    path = tmp_path / "log"
    bars = [f"  {i}%|#| {i}/100 [00:01<00:09,  2.00it/s, loss={4 - i}]" for i in (1, 2, 3)]
    path.write_text("\x08\x08\x08\x08".join(bars) + "\n")
    assert [o.loss for o in read_log(path).observations] == [3, 2, 1]


def test_ranks_in_files_of_their_own_are_one_run(tmp_path):
    for rank, extra in ((0, 0), (1, 40), (10, 5)):
        lines = [stamped(step, step, loss=2.5, ms=100 + extra) for step in range(1, 30)]
        (tmp_path / f"rank_{rank}.log").write_text("".join(lines))
    (tmp_path / "rank_1.log").write_text(
        (tmp_path / "rank_1.log").read_text().replace("loss:[2.5/", "loss:[nan/", 1)
    )
    (tmp_path / "scheduler.log").write_text("no step in it\n")
    log = open_logs([tmp_path])
    observations = list(log)
    assert [o.step for o in observations] == list(range(1, 30))
    assert {o.run for o in observations} == {0}
    assert {o.step_time_s for o in observations} == {0.14}, "the slowest rank's"
    assert math.isnan(observations[0].loss), "no rank hides that another is not finite"
    assert log.records == 87
    notes = " ".join(log.notes)
    assert "3 logs were read side by side, as ranks of one run" in notes
    assert "scheduler.log" in notes


def test_ranks_without_a_name_are_told_by_their_times(tmp_path):
    paths = [tmp_path / name for name in ("a.log", "b.log")]
    for path in paths:
        path.write_text("".join(stamped(step, step) for step in range(1, 9)))
    assert [(o.run, o.step) for o in open_logs(paths)] == [(0, step) for step in range(1, 9)]
    paths[1].write_text("".join(stamped(step, step, minute=30) for step in range(1, 9)))
    assert [o.run for o in open_logs(paths)] == [0] * 8 + [1] * 8, "half an hour later: a restart"


def test_rotated_and_resumed_files_follow_each_other(tmp_path):
    names = ["info.log", "info.log.1", "info.log.2"]
    for name, steps in zip(names, (range(7, 10), range(4, 7), range(1, 4)), strict=True):
        (tmp_path / name).write_text("".join(f"step: {i}, loss: {i / 4}\n" for i in steps))
    assert told(open_logs([tmp_path])) == [(0, step, step / 4) for step in range(1, 10)]
    names = [p.name for p in in_time_order(tmp_path / n for n in ("run2.log", "run10.log"))]
    assert names == ["run2.log", "run10.log"]


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank_3/info.log", (3,)), ("worker_12.log", (12,)), ("node1/rank0.log", (1, 0)),
     ("attempt_0/3/stdout.log", (3,)), ("2026/train.log", ()), ("log-rank-00017.txt", (17,))],
)  # fmt: skip
def test_a_path_names_its_rank(tmp_path, name, rank):
    assert rank_of(tmp_path / name) == rank


def test_ranks_that_share_a_file_are_told_apart_by_the_launcher(tmp_path):
    path = tmp_path / "log"
    order = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (0, 4), (1, 3), (1, 4), (0, 5), (1, 5)]
    lines = [f"[rank{rank}]: step: {step}, loss: {step + rank / 10}\n" for rank, step in order]
    restarted = [f"[rank0]: step: {step}, loss: 9.5\n" for step in (3, 4)]
    path.write_text("".join([*lines, *restarted]))
    assert told(open_log(path)) == [
        (0, 1, 1.0), (0, 2, 2.0), (0, 3, 3.0), (0, 4, 4.0), (0, 5, 5.0), (1, 3, 9.5), (1, 4, 9.5),
    ]  # fmt: skip


def test_a_folder_of_a_trainer_is_read_by_its_newest_state(tmp_path):
    for step in (500, 1000):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        history = [{"step": i, "loss": 1.0} for i in range(100, step + 1, 100)]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert len(list(open_log(tmp_path))) == 10
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="must be the folder of a run, with one of signals.csv"):
        open_log(empty)


def test_how_sure_a_format_is_and_what_was_not_understood_is_said(tmp_path):
    path = tmp_path / "log"
    path.write_text(
        "".join(LINES) + "epoch: 1 step: 5, loss is 1.\ufffd\nepoch: 1 step: 6, loss is 1.4"
    )
    log = open_log(path)
    assert len(list(log)) == 4
    sure, missed = log.notes()
    assert "the format mindspore_monitor is 100% sure: 4 values" in sure
    assert "2 of 6 lines look as if they told a loss" in missed
    assert "first line 5: 'epoch: 1 step: 5" in missed
    path.write_text("step: 5, loss: 1.5, grad_norm: 1.25")
    log = open_log(path)
    assert [(o.loss, o.grad_norm) for o in log] == [(1.5, None)]
    assert "the last line has no end" in log.notes()[-1]
    path.write_text('{"current_steps": 10, "loss": 0.5}\n')
    found = detect(path)
    assert (found.format.name, found.next_best, found.sureness) == ("llamafactory", "jsonl", 1.0)


def test_the_parts_of_a_wrapped_line_are_understood(tmp_path):
    path = tmp_path / "log"
    path.write_text(
        " iteration 5/ 90 | consumed samples: 40 | elapsed time per iteration (ms): 1.0 | learn\n"
        "ing rate: 1.0E-04 | lm loss: 2.5E+00 | grad norm: 1.5 | number of skip\n"
        "ped iterations: 0 | number of nan iterations: 0 |\n"
    )
    log = open_log(path)
    assert [(o.loss, o.learning_rate, o.grad_norm) for o in log] == [(2.5, 1e-4, 1.5)]
    assert (log.records, log.not_understood) == (1, 0)


def test_a_mapping_gives_names_and_units(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("it,epoch,my loss,loss,dur,mem\n1,0,2.5,9,250,1.5\n2,0,inf,9,300,1.5\n")
    names = read_mapping("loss=my loss,step=it,step_time_s=dur:ms,memory_allocated_bytes=mem:GiB")
    first, second = open_log(path, names=names)
    assert (first.step, first.loss, first.step_time_s) == (1, 2.5, 0.25)
    assert first.memory_allocated_bytes == 3 * 2**29
    assert second.loss == math.inf
    path.write_text('{"it": 1, "a": {"b": 2.5}, "loss": 3}\n')
    (only,) = open_log(path, names=read_mapping("loss=a/b,step=it"))
    assert (only.step, only.loss) == (1, 2.5)
    path.write_text("it 7: objective = 2.5, lr = 0.1\n")
    (only,) = open_log(path, names=read_mapping("loss=objective,step=it"))
    assert (only.step, only.loss, only.learning_rate) == (7, 2.5, 0.1)


def test_a_mapping_may_stand_in_a_file(tmp_path):
    (tmp_path / "map.yaml").write_text("loss: 'loss, smoothed'\nstep: it\n")
    (tmp_path / "log.csv").write_text('it,"loss, smoothed"\n3,1.25\n')
    (only,) = open_log(tmp_path / "log.csv", names=read_mapping(str(tmp_path / "map.yaml")))
    assert (only.step, only.loss) == (3, 1.25)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("los=x", "--map must name signals"), ("loss=x,loss=y", "each signal once"),
     ("loss=x,y", "write the mapping to a YAML file"), ("phase=x", "--map must name signals")],
)  # fmt: skip
def test_a_wrong_mapping_is_refused(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_mapping(text)


def test_a_format_with_fixed_names_takes_no_mapping(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(LINES))
    with pytest.raises(ConfigError, match="the names of megatron are fixed"):
        open_log(path, "megatron", read_mapping("loss=x"))


def test_a_comma_is_read_as_the_log_writes_it():
    commas = Commas()
    assert commas.plain("1,234") is None, "thousands or a decimal, who knows"
    assert commas.plain("1,234,567") == "1234567"
    assert commas.plain("1,234.5") == "1234.5"
    assert commas.plain("0,125") == "0.125"
    assert commas.plain("1,234") == "1.234", "it has written a decimal comma"
    commas = Commas()
    commas.note("loss: 2.5, tps: 1,234")
    assert commas.plain("1,234") == "1234"
    assert commas.plain("2,51") is None, "damage"


def test_tables_with_decimal_commas(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step;loss;lr\n1;2,513;0,001\n1001;1.234,5;1e-3\n")
    assert [(o.step, o.loss, o.learning_rate) for o in open_log(path)] == [(1, 2.513, 0.001),
                                                                          (1001, None, 0.001)]  # fmt: skip


def test_event_files_are_read_by_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for run, steps in enumerate((range(1, 5), range(3, 7))):
        writer = EventFileWriter(str(tmp_path), filename_suffix=f".{run}")
        for step in steps:
            for tag, value in (("train/loss", math.nan if step == 4 else 2.5), ("grad-norm", 0.5),
                               ("mfu(%)", 25.0), ("lm loss vs samples", 9.0)):  # fmt: skip
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                writer.add_event(Event(wall_time=100.0 * run + step, step=step, summary=summary))
        writer.close()
    log = open_log(tmp_path)
    observations = list(log)
    assert log.format.name == "tensorboard"
    assert [(o.run, o.step) for o in observations] == [
        *((0, step) for step in range(1, 5)), *((1, step) for step in range(3, 7)),
    ]  # fmt: skip
    first = observations[0]
    assert (first.loss, first.grad_norm, first.mfu) == (2.5, 0.5, 0.25)
    assert math.isnan(observations[3].loss)


def test_event_files_without_tensorboard_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing", None)
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pip install 'mindtune\[tensorboard\]'"):
        list(open_log(path))


def test_memory_stays_bounded_however_long_a_log_is(tmp_path):
    """The process that reads 14 MB needs no more than the one that reads 1 MB."""
    script = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from mindtune.controller.records.log_readers import open_log\n"
        "count = sum(1 for _ in open_log(Path(sys.argv[1])))\n"
        "print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    largest = []
    for lines in (10_000, 150_000):
        path = tmp_path / f"{lines}.log"
        noise = "INFO - saving a checkpoint, which took a while - " * 2
        with path.open("w") as file:
            file.writelines(
                f"epoch: 1 step: {i // 10}, loss is {i / 7:.9f}\n" if i % 10 == 0 else f"{noise}\n"
                for i in range(lines)
            )
        done = subprocess.run(
            [sys.executable, "-c", script, path], capture_output=True, text=True, check=True
        )
        count, kibibytes = map(int, done.stdout.split())
        assert count == lines // 10
        largest.append(kibibytes)
    assert largest[1] < largest[0] + 4096, largest
