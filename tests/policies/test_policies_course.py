"""Norms that move to another level, or ever upwards, though no single step is an outlier."""

from __future__ import annotations

import math
import random

import pytest

from mindtune.policies.decisions import GUARDS
from mindtune.policies.detectors import DetectorState, update
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.scatter import upward_scatter
from mindtune.policies.signals import Observation

SEEDS = pytest.mark.parametrize("seed", range(3))
FIRST = 50


def run(rows: list[tuple[float | None, float]]) -> tuple[list[Finding], DetectorState]:
    state, found = DetectorState(), []
    for step, (loss, norm) in enumerate(rows, start=1):
        findings, state = update(Observation(step=step, loss=loss, grad_norm=norm), state)
        found.extend(findings)
    return found, state


def shifts(found: list[Finding]) -> list[Finding]:
    return [f for f in found if f.kind is FindingKind.LEVEL_SHIFT and not climbs([f])]


def climbs(found: list[Finding]) -> list[Finding]:
    return [f for f in found if f.evidence.get("pattern") == "climb"]


def changed(rows: list[tuple[float, float]], factor) -> list[tuple[float, float]]:
    """Multiply the norms from step 50 on by what `factor` says of the steps since then."""
    return [
        (loss, norm * (factor(step - FIRST) if step >= FIRST else 1.0))
        for step, (loss, norm) in enumerate(rows, start=1)
    ]


def noise(level: float, sigma: float, count: int, seed: int = 0) -> list[tuple[None, float]]:
    g = random.Random(seed)
    return [(None, level * g.lognormvariate(0, sigma)) for _ in range(count)]


# Another level -------------------------------------------------------------------------------


@SEEDS
def test_a_threefold_norm_in_a_young_run_is_another_level_within_32_steps(
    reference_starts, replay, seed
) -> None:
    rows = changed(reference_starts[seed], lambda _: 3.0)
    found, _ = run(rows)
    (shift,) = shifts(found)
    assert FIRST + 16 <= shift.last_step < FIRST + 32
    assert shift.severity is Severity.INFO
    # Nothing is throttled, and the guard lets all of it pass.
    reach = frozenset({"learning_rate_scale", "clip_norm", "skip_threshold"})
    signals = [
        {"loss": loss, "grad_norm": norm, "clip_norm": math.inf, "learning_rate_scale": 1.0}
        for loss, norm in rows
    ]
    guarded = replay(signals, reachable=reach)
    assert {type(grant) for _, grant in guarded.grants} <= set(GUARDS)
    assert min(value for _, value in guarded.set_points(*GUARDS)) > max(n for _, n in rows[50:])


@SEEDS
def test_a_healthy_young_run_has_neither_shift_nor_climb(reference_starts, seed) -> None:
    found, _ = run(reference_starts[seed])
    assert shifts(found) == climbs(found) == []


@pytest.mark.parametrize("sigma", [0.3, 0.4])
def test_a_shift_within_the_scatter_is_declared_and_the_baseline_keeps_its_scatter(sigma) -> None:
    in_time = 0
    for seed in range(12):
        found, state = run([*noise(1.0, sigma, 100, seed), *noise(3.0, sigma, 60, seed + 99)])
        in_time += any(shift.last_step <= 100 + 33 for shift in shifts(found))
        window = state.grad_norm.window
        if shifts(found) and len(window) == 128:
            assert window.median() == pytest.approx(3.0, rel=0.25)
            assert upward_scatter(window.values) == pytest.approx(sigma, rel=0.5)
    assert in_time >= 11


def test_a_level_that_the_loss_follows_is_no_new_normal() -> None:
    loud = [(6.0 + 0.1 * i, norm) for i, (_, norm) in enumerate(noise(3.0, 0.4, 24, 1))]
    calm = [(2.0, norm) for _, norm in noise(1.0, 0.4, 100)]
    found, _ = run([*calm, *loud])
    assert [f.evidence["signal"] for f in shifts(found)] in ([], ["loss"])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sigma", [0.2, 0.5, 1.0])
def test_noise_and_bursts_are_neither(sigma, seed) -> None:
    rows = noise(1.0, sigma, 1500, seed)
    for step in (*range(700, 710), *range(1200, 1212)):
        rows[step] = (None, 8.0 * rows[step][1])
    found, _ = run(rows)
    assert shifts(found) == climbs(found) == []


