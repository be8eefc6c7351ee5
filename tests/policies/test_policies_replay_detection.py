"""Public failures of detectors (R1 to R16 of the research), each with the behaviour that is right.

Levels, signs, seeds and lengths vary, since it is the kind of fault that must be seen.
"""

from __future__ import annotations

import math
import random

import pytest

from mindtune.policies.detectors import DetectorState, update
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation

SEEDS = pytest.mark.parametrize("seed", range(5))
LEVELS = pytest.mark.parametrize(
    ("level", "sigma"), [(2.0, 0.05), (2e-4, 5e-6), (3e5, 2e4), (0.0, 0.1), (-4.0, 0.2)]
)


def run(rows: list[dict]) -> list[Finding]:
    state, found = DetectorState(), []
    for step, row in enumerate(rows, start=1):
        findings, state = update(Observation(step=step, **row), state)
        found.extend(findings)
    return found


def steps(found: list[Finding], kind: FindingKind) -> list[int]:
    return [finding.step for finding in found if finding.kind is kind]


def normal(level: float, sigma: float, count: int, seed: int) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(level, sigma) for _ in range(count)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_r1_non_finite_norms_are_a_class_of_their_own_and_are_counted(value) -> None:
    found = run([{"grad_norm": 1.0}] * 20 + [{"grad_norm": value}] * 1000)
    bad = [f for f in found if f.kind is FindingKind.NON_FINITE_GRAD]
    assert [f.step for f in bad] == list(range(21, 1021))
    assert [f.number("consecutive") for f in bad] == list(range(1, 1001))
    assert bad[9].severity is Severity.CRITICAL
    assert "gradient norm was" in bad[9].message


@SEEDS
@LEVELS
@pytest.mark.parametrize("signal", ["loss", "grad_norm"])
def test_r3_one_nan_costs_one_step_and_hides_no_spike(signal, level, sigma, seed) -> None:
    if signal == "grad_norm" and level <= 0:
        level, sigma = 1.0, 0.1
    spike = level + 100 * max(sigma, 0.05 * abs(level))
    values = [
        *normal(level, sigma, 200, seed), math.nan, *normal(level, sigma, 60, seed + 50),
        *[spike] * 5, *normal(level, sigma, 40, seed + 90),
    ]  # fmt: skip
    found = run([{signal: value} for value in values])
    kind = FindingKind.LOSS_SPIKE if signal == "loss" else FindingKind.GRAD_NORM_SPIKE
    bad = FindingKind.NON_FINITE_LOSS if signal == "loss" else FindingKind.NON_FINITE_GRAD
    assert steps(found, bad) == [201]
    assert steps(found, kind) == [262, 263, 264, 265, 266]


@SEEDS
@LEVELS
def test_r4_all_of_a_burst_of_ten_are_flagged_and_none_after_it(level, sigma, seed) -> None:
    spike = level + 100 * max(sigma, 0.05 * abs(level))
    values = [
        *normal(level, sigma, 200, seed), *[spike] * 10, *normal(level, sigma, 100, seed + 50),
    ]  # fmt: skip
    found = run([{"loss": value} for value in values])
    assert steps(found, FindingKind.LOSS_SPIKE) == list(range(201, 211))
    grave = [f.step for f in found if f.severity is Severity.WARNING]
    assert grave[-1] == 210
    assert steps(found, FindingKind.LEVEL_SHIFT) == []


@SEEDS
@pytest.mark.parametrize(
    ("before", "after", "sigma"),
    [(1.0, 3.0, 0.1), (1.0, 1.7, 0.1), (5.0, 60.0, 8.0), (-3.0, 0.0, 0.1), (0.0, 4.0, 0.2),
     (1e-6, 5e-6, 1e-7), (2.0, 3.0, 0.1), (-8.0, -4.0, 0.3)],
)  # fmt: skip
def test_r5_a_level_shift_is_released_in_32_steps(before, after, sigma, seed) -> None:
    values = [*normal(before, sigma, 100, seed), *normal(after, sigma, 300, seed + 50)]
    found = run([{"loss": value} for value in values])
    (shift,) = [f for f in found if f.kind is FindingKind.LEVEL_SHIFT]
    # A level only 7 deviations away may show itself a step or two late.
    assert 101 <= shift.step <= 104
    assert shift.last_step == shift.step + 31
    assert max(steps(found, FindingKind.LOSS_SPIKE)) <= shift.last_step


@SEEDS
@pytest.mark.parametrize(("early", "late"), [(50.0, 10.0), (8.0, 6.0), (1e4, 100.0)])
def test_r6_an_early_outlier_lets_no_later_one_pass(early, late, seed) -> None:
    values = [*normal(1, 0.1, 10, seed), early, *normal(1, 0.1, 14, seed + 50), late]
    found = run([{"grad_norm": abs(value)} for value in values])
    assert steps(found, FindingKind.GRAD_NORM_SPIKE) == [11, 26]


