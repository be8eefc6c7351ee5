"""Rows of signal tables: the short way of reading them gives what the careful one gives."""

import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindtune.controller.contract import SignalRow, format_header, format_row
from mindtune.controller.records.log_readers import table
from mindtune.policies.signals import Observation

CASES = int(os.environ.get("MINDTUNE_FUZZ_CASES", "100"))
COLUMNS = ("wall_time_s", "step", "phase", "run", "loss", "step_time_ms", "mfu", "lr",
           "memory_allocated_bytes", "tokens")  # fmt: skip
CELLS = ("", "1", "0", "2.5", "-1", "nan", "-inf", "1e400", "1e-3", " 3 ", "12ms", "45%", "true", '"7"', "1_0",
         "1,5", "٣", "train", "eval", "1.#QNAN", "9" * 20, "step", "\ufffd", "0x10", "")  # fmt: skip


def read(lines, *, short):
    with pytest.MonkeyPatch.context() as patch:
        if not short:
            patch.setattr(table, "_LONGEST", 0)
        reader = table.SIGNALS_TABLE.start()
        return [reader.feed(line) for line in lines]


def spelled(told):
    return [
        None if records is None else [
            {n: "nan" if v != v else (type(v), v) for n, v in vars(record.observation).items()}
            for record in records
        ]
        for records in told
    ]  # fmt: skip


@given(rows=st.lists(st.lists(st.sampled_from(CELLS), min_size=9, max_size=11), max_size=6))
@settings(max_examples=CASES, deadline=None)
def test_any_row_gives_what_it_gave_when_read_with_care(rows):
    lines = [",".join(COLUMNS) + "\n", *(",".join(row) + "\n" for row in rows)]
    assert spelled(read(lines, short=True)) == spelled(read(lines, short=False))


def test_our_own_rows_are_read_in_the_short_way(monkeypatch):
    observation = Observation(step=7, run=0, phase="train", wall_time_s=1.5, loss=2.5, tokens=64,
                              clip_norm=math.inf, step_time_s=0.125)  # fmt: skip
    reader = table.SIGNALS_TABLE.start()
    assert reader.feed(format_header()) is None
    monkeypatch.setattr(table, "_cells", lambda *_: pytest.fail("read with care"))
    (record,) = reader.feed(format_row(SignalRow(observation)))
    assert record.observation == observation
