"""Faults that no single step shows: dead gradients, plateaus, drifts, leaps between few records."""

from __future__ import annotations

import math
import random

import pytest

from mindtune.policies.detectors import DetectorState, update
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation

SEEDS = pytest.mark.parametrize("seed", range(5))


def run(rows: list[dict], first: int = 1, every: int = 1) -> list[Finding]:
    state, found = DetectorState(), []
    for index, row in enumerate(rows):
        findings, state = update(Observation(step=first + index * every, **row), state)
        found.extend(findings)
    return found


def of(found: list[Finding], kind: FindingKind) -> list[Finding]:
    return [finding for finding in found if finding.kind is kind]


def healthy(count: int, seed: int, level: float = 3.0) -> list[dict]:
    g = random.Random(seed)
    return [
        {"loss": level + 2 * math.exp(-i / 20) + g.gauss(0, 0.03), "grad_norm": g.lognormvariate(0, 0.2)}
        for i in range(count)
    ]  # fmt: skip


@SEEDS
@pytest.mark.parametrize("share", [1e-4, 1e-9, 0.0])
def test_a_norm_that_vanishes_while_the_loss_stands_is_seen_in_16_steps(share, seed) -> None:
    g = random.Random(seed)
    dead = [{"loss": 3 + g.gauss(0, 0.03), "grad_norm": share * g.random()} for _ in range(40)]
    found = of(run([*healthy(150, seed), *dead]), FindingKind.GRAD_NORM_VANISHING)
    assert [f.step for f in found] == list(range(166, 191))
    assert {f.severity for f in found} == {Severity.WARNING}


def test_a_norm_that_fades_slowly_is_seen_too() -> None:
    g = random.Random(0)
    rows = [
        {"loss": 3 + g.gauss(0, 0.03), "grad_norm": math.exp(-i / 100) * g.lognormvariate(0, 0.1)}
        for i in range(1200)
    ]
    found = of(run(rows), FindingKind.GRAD_NORM_VANISHING)
    assert found
    assert found[0].number("value") > 1e-4


@pytest.mark.parametrize("floor", [0.0, 1e-3])
def test_a_loss_that_has_been_learnt_explains_a_small_norm(floor) -> None:
    rows = [
        {"loss": floor + 2 * math.exp(-i / 100), "grad_norm": math.exp(-i / 80)}
        for i in range(1500)
    ]
    assert of(run(rows), FindingKind.GRAD_NORM_VANISHING) == []


def test_zero_losses_explain_zero_norms() -> None:
    rows = [*healthy(150, 0), *[{"loss": 0.0, "grad_norm": 0.0}] * 60]
    assert of(run(rows), FindingKind.GRAD_NORM_VANISHING) == []
    assert (
        of(run([{"loss": 0.0, "grad_norm": 0.0}] * 60), FindingKind.NO_TRAINABLE_PARAMETERS) == []
    )


def test_a_norm_without_a_loss_is_a_note() -> None:
    rows = [{"grad_norm": 1.0}] * 60 + [{"grad_norm": 0.0}] * 20
    found = of(run(rows), FindingKind.GRAD_NORM_VANISHING)
    assert {f.severity for f in found} == {Severity.INFO}


@SEEDS
@pytest.mark.parametrize("scatter", [0.0, 0.02, 0.3])
def test_no_trainable_parameters_are_seen_in_the_first_steps(scatter, seed) -> None:
    g = random.Random(seed)
    rows = [{"loss": math.log(256) + g.gauss(0, scatter), "grad_norm": 0.0} for _ in range(32)]
    found = of(run(rows), FindingKind.NO_TRAINABLE_PARAMETERS)
    assert 16 <= found[0].step <= 20
    assert found[0].severity is Severity.CRITICAL


