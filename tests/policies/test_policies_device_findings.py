"""Memory, stragglers, periodic spikes, slow steps, and readings that cannot be true."""

from __future__ import annotations

import math
import random

import pytest

from mindtune.policies.detectors import DetectorState, DetectorThresholds, update
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation

GB = 2**30


def run(rows: list[dict], every: int = 1) -> list[Finding]:
    state, found = DetectorState(), []
    for index, row in enumerate(rows):
        findings, state = update(Observation(step=1 + index * every, **row), state)
        found.extend(findings)
    return found


def of(found: list[Finding], kind: FindingKind) -> list[Finding]:
    return [finding for finding in found if finding.kind is kind]


def memory(used: float, key: str = "memory_allocated_bytes") -> dict:
    return {key: int(used), "device_memory_total_bytes": 64 * GB}


@pytest.mark.parametrize("key", ["memory_allocated_bytes", "device_memory_used_bytes"])
@pytest.mark.parametrize("per_step", [0.05, 0.1, 0.3])
def test_growth_is_reported_with_the_steps_left_within_32_steps(per_step, key) -> None:
    g = random.Random(0)
    rows = [memory((20 + 0.1 * g.random()) * GB, key) for _ in range(100)]
    rows += [memory((20 + per_step * i + 0.1 * g.random()) * GB, key) for i in range(140)]
    found = of(run(rows), FindingKind.MEMORY_PRESSURE)
    first = found[0]
    assert 100 < first.step <= 100 + 40
    left = first.number("steps_left")
    assert left == pytest.approx(44 / per_step - (first.step - 100), rel=0.15)
    assert f"about {left:.0f} steps" in first.message


def test_a_slow_leak_below_noise_is_seen_on_the_long_scale() -> None:
    g = random.Random(0)
    rows = [memory((30 + 0.03 * i + g.random()) * GB) for i in range(700)]
    found = of(run(rows), FindingKind.MEMORY_PRESSURE)
    assert found[0].step <= 320
    assert found[0].severity is Severity.WARNING


def test_memory_that_runs_out_soon_is_critical_before_it_does() -> None:
    rows = [memory((20 + 0.4 * i) * GB) for i in range(110)]
    found = of(run(rows), FindingKind.MEMORY_PRESSURE)
    critical = next(f for f in found if f.severity is Severity.CRITICAL)
    assert critical.number("share") < 0.85
    assert critical.number("steps_left") <= 64


@pytest.mark.parametrize(
    ("share", "severity"), [(0.84, None), (0.86, "warning"), (0.94, "warning"), (0.96, "critical")]
)
def test_shares_of_memory(share, severity) -> None:
    rises = [*[memory(40 * GB)] * 20, memory(share * 64 * GB)]
    found = of(run(rises), FindingKind.MEMORY_PRESSURE)
    assert [f.severity.value for f in found] == ([severity] if severity else [])


def test_a_device_that_is_full_and_stays_as_it_is_has_shown_that_the_run_fits() -> None:
    g = random.Random(0)
    tuned = [memory((0.97 + 0.0005 * g.random()) * 64 * GB) for _ in range(300)]
    found = of(run(tuned), FindingKind.MEMORY_PRESSURE)
    assert [f.severity for f in found] == [Severity.WARNING] * 300
    # It rises in mid-run: critical until it has held for 64 steps.
    later = [*[memory(0.9 * 64 * GB)] * 40, *tuned]
    critical = [
        f for f in of(run(later), FindingKind.MEMORY_PRESSURE) if f.severity is Severity.CRITICAL
    ]
    assert [f.step for f in critical] == list(range(41, 41 + 64))


def test_a_pool_that_fills_up_and_random_sequence_lengths_are_no_growth() -> None:
    g = random.Random(0)
    filling = [memory((50 - 30 * math.exp(-i / 12)) * GB) for i in range(400)]
    lengths = [memory((20 + 30 * g.random()) * GB) for _ in range(4000)]
    assert run(filling) == []
    assert run(lengths) == []


