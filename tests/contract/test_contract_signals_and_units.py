"""The signal table, units and knobs."""

import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindtune.controller.contract import SignalRow, format_header, format_row, read_rows
from mindtune.controller.contract.schemas import FOLDER
from mindtune.controller.errors import ConfigError
from mindtune.controller.units import (
    format_duration,
    format_size,
    parse_duration,
    parse_rate,
    parse_size,
)
from mindtune.policies.signals import Observation
from mindtune.search.errors import SearchError
from mindtune.search.knobs import KNOBS, canonical


def test_sample_table_is_read_with_aliases_and_unknown_columns():
    text = (FOLDER.parent / "samples" / "signals.csv").read_text()
    first, second = read_rows(text.splitlines(keepends=True), source="signals.csv")
    assert first.observation.learning_rate == 0.001
    assert first.observation.step_time_s == 12.0
    assert first.observation.grad_norm == math.inf
    assert first.extra == {"note": "first"}
    assert math.isnan(second.observation.loss)
    assert second.observation.grad_norm is None
    assert second.observation.phase == "train"


@given(
    step=st.integers(1, 10**9),
    loss=st.none() | st.floats(),
    rate=st.none() | st.floats(),
    tokens=st.none() | st.integers(0, 10**15),
    phase=st.none() | st.sampled_from(["train", "compile", "eval", "save"]),
    note=st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"])).map(str.strip),
)
def test_any_row_round_trips(step, loss, rate, tokens, phase, note):
    observation = Observation(step=step, loss=loss, learning_rate=rate, tokens=tokens, phase=phase)
    text = format_header(["note"]) + format_row(SignalRow(observation, {"note": note}), ["note"])
    (row,) = read_rows(text.splitlines(keepends=True), source="t")
    assert repr(row.observation) == repr(observation)
    assert row.extra == {"note": note}


@pytest.mark.parametrize("field", fields(Observation), ids=lambda field: field.name)
def test_every_column_comes_back_as_what_it_is(field):
    value = "train" if "str" in field.type else 3 if "int" in field.type else 3.0
    observation = Observation(**{"step": 1, field.name: value})
    text = format_header() + format_row(SignalRow(observation))
    (row,) = read_rows(text.splitlines(keepends=True), source="t")
    assert repr(row.observation) == repr(observation)


def test_a_cut_last_line_is_passed_over_and_a_damaged_line_is_not():
    head = "step,loss\n1,2.5\n"
    assert len(list(read_rows((head + "2,2").splitlines(keepends=True), source="t"))) == 1
    with pytest.raises(ConfigError, match="t, line 3: must have 2 cells, but got 1"):
        list(read_rows((head + "2\n3,1\n").splitlines(keepends=True), source="t"))
    with pytest.raises(ConfigError, match="line 3: loss must be a number, but got 'x'"):
        list(read_rows((head + "2,x\n").splitlines(keepends=True), source="t"))
    with pytest.raises(ConfigError, match="must start with a header line"):
        list(read_rows(["loss\n"], source="t"))
    with pytest.raises(ConfigError, match="t, line 2 must be CSV, but: field larger than"):
        list(read_rows(["step,loss\n", "1," + "9" * 200_000 + "\n"], source="t"))
    with pytest.raises(ConfigError, match="t, line 1 must be CSV"):
        list(read_rows(["step," + "x" * 200_000 + "\n"], source="t"))
    (row,) = read_rows(["\ufeffstep,loss\r\n", "1,2.0\r\n"], source="t")
    assert (row.observation.step, row.observation.loss) == (1, 2.0)
    with pytest.raises(ConfigError, match="an empty file"):
        list(read_rows([], source="t"))


@pytest.mark.parametrize(
    ("text", "size"),
    [("58.5GB", int(58.5 * 2**30)), ("59000MB", 59000 * 2**20), ("1 KiB", 1024), ("12", 12),
     (4096, 4096), ("2e3", 2000), ("1t", 2**40)],
)  # fmt: skip
def test_sizes_are_binary(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "GB",
        "5XB",
        "-1GB",
        "0",
        "nan",
        "5GB/s",
        "5 minutes",
        True,
        None,
        [],
        "1,5GB",
        "",
        "1e400GB",
        10**400,
        "0.1",
    ],
)
def test_nonsense_sizes_are_refused(text):
    with pytest.raises(ValueError, match="size such as 58.5GB, but got"):
        parse_size(text)


def test_rates_are_decimal_and_durations_have_units():
    assert parse_rate("50GB/s") == 50e9
    assert parse_rate(5) == 5.0
    assert [parse_duration(t) for t in ("90s", "10min", "2h", "250ms", 7)] == [
        90.0, 600.0, 7200.0, 0.25, 7.0,
    ]  # fmt: skip
    for wrong in ("50GB", "50Gb", "50Gb/s", "x"):
        with pytest.raises(ValueError, match="rate such as"):
            parse_rate(wrong)
    for wrong in ("10 parsecs", "0s", "inf"):
        with pytest.raises(ValueError, match="duration such as"):
            parse_duration(wrong)


def test_sizes_and_durations_read_well():
    assert format_size(559939584) == "534.0 MB"
    assert format_size(12) == "12 B"
    assert format_size(10**400) == "inf"
    assert format_duration(125) == "2 min 05 s"
    assert format_duration(0.25) == "250 ms"
    assert format_duration(7500) == "2 h 05 min"
    assert format_duration(0.9997) == "1 s"
    assert format_duration(59.7) == "1 min 00 s"


@pytest.mark.parametrize(
    ("name", "value", "spelling"),
    [
        ("recompute", None, "none"),
        ("recompute", "interval:1", "full"),
        ("recompute", "Interval:4", "interval:4"),
        ("precision", "bf16", "bfloat16"),
        ("gradient_compression", "topk:0.10", "topk:0.1"),
        ("gradient_compression", "powersgd:4", "powersgd:4"),
        ("data_parallel", "8", 8),
        ("use_seq_parallel", "true", True),
        ("env.X", 3, "3"),
    ],
)
def test_values_have_one_spelling(name, value, spelling):
    assert canonical(name, value) == spelling
    assert canonical(name, canonical(name, value)) == spelling


@pytest.mark.parametrize(
    ("name", "value"),
    [("data_parallel", 1.5), ("data_parallel", True), ("recompute", "half"),
     ("gradient_compression", "topk:0"), ("gradient_compression", "powersgd:1.5"),
     ("use_seq_parallel", 1), ("precision", "int8"), ("env.1X", "a"), ("env.X", [1])],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(name, value):
    with pytest.raises(SearchError, match="but got"):
        canonical(name, value)


def test_defaults_and_auto_values_are_canonical():
    for entry in KNOBS.values():
        for value in [*(entry.auto or ()), *([] if entry.default is None else [entry.default])]:
            assert canonical(entry.name, value) == value