def test_a_zero_that_is_no_measurement_and_a_late_zero_are_no_missing_parameters() -> None:
    learning = [{"loss": 10 - 0.2 * i, "grad_norm": 0.0} for i in range(40)]
    assert of(run(learning), FindingKind.NO_TRAINABLE_PARAMETERS) == []
    late = [{"loss": 3.0, "grad_norm": 1.0}, *[{"loss": 3.0 + 0.1 * (i % 3), "grad_norm": 0.0} for i in range(40)]]  # fmt: skip
    assert of(run(late), FindingKind.NO_TRAINABLE_PARAMETERS) == []


@SEEDS
@pytest.mark.parametrize("level", [2.5, 0.02, -7.0])
def test_a_plateau_is_one_note(level, seed) -> None:
    g = random.Random(seed)
    size = abs(level)
    rows = [
        {"loss": level + size * (3 * math.exp(-i / 60) + g.gauss(0, 0.01))} for i in range(900)
    ]
    found = of(run(rows), FindingKind.PLATEAU)
    assert len(found) == 1
    assert 300 <= found[0].step <= 720
    assert found[0].severity is Severity.INFO


def test_a_loss_that_falls_by_one_percent_in_256_steps_is_no_plateau() -> None:
    g = random.Random(0)
    rows = [{"loss": 3 * math.exp(-i / 25_000) + g.gauss(0, 0.02)} for i in range(2500)]
    assert of(run(rows), FindingKind.PLATEAU) == []


@SEEDS
@pytest.mark.parametrize("per_step", [0.003, 0.005, 0.01])
@pytest.mark.parametrize("level", [2.0, 0.05])
def test_a_slow_drift_upwards_is_a_divergence(level, per_step, seed) -> None:
    g = random.Random(seed)
    rows = [{"loss": level * (1 + g.gauss(0, 0.02))} for _ in range(400)]
    rows += [{"loss": level * (1 + per_step * i + g.gauss(0, 0.02))} for i in range(300)]
    found = of(run(rows), FindingKind.DIVERGENCE)
    assert found[0].step <= 400 + 96
    assert found[0].number("loss") <= 1.6 * level


@pytest.mark.parametrize("pattern", ["step", "wave"])
def test_another_level_and_a_wave_are_no_drift(pattern) -> None:
    g = random.Random(1)
    rows = []
    for i in range(2000):
        extra = (0.12 * (i > 1000)) if pattern == "step" else 0.06 * math.sin(i / 40)
        rows.append({"loss": 2.0 * (1 + extra + g.gauss(0, 0.02))})
    assert of(run(rows), FindingKind.DIVERGENCE) == []


@pytest.mark.parametrize(
    ("losses", "first", "every", "warned", "critical"),
    [
        ([6.44, 11.42, 7.16], 7000, 10, 7010, None),
        ([2.776, 2.773, 2.768, 7.34, 8.72, 7.65], 29020, 10, 29050, 29060),
        ([1.2366, 2.0277, 2.1567, 1.985], 500, 500, 1000, 1500),
        ([2.665, 2.667, 4.374, 4.366], 17060, 1, 17062, 17063),
        ([3.41, 2.99, 3.03, 2.9, 2.68, 2.66, 2.665, 2.667, 4.374, 4.366], 17054, 1, 17062, 17063),
        ([3.317, 3.417, 3.683, 7.268, 4.131, 7.597], 8738, 1, 8741, 8743),
    ],
)  # fmt: skip
def test_a_leap_between_few_records_is_seen_at_once(
    losses, first, every, warned, critical
) -> None:
    found = of(run([{"loss": v} for v in losses], first, every), FindingKind.DIVERGENCE)
    assert found[0].step == warned
    assert found[0].severity is Severity.WARNING
    grave = [f.step for f in found if f.severity is Severity.CRITICAL]
    assert (grave[0] if grave else None) == critical


