"""No wrong number: lines made of known values, then damaged, give these values or none.

Each family's lines are cut, broken into by another line, wrapped in what launchers add, coloured,
and lose bytes. Every number that is read must be one that was written for that step. Without
damage all of them must be read. `MINDTUNE_FUZZ_CASES` sets the cases per test (default 20).
"""

import json
import math
import os
from datetime import datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindtune.controller.records.log_readers import detect, open_log, read_log
from mindtune.experiments.replay.families import FAMILIES, log_of

CASES = int(os.environ.get("MINDTUNE_FUZZ_CASES", "20"))
FUZZ = settings(
    max_examples=CASES, deadline=None, derandomize="MINDTUNE_FUZZ_CASES" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
PREFIXES = (
    lambda line, time: f"[rank3]: {line}",
    lambda line, time: f"[default7]:{line}",
    lambda line, time: f" 5: {line}",
    lambda line, time: f"[1,3]<stdout>:{line}",
    lambda line, time: f"(TrainWorker pid=712, ip=10.0.0.7) {line}",
    lambda line, time: f"{time}.123456789Z stdout F {line}",
    lambda line, time: f"{time}.123456789Z [rank3]: {line}",
    lambda line, time: f"Nov 30 13:30:00 node7 python[123]: {line}",
    lambda line, time: json.dumps({"log": line + "\n", "stream": "stdout", "time": f"{time}Z"}),
)


@st.composite
def wrapped_lines(draw):
    """Return a log as launchers, collectors, terminals and editors keep it, undamaged."""
    family, random = draw(st.sampled_from(sorted(FAMILIES))), draw(st.randoms())
    lines, written = log_of(family, random, random.randrange(3, 9))
    dress = draw(st.sampled_from((*PREFIXES, lambda line, time: line)))
    start = datetime(2026, 11, 30, 13)
    lines = [
        dress(line, (start + timedelta(seconds=9 * i)).isoformat()) for i, line in enumerate(lines)
    ]
    text = draw(st.sampled_from(("\n", "\r\n", "\r", "\x1b[0m\n", "\n\n", "\nwandb: noise 1\n")))
    encoding = draw(st.sampled_from(("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be")))
    return family, (text.join(lines) + text).encode(encoding), written


MARKED = ("mindformers", "megatron", "hf_trainer", "fairseq", "jsonl")
"""Families in which a mark follows each number: a line end in a number is seen to be none."""


def damage(family, lines, random):
    """Return the text of a log after one to three accidents; the first line stays whole."""
    lines = [line + "\n" for line in lines]
    whole = list(lines)
    for at in random.sample(range(1, len(lines)), random.randrange(1, min(4, len(lines)))):
        line = lines[at]
        place = random.randrange(0, len(line))
        kind = random.choice(("cut", "broken into", "glued", "zeros", "byte", "end", "noise"))
        if kind == "cut":  # killed; another process goes on below
            place = place if family.startswith(MARKED) else max(0, line.rfind(" ", 0, place))
            lines[at] = line[:place] + "\n"
        elif kind == "broken into":  # another rank writes into the line
            lines[at] = line[:place] + random.choice(whole).rstrip("\n") + line[place:]
        elif kind == "glued":  # killed, and the next writer goes on in the same line
            lines[at] = line[:place] + random.choice(whole)
        elif kind == "zeros":  # a block that never reached the disk
            end = random.randrange(place, len(line))
            lines[at] = line[:place] + "\x00" * (end - place) + line[end:]
        elif kind == "byte":  # no text in this encoding
            lines[at] = line[:place] + "\ufffd" + line[place:]
        elif kind == "noise":
            lines[at] = line[:place] + random.choice(("\x1b[31m", "\x1b[0m")) + line[place:]
        else:
            lines[-1] = lines[-1][: random.randrange(0, len(lines[-1]))]
            break
    return "".join(lines)


def same(one, other):
    return (math.isnan(one) and math.isnan(other)) or one == pytest.approx(other, rel=1e-12)


def wrong_numbers(observations, written):
    """Return what was read and never written of that step."""
    wrong = []
    for o in observations:
        known = written.get(o.step)
        for name in ("loss", "grad_norm", "learning_rate", "step_time_s"):
            value = getattr(o, name)
            if value is not None and (known is None or not same(value, known.get(name, math.pi))):
                wrong.append((o.step, name, value))
    return wrong


@given(case=wrapped_lines())
@FUZZ
def test_an_undamaged_log_is_read_whole_whatever_is_around_its_lines(case, tmp_path):
    family, content, written = case
    path = tmp_path / "log"
    path.write_bytes(content)
    log = read_log(path)
    assert log.format == family.partition(" ")[0]
    assert wrong_numbers(log.observations, written) == []
    read = {
        o.step: [n for n in written[o.step] if getattr(o, n) is None] for o in log.observations
    }
    assert read == {step: [] for step in written}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@given(random=st.randoms())
@FUZZ
def test_a_damaged_log_gives_no_number_that_was_not_written(family, random, tmp_path):
    lines, written = log_of(family, random, random.randrange(3, 9))
    path = tmp_path / "log"
    text = damage(family, lines, random)
    path.write_bytes(text.encode().replace("\ufffd".encode(), b"\xff"))
    log = list(open_log(path, family.partition(" ")[0]))
    assert wrong_numbers(log, written) == [], text
    found = detect(path)
    assert found is not None
    if found.format.name in family:
        assert wrong_numbers(open_log(path), written) == [], text
