"""decisions.jsonl: append-only, the last line of a decision holds."""

from __future__ import annotations

import json
import math

import pytest

from mindtune.controller.contract import DecisionRecord
from mindtune.controller.errors import ConfigError
from mindtune.controller.records import DecisionWriter, RunFolder, new_run_folder, read_decisions


def record(step, **changes):
    fields = {
        "step": step, "policy": "gradient_norm", "action": "SetLearningRateScale",
        "requested": 0.5, "verdict": "granted", "reason": "spikes",
    }  # fmt: skip
    return DecisionRecord(**{**fields, **changes})


def write(path, *records):
    writer = DecisionWriter(path)
    for entry in records:
        writer.write(entry)
    writer.close()


def test_a_completed_record_replaces_the_first_in_its_place(tmp_path):
    path = tmp_path / "decisions.jsonl"
    write(
        path,
        record(5),
        record(7, requested=0.25),
        record(5, acted=0.5),
        record(5, acted=0.5, outcome="kept: median loss went from 2 to 1"),
    )
    first, second = read_decisions(path)
    assert (first.step, first.acted, first.outcome) == (
        5,
        0.5,
        "kept: median loss went from 2 to 1",
    )
    assert (second.step, second.acted) == (7, None)
    assert len(path.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    "other",
    [{"policy": "loss_scale"}, {"action": "SetClipNorm"}, {"requested": 0.4}, {"requested": None},
     {"verdict": "undone"}],
)  # fmt: skip
def test_records_that_differ_in_their_key_are_two(tmp_path, other):
    path = tmp_path / "decisions.jsonl"
    write(path, record(5), record(5, **other))
    assert len(read_decisions(path)) == 2


def test_non_finite_values_merge_and_read_back(tmp_path):
    path = tmp_path / "decisions.jsonl"
    write(path, record(5, requested=math.nan), record(5, requested=math.nan, acted=math.inf))
    (entry,) = read_decisions(path)
    assert math.isnan(entry.requested)
    assert entry.acted == math.inf
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"bare {name}"))


def test_a_cut_last_line_is_passed_over_and_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "decisions.jsonl"
    write(path, record(5), record(6))
    path.write_text(path.read_text()[:-20])
    assert [entry.step for entry in read_decisions(path)] == [5]
    write(path, record(8))
    assert [entry.step for entry in read_decisions(path)] == [5, 8]


def test_a_missing_log_is_empty(tmp_path):
    assert read_decisions(tmp_path / "decisions.jsonl") == []


@pytest.mark.parametrize("line", ["{not json}", '{"step": 1}', "[]", "[" * 100_000, "9" * 5000])
def test_a_whole_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "decisions.jsonl"
    write(path, record(5))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_decisions(path)


def test_a_line_is_in_the_file_before_the_writer_closes(tmp_path):
    path = tmp_path / "decisions.jsonl"
    writer = DecisionWriter(path)
    writer.write(record(5))
    assert len(read_decisions(path)) == 1
    writer.close()
    writer.close()


def test_new_run_folders_never_meet(tmp_path):
    from datetime import datetime, timezone

    now = datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    names = [new_run_folder(tmp_path / "runs", now=now).path.name for _ in range(3)]
    assert names == ["20300102-030405", "20300102-030405-2", "20300102-030405-3"]
    assert all((tmp_path / "runs" / name).is_dir() for name in names)


def test_a_run_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="out_dir"):
        RunFolder(tmp_path / "file" / "run").create()
    with pytest.raises(ConfigError, match="out_dir"):
        new_run_folder(tmp_path / "file" / "run")
