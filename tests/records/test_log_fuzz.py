"""Readers under damage: never an exception, and never a number that was not in the log.

`MINDTUNE_FUZZ_CASES` sets the cases per test (default 40).
"""

import math
import os
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindtune.controller.records.log_readers import READERS, LogStream, read_log
from mindtune.controller.records.log_readers.reader import NUMBER, number
from mindtune.policies.signals import Observation

CASES = int(os.environ.get("MINDTUNE_FUZZ_CASES", "40"))
SAMPLES = (
    ("{ Epoch:[  1/  2], step:[    1/    3], loss:[5.507/5.507], per_step_time: 5207ms, lr: 0.5, "
    "overflow cond: True, loss_scale: 8192.0, global_norm: [1.5], train_throughput_per_npu: 0.1T"),
    (" iteration 10/ 1000 | consumed samples: 80 | elapsed time per iteration (ms): 1210.0 | learning "
    "rate: 1.5E-04 | global batch size: 8 | lm loss: 1.03E+01 | loss scale: 65536.0 | grad norm: "
    "1.458 | num zeros: 0.0 | number of skipped iterations: 1 | number of nan iterations: 0 |"),
    ("[2023-04-18 01:46:52,554] [INFO] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss "
    "scale: 65536, reducing to 32768"),
    ("[2023-04-18 03:45:02,742] [INFO] [logging.py:96:log_dist] [Rank 0] step=1840, skipped=20, "
    "lr=[1.4e-08, 1.4e-08], mom=[(0.9, 0.95)]"),
    '{"loss": 2.5, "grad_norm": NaN, "step": 10}, "log_history": [{"loss": 2.5, "step": 3}]',
    "{'loss': 2.5, 'grad_norm': 0.3, 'learning_rate': 5e-05, 'epoch': 0.01}",
    '{"current_steps": 10, "loss": 0.85, "lr": 9.9e-06, "elapsed_time": "1 day, 0:02:12"}',
    '12 | INFO | train_inner | {"loss": "16.475", "num_updates": "1", "wps": "0", "wpb": "16"}',
    "s:10 trl:7.14 lr:0.000085 norm:1.22",
    "iter 10: loss 7.1, time 140.2ms, mfu 12.3%",
    "step:10/1875 train_loss:7.1 train_time:44119ms step_avg:nanms",
    "epoch: 1 step: 5, loss is 2.3",
    "Epoch time: 117044.351 ms, per step time: 4876.848 ms, avg loss: 2.037",
    "Epoch: 0: 100%|##########| 226/226 [01:58<00:00,  1.91it/s, loss=4.45]",
    "Epoch 12/200, step:100/1487, loss:0.08, overflow:False, loss_scale:32768.0, step cost:182ms",
    "epoch,step,loss,grad_norm,run",
    "1,2,2.5,1.25,0",
)  # fmt: skip
ODD = ("nan", "NaN", "inf", "-inf", "1e999", "-1e999", "9" * 30, "-1", "", "\x1b[31m", "\r", "|",
       "}", "[", "1.", ".5", "1e", "0x1p3", "١٢")  # fmt: skip


@st.composite
def damaged_lines(draw):
    """Return lines of real formats: cut, mixed, numbers replaced, characters lost."""
    lines = []
    for line in draw(st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=8)):
        text = line
        for _ in range(draw(st.integers(0, 3))):
            place = draw(st.integers(0, len(text)))
            length = draw(st.integers(0, 12))
            odd = draw(st.one_of(st.sampled_from(ODD), st.text(max_size=4)))
            text = text[:place] + odd + text[place + length :]
        lines.append(text + "\n")
    return lines


def is_sound(observation):
    for name, value in vars(observation).items():
        if value is None or name == "phase":
            continue
        assert isinstance(value, int | float), name
        if name in ("step", "run"):
            assert isinstance(value, int)
            assert value >= 0
    assert isinstance(observation, Observation)


def numbers_in(text):
    """Return every number that stands in a text, however it is cut."""
    return {number(found[0]) for found in re.finditer(NUMBER, text)}


@pytest.mark.parametrize("entry", READERS, ids=lambda entry: entry.name)
@given(lines=damaged_lines())
@settings(max_examples=CASES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_damage_makes_a_reader_raise(entry, lines):
    reader = entry.start()
    printed = numbers_in("".join(line.strip("\n") for line in lines)) | numbers_in("".join(lines))
    told = [record for line in lines for record in reader.feed(line) or ()]
    for record in [*told, *reader.finish()]:
        is_sound(record.observation)
        loss = record.observation.loss
        assert loss is None or math.isnan(loss) or loss in printed


@given(lines=damaged_lines())
@settings(max_examples=CASES, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
def test_steps_of_a_damaged_log_rise_within_each_segment(tmp_path, lines):
    path = tmp_path / "log"
    path.write_bytes("".join(lines).encode("utf-8", "surrogatepass"))
    log = read_log(path)
    last = {}
    for observation in () if log is None else log.observations:
        is_sound(observation)
        assert observation.step > last.get(observation.run, -1)
        last[observation.run] = observation.step


def test_memory_does_not_grow_with_the_log(tmp_path, monkeypatch):
    """A merger that held more than its window would hold all of a log."""
    path = tmp_path / "log"
    with path.open("w") as file:
        for step in range(1, 30_001):
            file.write(f"epoch: 1 step: {step}, loss is {math.sin(step):.6f}\n")
    ahead = 0
    stream = LogStream(path, next(e for e in READERS if e.name == "mindspore_monitor"))
    for count, _ in enumerate(stream, start=1):
        ahead = max(ahead, stream.records - count)
    assert count == 30_000
    assert ahead <= 65


@pytest.mark.parametrize("entry", READERS, ids=lambda entry: entry.name)
@pytest.mark.parametrize(
    "part",
    ["a", "a-", "1", "loss ", "{ '", "overflow", "step:1 loss" + " " * 20, "|", "%|", "1%|#| 1/2 [",
     "=1,", "loss=1 ", "Tensor(", '{"a": ', "[", "(train) [", " iteration 1/ 2 | a:", "epoch 1: "]
)  # fmt: skip
def test_a_line_that_never_ends_costs_no_more_than_its_length(entry, part):
    """A pattern that looks again from every character would take minutes here."""
    line = part * (60_000 // len(part))
    start = time.process_time()
    reader = entry.start()
    reader.feed(line)
    reader.feed(f"| epoch 001:   1 / 2 step:1 loss{line}\n")
    reader.finish()
    assert time.process_time() - start < 3