def storm(start: float, factor: float, floor: float, count: int) -> list[dict]:
    rows, scale = [], start
    for i in range(count):
        rows.append({"loss": 5 + 0.001 * i, "grad_norm": math.inf, "overflow": 1.0,
                     "update_skipped": 1.0, "loss_scale": scale})  # fmt: skip
        scale = max(floor, scale / factor)
    return rows


@pytest.mark.parametrize("start", [2.0**24, 2.0**16, 2.0**32])
def test_r10_the_floor_is_reported_when_it_is_reached(start) -> None:
    halvings = round(math.log2(start))
    found = run(storm(start, 2, 1.0, halvings + 11))
    floor = [f for f in found if f.kind is FindingKind.LOSS_SCALE_FLOOR]
    assert [f.step for f in floor] == list(range(halvings + 1, halvings + 12))
    assert floor[2].severity is Severity.CRITICAL
    assert floor[9].number("consecutive") == 10


def test_r10_a_scale_below_the_floor_is_reported_without_an_overflow_in_the_log() -> None:
    scales = [2.0, 1.0, 0.5, 0.25, 2.0**-6, 2.0**-6, 0.0]
    found = run([{"loss": 9.8, "loss_scale": scale} for scale in scales])
    assert [(f.step, f.kind.value, f.severity.value) for f in found] == [
        (3, "loss_scale_floor", "warning"), (5, "loss_scale_floor", "critical"),
    ]  # fmt: skip


@pytest.mark.parametrize("start", [2.0**20, 2.0**24])
def test_r11_a_runaway_is_reported_once_and_again_when_it_ends_in_infinity(start) -> None:
    rows, scale = [], start
    for i in range(220):
        rows.append({"loss": 2 - 0.001 * i, "overflow": 0.0, "loss_scale": scale})
        scale = scale * 2 if scale < 2.0**127 else math.inf
    found = [f for f in run(rows) if f.kind is FindingKind.LOSS_SCALE_RUNAWAY]
    assert [f.severity.value for f in found] == ["warning", "critical"]
    assert found[0].number("loss_scale") == 2.0**25


@pytest.mark.parametrize("skipped", [None, 0.0])
@pytest.mark.parametrize("scale", [1024.0, 1.5, 65536.0])
def test_r12_overflows_without_effect_are_seen_at_the_third(skipped, scale) -> None:
    losses = [11.67, 8.85, 8712.59, 15806.38]
    found = run([{"loss": loss, "overflow": 1.0, "loss_scale": scale, "update_skipped": skipped}
                 for loss in losses])  # fmt: skip
    hits = [f for f in found if f.kind is FindingKind.OVERFLOW_WITHOUT_EFFECT]
    assert [(f.step, f.severity.value) for f in hits] == [(3, "critical"), (4, "critical")]


def test_r12_applied_updates_are_seen_without_a_scale_and_rates_are_not_taken_for_them() -> None:
    rows = [{"loss": 3.0 + i, "overflow": 1.0, "update_skipped": 0.0} for i in range(4)]
    assert steps(run(rows), FindingKind.OVERFLOW_WITHOUT_EFFECT) == [3, 4]
    unknown = [{"loss": 3.0 + i, "overflow": 1.0} for i in range(4)]
    assert steps(run(unknown), FindingKind.OVERFLOW_WITHOUT_EFFECT) == []
    rates = [{"loss": 3.0 - 0.01 * i, "overflow": 0.02, "loss_scale": 512.0} for i in range(9)]
    assert steps(run(rates), FindingKind.OVERFLOW_WITHOUT_EFFECT) == []


@SEEDS
@pytest.mark.parametrize("jump", [3.0, 4.5, 20.0])
@pytest.mark.parametrize("offset", [0.0, -3.0])
def test_r15_a_run_that_recovers_from_a_spike_has_no_plateau_and_no_divergence(
    jump, offset, seed
) -> None:
    generator = random.Random(seed)
    losses = [5 - 3 * i / 29 for i in range(30)] + [jump]
    losses += [jump - 0.1 - (jump - 2.15) * i / 59 for i in range(60)]
    losses = [loss + offset + generator.gauss(0, 0.03) for loss in losses]
    rows = [{"loss": loss} for loss in [*losses, *[math.nan] * 50]]
    kinds = {f.kind for f in run(rows)}
    assert FindingKind.PLATEAU not in kinds
    assert FindingKind.DIVERGENCE not in kinds


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("skipped", [0.0, None])
def test_r16_a_non_finite_loss_is_seen_though_its_update_was_applied(value, skipped) -> None:
    losses = [2.0, 1.9, value, 1.8]
    found = run([{"loss": v, "loss_scale": 1.0, "update_skipped": skipped} for v in losses])
    assert [(f.step, f.kind.value) for f in found] == [(3, "non_finite_loss")]


@SEEDS
def test_a_spike_that_stays_is_flagged_in_its_first_step_after_32(seed) -> None:
    """Foundry's rule needs 5 steps in a row after 100, and has absorbed the jump after 22."""
    values = [*normal(1, 0.1, 32, seed), *normal(3, 0.1, 22, seed + 50)]
    found = run([{"loss": value} for value in values])
    assert steps(found, FindingKind.LOSS_SPIKE) == list(range(33, 55))