def slow(rank: int, ratio: float) -> dict:
    return {"straggler_rank": rank, "straggler_ratio": ratio}


@pytest.mark.parametrize(
    ("ratio", "severity"), [(1.2, None), (1.5, "warning"), (2.5, "critical"), (40.0, "critical")]
)
def test_a_straggler_is_one_rank_for_many_steps(ratio, severity) -> None:
    g = random.Random(0)
    rows = [slow(g.randrange(8), 1 + 0.05 * g.random()) for _ in range(60)]
    rows += [slow(3, ratio * (1 + 0.05 * g.random())) for _ in range(30)]
    found = of(run(rows), FindingKind.STRAGGLER)
    assert bool(found) == (severity is not None)
    if found:
        assert found[0].step <= 60 + 12
        assert found[-1].severity.value == severity
        assert found[0].evidence["rank"] == 3


def test_one_slow_step_and_ranks_that_take_turns_are_no_straggler() -> None:
    g = random.Random(0)
    rows = [slow(3, 1.05)] * 30 + [slow(3, 9.0)] + [slow(3, 1.05)] * 30
    rows += [slow(g.randrange(4), 1.8) for _ in range(400)]
    assert run(rows) == []


@pytest.mark.parametrize("signal", ["loss", "grad_norm"])
@pytest.mark.parametrize(("period", "micro", "multiple"), [(8, 4, 1), (12, 8, 0), (50, None, 0), (100, 1, 0)])  # fmt: skip
def test_periodic_spikes_are_found_with_their_period_at_the_fifth(
    signal, period, micro, multiple
) -> None:
    g = random.Random(period)
    rows = [{signal: 2 + g.gauss(0, 0.05), "num_microbatches": micro} for _ in range(200)]
    for i in range(12 * period):
        value = 8.0 if i % period == period - 1 else 2 + g.gauss(0, 0.05)
        rows.append({signal: value, "num_microbatches": micro})
    found = of(run(rows), FindingKind.PERIODIC_SPIKES)
    assert found[0].last_step == 200 + 5 * period
    assert {f.evidence["period"] for f in found} == {period}
    assert {f.evidence["multiple_of_microbatches"] for f in found} == {multiple}
    assert ("micro-batches" in found[0].message) == bool(multiple)
    assert found[0].severity is Severity.WARNING


def test_periodic_spikes_of_two_steps_with_others_in_between_are_found() -> None:
    g = random.Random(3)
    rows = [{"loss": 2 + g.gauss(0, 0.05)} for _ in range(1200)]
    for start in range(200, 1200, 40):
        rows[start]["loss"] = rows[start + 1]["loss"] = 6.0
    for start in (333, 700):
        rows[start]["loss"] = 6.0
    found = of(run(rows), FindingKind.PERIODIC_SPIKES)
    assert found[0].last_step <= 200 + 8 * 40
    assert {f.evidence["period"] for f in found} == {40}


def test_random_spikes_have_no_period() -> None:
    for seed in range(10):
        g = random.Random(seed)
        rows = [{"loss": 9.0 if g.random() < 0.03 else 2 + g.gauss(0, 0.05)} for _ in range(3000)]
        assert of(run(rows), FindingKind.PERIODIC_SPIKES) == []


def test_slow_steps_that_last_are_a_warning_unless_the_batch_has_grown() -> None:
    rows = [{"step_time_s": 0.2 + 0.001 * (i % 5), "global_batch_size": 8} for i in range(60)]
    after = [{"step_time_s": 0.6 + 0.001 * (i % 5), "global_batch_size": 8} for i in range(60)]
    found = of(run([*rows, *after]), FindingKind.STEP_TIME_SPIKE)
    assert [f.step for f in found if f.severity is Severity.WARNING] == [60 + 32]
    grown = [{**row, "global_batch_size": 24} for row in after]
    assert run([*rows, *grown]) == []


