"""signals.csv: whole rows, segments, readable after a kill."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mindtune.controller.contract import format_header
from mindtune.controller.errors import ConfigError
from mindtune.controller.records import SignalWriter, read_signals
from mindtune.policies.signals import Observation


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def steps(path):
    return [row.observation.step for row in read_signals(path)]


def test_rows_read_back_bit_for_bit(tmp_path):
    path = tmp_path / "signals.csv"
    written = Observation(
        step=1, phase="train", loss=1 / 3, grad_norm=math.inf, overflow=1.0, learning_rate=1e-5
    )
    writer = SignalWriter(path)
    writer.write(written)
    writer.write(Observation(step=2, loss=math.nan))
    writer.close()
    first, second = (row.observation for row in read_signals(path))
    assert first == Observation(
        step=1, run=0, phase="train", loss=1 / 3, grad_norm=math.inf, overflow=1.0,
        learning_rate=1e-5,
    )  # fmt: skip
    assert math.isnan(second.loss)
    assert second.grad_norm is None


def test_first_row_reaches_the_file_at_once(tmp_path):
    writer = SignalWriter(tmp_path / "signals.csv", clock=Clock())
    writer.write(Observation(step=1))
    assert steps(tmp_path / "signals.csv") == [1]


@pytest.mark.parametrize(("pause_s", "seen"), [(0.5, [1]), (1.0, [1, 2])])
def test_rows_wait_at_most_the_flush_time(tmp_path, pause_s, seen):
    clock = Clock()
    writer = SignalWriter(tmp_path / "signals.csv", clock=clock, flush_every_s=1.0)
    writer.write(Observation(step=1))
    clock.now += pause_s
    writer.write(Observation(step=2))
    assert steps(tmp_path / "signals.csv") == seen
    writer.close()
    assert steps(tmp_path / "signals.csv") == [1, 2]


def test_an_alarm_flushes_all_rows_at_once(tmp_path):
    writer = SignalWriter(tmp_path / "signals.csv", clock=Clock())
    for step in (1, 2, 3):
        writer.write(Observation(step=step))
    assert steps(tmp_path / "signals.csv") == [1]
    writer.write(Observation(step=4), alarm=True)
    assert steps(tmp_path / "signals.csv") == [1, 2, 3, 4]


def test_many_rows_are_flushed_without_the_clock(tmp_path):
    writer = SignalWriter(tmp_path / "signals.csv", clock=Clock(), flush_every_rows=3)
    for step in range(1, 6):
        writer.write(Observation(step=step))
    assert steps(tmp_path / "signals.csv") == [1, 2, 3, 4]


def test_a_second_writer_continues_as_the_next_segment(tmp_path):
    path = tmp_path / "signals.csv"
    for _ in range(3):
        writer = SignalWriter(path)
        writer.write(Observation(step=1))
        writer.close()
    assert [row.observation.run for row in read_signals(path)] == [0, 1, 2]
    assert path.read_text().count("step,") == 1


def test_a_cut_last_line_is_removed_before_appending(tmp_path):
    path = tmp_path / "signals.csv"
    writer = SignalWriter(path)
    writer.write(Observation(step=1))
    writer.close()
    with path.open("a") as file:
        file.write("2,0.1,trai")
    assert steps(path) == [1]
    writer = SignalWriter(path)
    writer.write(Observation(step=2))
    writer.close()
    assert steps(path) == [1, 2]


def test_a_table_with_other_columns_is_continued_without_losing_them(tmp_path):
    path = tmp_path / "signals.csv"
    path.write_text("step,lr,reward\n1,0.5,7\n")
    writer = SignalWriter(path)
    writer.write(Observation(step=2, learning_rate=0.25), extra={"reward": "8"})
    writer.close()
    rows = read_signals(path)
    assert [row.observation.learning_rate for row in rows] == [0.5, 0.25]
    assert [row.extra["reward"] for row in rows] == ["7", "8"]
    assert [row.observation.run for row in rows] == [None, 1]


def test_a_file_that_holds_only_a_header_starts_at_segment_0(tmp_path):
    path = tmp_path / "signals.csv"
    path.write_text(format_header())
    writer = SignalWriter(path)
    assert writer.run == 0


def test_a_file_that_is_no_table_is_refused_and_left_as_it_was(tmp_path):
    path = tmp_path / "signals.csv"
    path.write_text("not a table\nat all\n")
    with pytest.raises(ConfigError, match="`step` column"):
        SignalWriter(path)
    assert path.read_text() == "not a table\nat all\n"


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be writable"):
        SignalWriter(tmp_path / "file" / "signals.csv")


WRITER = """
import os, sys
from pathlib import Path
from mindtune.controller.contract import DecisionRecord
from mindtune.controller.records import Recorder, RunFolder
from mindtune.policies.signals import Observation
recorder = Recorder(RunFolder(Path(sys.argv[1])))
step = 0
while True:
    step += 1
    recorder.observation(Observation(step=step, loss=step / 3, phase="train"))
    recorder.decision(DecisionRecord(step=step, policy="p", action="Advise", requested=str(step),
                                     verdict="observed", reason="because " * 20))
    if step == 400:
        print("go", flush=True)
"""


def test_sigkill_in_the_middle_of_writing_leaves_readable_files(tmp_path):
    from mindtune.controller.records import Recorder, RunFolder, read_decisions

    folder = RunFolder(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder.path)], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"go\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    decided = read_decisions(folder.decisions)
    assert [record.step for record in decided] == list(range(1, len(decided) + 1))
    assert len(decided) >= 400
    seen = steps(folder.signals)
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) >= 350
    recorder = Recorder(folder)
    recorder.observation(Observation(step=len(seen) + 1), alarm=True)
    assert recorder.run == 1
    recorder.close()
    assert steps(folder.signals) == list(range(1, len(seen) + 2))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_costs_records_and_one_line_never_the_training(tmp_path, caplog):
    from mindtune.controller.records import Recorder, RunFolder

    recorder = Recorder(RunFolder(tmp_path / "run"))
    recorder._signals._file = Path("/dev/full").open("a")  # noqa: SIM115 - the writer closes it
    for step in range(1, 5):
        recorder.observation(Observation(step=step), alarm=True)
    recorder.close()
    assert caplog.text.count("No space left on device, training goes on") <= 1
    assert caplog.text.count("signals cannot be written") == 1
