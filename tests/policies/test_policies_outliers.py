"""Bursts, level shifts and arbitrary observations, by property."""

from __future__ import annotations

import json
import math
import random

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mindtune.policies.detectors import DetectorState, update
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import SIGNAL_NAMES, Observation
from mindtune.policies.state import from_json, to_json

relaxed = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
seeds = st.integers(0, 10_000)
levels = st.one_of(st.floats(-100, 100), st.floats(-1e-6, 1e-6), st.just(0.0))


def run(values: list[float], signal: str = "loss") -> list[Finding]:
    state, found = DetectorState(), []
    for step, value in enumerate(values, start=1):
        findings, state = update(Observation(step=step, **{signal: value}), state)
        found.extend(findings)
    return found


def normal(level: float, sigma: float, count: int, seed: int) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(level, sigma) for _ in range(count)]


def steps(found: list[Finding], kind: FindingKind = FindingKind.LOSS_SPIKE) -> list[int]:
    return [finding.step for finding in found if finding.kind is kind]


@relaxed
@given(
    level=levels, relative=st.floats(0.001, 0.2), count=st.integers(2, 20),
    height=st.floats(15, 1e6), seed=seeds,
)  # fmt: skip
def test_a_burst_is_flagged_completely(level, relative, count, height, seed) -> None:
    sigma = relative * max(abs(level), 1e-3)
    spike = level + height * max(sigma, 0.05 * abs(level))
    values = [*normal(level, sigma, 150, seed), *[spike] * count]
    found = [step for step in steps(run(values)) if step > 150]
    assert found == list(range(151, 151 + count))


@relaxed
@given(level=levels, relative=st.floats(0.001, 0.2), distance=st.floats(10, 100), seed=seeds)
def test_a_level_shift_is_released_within_32_steps(level, relative, distance, seed) -> None:
    sigma = relative * max(abs(level), 1e-3)
    other = level + distance * max(sigma, 0.05 * abs(level))
    values = [*normal(level, sigma, 150, seed), *normal(other, sigma, 80, seed + 1)]
    found = run(values)
    assert [f.last_step for f in found if f.kind is FindingKind.LEVEL_SHIFT] == [182]
    assert [step for step in steps(found) if step > 182] == []


@relaxed
@given(good=st.integers(1, 3), bad=st.integers(1, 3), seed=seeds)
def test_a_burst_with_good_samples_in_between_is_graver_than_a_note(good, bad, seed) -> None:
    generator = random.Random(seed)
    values = normal(2, 0.1, 200, seed)
    for _ in range(8):
        values += [20.0 + generator.random()] * bad + [2.0] * good
    flagged = [f for f in run(values) if f.kind is FindingKind.LOSS_SPIKE and f.step > 200]
    assert len(flagged) == 8 * bad
    assert flagged[0].severity is Severity.INFO
    assert {f.severity for f in flagged[5:]} == {Severity.WARNING}


def test_single_outliers_far_apart_stay_notes() -> None:
    values = [40.0 if i % 97 == 96 else v for i, v in enumerate(normal(2, 0.1, 400, 0))]
    assert {f.severity for f in run(values)} == {Severity.INFO}


odd = st.one_of(
    st.none(), st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1.0]),
    st.sampled_from([1e308, -1e308, 5e-324, 1e30, 2.0**24, 2**63, -(2**63)]),
    st.integers(-10, 10),
)  # fmt: skip
NUMBERS = [name for name in SIGNAL_NAMES if name not in ("step", "phase", "run")]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(NUMBERS), odd), min_size=1, max_size=12),
    repeats=st.integers(1, 40), gap=st.sampled_from([1, 1, 7, 10, -2, 0]),
)  # fmt: skip
@example(rows=[{"loss": 2**63}, {"loss": 1}], repeats=1, gap=1)
@example(rows=[{"grad_norm": 2**63}, {"grad_norm": 1}], repeats=9, gap=1)
@example(rows=[{"step_time_s": 2**63}, {"step_time_s": 1}], repeats=9, gap=1)
def test_no_observation_raises_and_the_state_survives_json(rows, repeats, gap) -> None:
    state, step = DetectorState(), 1
    for row in rows * repeats:
        findings, state = update(Observation(step=step, **row), state)
        step = max(1, step + gap)
        for finding in findings:
            assert finding.message.endswith(".")
            assert finding.step <= finding.last_step
    text = json.dumps(to_json(state), allow_nan=False)
    assert from_json(DetectorState, json.loads(text)) == state


def test_the_state_at_full_windows_is_below_40_kib() -> None:
    generator = random.Random(0)
    state = DetectorState()
    for step in range(1, 1500):
        row = {name: generator.random() * 1e-7 for name in NUMBERS}
        if step % 40 == 0:
            row["loss"] = row["grad_norm"] = row["step_time_s"] = 1.0
        row["device_memory_total_bytes"] = 64 << 30
        _, state = update(Observation(step=step, **row), state)
    assert len(json.dumps(to_json(state))) < 40 * 1024
