"""model_signals.jsonl: append-only, readable after a kill."""

from __future__ import annotations

import math

import pytest

from mindtune.controller.contract import ModelSignalRecord
from mindtune.controller.errors import ConfigError
from mindtune.controller.records import ModelSignalWriter, Recorder, RunFolder, read_model_signals


def record(step, **changes):
    fields = {"step": step, "layers": ["a", "b"], "gradient_norms": [1.0, math.inf]}
    return ModelSignalRecord(**{**fields, **changes})


def test_samples_come_back_and_a_cut_line_is_passed_over(tmp_path):
    path = tmp_path / "model_signals.jsonl"
    entries = [
        record(50, arrays={"rank": 3, "router": [0.5, math.nan]}),
        record(100, attention_entropy=[[0.5, 0.25]], token_confidence=0.5),
    ]
    writer = ModelSignalWriter(path)
    for entry in entries:
        writer.write(entry)
    writer.close()
    whole = path.read_text()
    assert "NaN" not in whole
    assert "update_norm" not in whole
    for cut in (1, 40, len(whole.splitlines()[1])):
        path.write_text(whole[:-cut])
        assert [entry.step for entry in read_model_signals(path)] == [50]
    # The next segment cuts the rest off instead of gluing to it.
    writer = ModelSignalWriter(path)
    writer.write(entries[1])
    writer.close()
    found = read_model_signals(path)
    assert [entry.step for entry in found] == [50, 100]
    assert found[1] == entries[1]
    assert found[0].gradient_norms == [1.0, math.inf]
    assert math.isnan(found[0].arrays["router"][1])


def test_a_run_without_samples_leaves_no_file(tmp_path):
    recorder = Recorder(RunFolder(tmp_path))
    recorder.close()
    assert read_model_signals(RunFolder(tmp_path).model_signals) == []
    assert not RunFolder(tmp_path).model_signals.exists()


def test_a_record_holds_one_value_per_layer():
    with pytest.raises(ValueError, match="one value per layer, but got 1 for 2 layers"):
        record(1, gradient_norms=[1.0])


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 0}', '{"step": 1, "colour": 2}'])
def test_a_whole_line_that_is_no_record_is_refused(tmp_path, line):
    path = tmp_path / "model_signals.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_model_signals(path)