@pytest.mark.parametrize("memory", [0.9, 0.98])
def test_norms_that_wander_are_seldom_called_another_level(memory) -> None:
    g, wander, rows = random.Random(0), 0.0, []
    for _ in range(20_000):
        wander = memory * wander + math.sqrt(1 - memory**2) * g.gauss(0, 1)
        rows.append((None, math.exp(0.3 * wander + g.gauss(0, 0.1))))
    found, _ = run(rows)
    # One in 5000 steps and one in 2500.
    assert len(shifts(found)) <= 4
    assert len(climbs(found)) <= 8


# A climb -------------------------------------------------------------------------------------


@SEEDS
def test_a_norm_that_grows_by_5_percent_a_step_is_seen_within_32_steps(
    reference_starts, seed
) -> None:
    found, _ = run(changed(reference_starts[seed], lambda since: 1.05**since))
    assert shifts(found) == []
    seen = [
        f.step
        for f in found
        if f.step >= FIRST and (climbs([f]) or f.kind is FindingKind.GRAD_NORM_SPIKE)
    ]
    assert seen[0] < FIRST + 32
    assert {f.severity for f in climbs(found)} <= {Severity.INFO}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sigma", [0.2, 0.35, 0.5])
def test_a_climb_is_seen_at_any_scatter(sigma, seed) -> None:
    grown = [(None, norm * 1.05**i) for i, (_, norm) in enumerate(noise(1.0, sigma, 100, seed))]
    found, _ = run([*noise(1.0, sigma, 200, seed + 50), *grown])
    flags = [f.step for f in found if f.kind is FindingKind.GRAD_NORM_SPIKE and f.step > 200]
    assert min(flags + [climb.step for climb in climbs(found)]) <= 200 + 32


def test_a_climb_is_told_once_with_its_numbers() -> None:
    # From a baseline that still holds the fall of a warm-up nothing is flagged.
    falling = [(None, 8.0 * norm / (1 + i / 4)) for i, (_, norm) in enumerate(noise(1.0, 0.2, 50))]
    grown = [(None, 0.6 * norm * 1.05**i) for i, (_, norm) in enumerate(noise(1.0, 0.2, 40, 1))]
    found, _ = run([*falling, *grown])
    (climb,) = climbs(found)
    assert climb.step <= 50 + 32
    assert climb.number("value") / climb.number("median") > 2
    assert "climbs, from" in climb.message


def test_a_norm_that_doubles_over_a_thousand_steps_does_not_climb() -> None:
    rows = [(None, norm * 2 ** (i / 1000)) for i, (_, norm) in enumerate(noise(1.0, 0.15, 4000))]
    assert climbs(run(rows)[0]) == []


def test_norms_of_any_size_are_taken() -> None:
    extremes = [0.0, 5e-324, 1e-300, 1.0, 1e300, 1e308]
    g = random.Random(0)
    for low, high in ((5e-324, 1e308), (1e-300, 1e300), (0.0, 1.0)):
        run([(None, low)] * 40 + [(None, high)] * 40)
    run([(None, g.choice(extremes)) for _ in range(500)])


# Scatter without the fall --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("fall", [1.0, 100.0])
def test_a_fall_is_no_scatter(fall, sigma, seed) -> None:
    g = random.Random(seed)
    values = tuple(fall ** (-i / 127) * g.lognormvariate(0, sigma) for i in range(128))
    # The fall within a block of 8 is left: 0.25 in the logarithm from its begin to its end.
    assert sigma * 0.7 <= upward_scatter(values) <= sigma * 1.5 + 0.15


def test_a_rise_and_a_heavy_tail_are_scatter() -> None:
    rise = tuple(1.0 if i < 100 else 5.0 for i in range(128))
    assert upward_scatter(rise) > 0.3
    tail = tuple(10.0 if i % 10 == 0 else 1.0 for i in range(128))
    assert upward_scatter(tail) == pytest.approx(math.log(10) / 1.645, rel=0.01)


def test_zeros_have_no_scatter_that_can_be_told() -> None:
    assert upward_scatter((0.0,) * 5 + (1.0,) * 4) == math.inf
    assert upward_scatter((1.0,) * 5) == 0.0