@pytest.mark.parametrize(
    ("losses", "first", "every"),
    [
        ([0.083, 0.088, 0.069, 0.105, 0.071, 0.123, 0.077, 0.24, 0.08], 100, 100),
        ([2.5, 2.77, 2.72, 2.3, 1.9, 1.7, 2.2], 10, 10),
        ([0.01, 0.4, 0.02], 500, 500),
        ([0.3, -0.2, 0.9], 500, 500),
        ([3.0, 5.0, 3.1, 2.9], 1, 1),
    ],
)
def test_noise_between_few_records_is_no_leap(losses, first, every) -> None:
    assert of(run([{"loss": v} for v in losses], first, every), FindingKind.DIVERGENCE) == []


@pytest.mark.parametrize("factor", [3.2, 5.0, 50.0])
def test_two_climbing_losses_far_above_the_first_ones_are_an_explosion(factor) -> None:
    losses = [12.44, 12.45, 12.44 * factor, 12.44 * factor * 1.09]
    found = of(run([{"loss": v} for v in losses]), FindingKind.DIVERGENCE)
    assert [(f.step, f.evidence["pattern"]) for f in found] == [(4, "jump")]


def test_one_loss_far_above_the_first_ones_is_a_note() -> None:
    found = run([{"loss": v} for v in (1.6, 11.8, 1.5, 1.4, 1.5)])
    assert [(f.step, f.kind.value, f.severity.value) for f in found] == [(2, "loss_spike", "info")]


@SEEDS
def test_the_first_losses_of_a_policy_are_no_explosion(seed) -> None:
    for start in range(40):
        g = random.Random(100 * seed + start)
        rows = [{"loss": g.gauss(0, 0.3)} for _ in range(64)]
        assert of(run(rows), FindingKind.DIVERGENCE) == []


@pytest.mark.parametrize(
    ("loss", "expected"), [(math.log(256), 9), (2.1234567, 9), (5.5, 17), (0.31, 17)]
)
def test_a_frozen_loss_is_told_from_a_coarse_log(loss, expected) -> None:
    found = of(run([{"loss": 7.0}, *[{"loss": loss}] * 40]), FindingKind.FROZEN_LOSS)
    assert found[0].step == expected
    dead = [{"loss": 7.0}, *[{"loss": loss, "update_skipped": 1.0}] * 40]
    assert of(run(dead), FindingKind.FROZEN_LOSS)[0].step == 9


def test_a_loss_that_differs_in_the_last_bit_of_float32_is_frozen() -> None:
    rows = [{"loss": 7.0}, *[{"loss": 5.545177 + 4e-7 * (i % 2)} for i in range(20)]]
    assert of(run(rows), FindingKind.FROZEN_LOSS)[0].step == 9


def test_a_loss_that_is_rounded_is_not_frozen_while_the_norm_moves() -> None:
    rows = [{"loss": 2.828125, "grad_norm": 1.0 + 0.03125 * (i % 2)} for i in range(100)]
    assert of(run(rows), FindingKind.FROZEN_LOSS) == []
    stuck = [*rows, *[{"loss": 2.828125, "grad_norm": 1.0}] * 20]
    assert of(run(stuck), FindingKind.FROZEN_LOSS)[0].step == 108


def test_a_frozen_loss_whose_gradient_has_become_zero_is_a_dead_run() -> None:
    rows = [{"loss": 3.0 + 0.01 * (i % 7), "grad_norm": 1.0 + 0.1 * (i % 3)} for i in range(40)]
    found = of(run([*rows, *[{"loss": 5.545177, "grad_norm": 0.0}] * 20]), FindingKind.FROZEN_LOSS)
    assert [f.step for f in found] == list(range(48, 61))
    assert {f.severity for f in found} == {Severity.CRITICAL}
    assert "of norm 0: the weights no longer change" in found[0].message
    # A log that has no norms and prints 0 for them says nothing.
    silent = [{"loss": 2.1234567, "grad_norm": 0.0}] * 20
    assert {f.severity for f in of(run(silent), FindingKind.FROZEN_LOSS)} == {Severity.WARNING}