def test_one_long_wait_in_32_steps_is_no_stall() -> None:
    rows = [{"step_time_s": 0.2, "data_time_s": 0.01} for _ in range(60)]
    rows[40] = {"step_time_s": 100.0, "data_time_s": 99.0}
    assert of(run(rows), FindingKind.DATA_STALL) == []
    for i in range(40, 60, 8):
        rows[i] = {"step_time_s": 100.0, "data_time_s": 99.0}
    assert of(run(rows), FindingKind.DATA_STALL)


IMPOSSIBLE = [
    ("step_time_s", -1.0), ("step_time_s", 0.0), ("step_time_s", math.nan), ("data_time_s", -0.1),
    ("data_time_s", math.inf), ("device_utilization", 1.7), ("device_utilization", -0.2),
    ("device_utilization", math.nan), ("mfu", 1.5), ("mfu", math.nan), ("mfu", -0.1),
    ("tokens_per_s", math.inf), ("tokens_per_s", -3.0), ("grad_norm", -2.0),
    ("device_memory_used_bytes", 10**12), ("memory_allocated_bytes", -5),
    ("device_memory_total_bytes", 0), ("straggler_ratio", 0.0), ("learning_rate", -1e-3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_an_impossible_reading_is_reported_once_and_enters_no_statistic(name, value) -> None:
    g = random.Random(0)

    def rows(wrong: bool) -> list[dict]:
        made = []
        for i in range(120):
            row = {
                "loss": 2 + g.gauss(0, 0.05), "grad_norm": g.lognormvariate(0, 0.1),
                "step_time_s": 0.2 + 0.01 * g.random(), "data_time_s": 0.01, "mfu": 0.3,
                "device_utilization": 0.8 + 0.1 * g.random(), "tokens_per_s": 1e4,
                "device_memory_total_bytes": 64 * GB, "device_memory_used_bytes": 30 * GB,
                "memory_allocated_bytes": 20 * GB, "straggler_rank": 1, "straggler_ratio": 1.1,
                "learning_rate": 1e-3,
            }  # fmt: skip
            if i % 3 == 2:
                row[name] = value if wrong else None
            made.append(row)
        return made

    found, state = [], DetectorState()
    clean = DetectorState()
    g.seed(0)
    odd = rows(True)
    g.seed(0)
    for step, (row, other) in enumerate(zip(odd, rows(False), strict=True), start=1):
        findings, state = update(Observation(step=step, **row), state)
        found.extend(findings)
        _, clean = update(Observation(step=step, **other), clean)
    (finding,) = found
    assert (finding.kind, finding.step) == (FindingKind.MFU_INVALID, 3)
    assert finding.severity is Severity.WARNING
    assert name in finding.message
    assert (state.performance, state.memory, state.grad_norm, state.straggler) == (
        clean.performance, clean.memory, clean.grad_norm, clean.straggler,
    )  # fmt: skip


@pytest.mark.parametrize("value", [0.12, 0.0, 0.7])
def test_a_utilization_that_stands_still_is_reported_once_and_not_believed(value) -> None:
    g = random.Random(0)
    rows = [{"device_utilization": 0.9 + 0.05 * g.random()} for _ in range(60)]
    rows += [{"device_utilization": value}] * 400
    found = run(rows)
    stuck = of(found, FindingKind.MFU_INVALID)
    assert [(f.step, f.last_step) for f in stuck] == [(61, 60 + 128)]
    low = of(found, FindingKind.LOW_UTILIZATION)
    assert bool(low) == (value < 0.55)
    again = run([*rows, *[{"device_utilization": 0.9 + 0.05 * g.random()} for _ in range(60)]])
    assert len(of(again, FindingKind.MFU_INVALID)) == 1


def test_a_saturated_device_is_not_stuck() -> None:
    assert run([{"device_utilization": 1.0}] * 400) == []


def test_every_default_is_within_its_own_bounds_and_documented() -> None:
    source = DetectorThresholds()
    for name, entry in DetectorThresholds.__dataclass_fields__.items():
        assert entry.metadata["low"] <= getattr(source, name) <= entry.metadata["high"], name
