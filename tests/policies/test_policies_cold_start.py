"""The first steps of real runs: of the reference workload at several learning rates, and public."""

from __future__ import annotations

import math
import random

import pytest

from mindtune.policies.detectors import DetectorState, update
from mindtune.policies.findings import Finding, FindingKind, Severity
from mindtune.policies.signals import Observation

# The reference workload: 4 layers, batch 16, warm-up of 20 steps; loss and gradient norm.
HEALTHY = (
    [5.57, 5.24, 4.84, 4.57, 4.59, 4.42, 4.11, 3.76, 4.63, 3.47, 3.32, 3.16, 3.59, 3.17, 2.91, 3.16,
     3.03, 2.89, 3.07, 3.20, 2.98, 2.94, 2.90, 2.89, 2.61, 2.98, 2.88, 2.87, 3.00, 2.91, 2.91, 2.83,
     3.02, 2.79, 2.93, 2.90, 3.16, 2.89, 2.73, 3.07, 2.83, 2.94, 2.70, 2.72, 2.83, 2.70, 2.86, 2.67],
    [9.47, 5.83, 3.73, 3.93, 3.13, 2.96, 3.04, 3.11, 27.7, 2.06, 1.26, 0.95, 14.4, 1.43, 0.62, 1.10,
     0.72, 0.93, 1.07, 0.82, 1.14, 0.63, 0.60, 0.61, 0.57, 0.59, 0.50, 0.61, 0.64, 0.55, 0.51, 0.65,
     0.66, 0.66, 0.84, 0.46, 0.80, 0.53, 0.74, 0.42, 0.51, 0.69, 1.09, 0.86, 0.47, 0.50, 0.63, 0.43],
)  # fmt: skip
TIMES_30_SEED_0 = (
    [5.57, 5.04, 3.68, 3.15, 4.05, 4.58, 4.56, 4.54, 5.11, 5.01, 5.00, 4.65, 4.24, 3.95],
    [9.47, 8.58, 2.03, 1.25, 5.14, 3.10, 3.62, 3.91, 2.93, 3.54, 3.93, 2.62, 1.10, 1.34],
)
TIMES_30_SEED_1 = (
    [5.59, 4.94, 4.00, 3.32, 3.63, 3.96, 4.22, 4.41, 4.60, 4.70, 3.95, 3.98, 3.63, 3.60],
    [7.98, 8.54, 2.69, 1.82, 3.00, 1.90, 2.51, 2.48, 2.42, 2.47, 1.30, 1.50, 1.14, 0.66],
)
TIMES_30_SEED_2 = (
    [5.52, 5.15, 3.92, 3.50, 3.81, 4.26, 3.79, 4.09, 4.27, 4.26, 4.92, 3.95, 4.22, 4.00, 3.40],
    [8.84, 10.66, 2.46, 1.02, 2.24, 3.08, 1.55, 2.09, 3.86, 2.13, 1.72, 1.89, 1.76, 1.21, 0.89],
)
TIMES_3 = (
    [
        5.57,
        5.05,
        4.72,
        4.33,
        4.11,
        3.75,
        3.50,
        3.06,
        3.31,
        7.51,
        3.55,
        3.26,
        3.56,
        3.29,
        3.03,
        3.24,
        3.21,
        3.09,
    ],
    [
        9.47,
        5.17,
        3.37,
        3.73,
        2.60,
        2.27,
        20.1,
        0.47,
        0.92,
        30.3,
        2.89,
        1.98,
        3.74,
        0.99,
        0.88,
        1.41,
        0.86,
        0.90,
    ],
)
# Two layers and no clip, of which the norm shows a first spike.
TIMES_30_NO_CLIP = (
    [5.584, 4.698, 5.697, 3.734, 3.419, 3.739, 3.732, 3.951, 4.207, 3.898, 5.307, 4.119, 3.873, 3.725],
    [7.228, 4.144, 131.5, 1.669, 1.366, 2.775, 1.807, 2.019, 4.348, 1.985, 2.176, 1.679, 1.020, 0.733],
)  # fmt: skip
TIMES_100 = (
    [5.57, 5.27, 6.99, 6.51, 4.09, 11.52, 11.89, 13.37, 13.64, 14.24],
    [9.47, 12.13, 4.12, 10.63, 2.29, 5.70, 5.44, 8.32, 6.45, 6.68],
)
# A public GPT-2 run with too steep a warm-up, and a public fine-tuning with a rate of 5.
STEEP_WARMUP = ([12.44, 44.24, 48.14, 47.50, 46.59, 45.66], [None, 77.5, 62.4, 62.6, 62.9, 62.9])
RATE_OF_5 = ([1.637, 11.8, 11.6, 10.4, 10.3735], [None] * 5)


def found(losses: list[float], norms: list[float | None] | None = None) -> list[Finding]:
    state, hits = DetectorState(), []
    norms = norms or [None] * len(losses)
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        findings, state = update(Observation(step=step, loss=loss, grad_norm=norm), state)
        hits.extend(finding for finding in findings if finding.kind is FindingKind.DIVERGENCE)
    return hits


@pytest.mark.parametrize(
    ("run", "step", "pattern"),
    [
        (TIMES_30_SEED_0, 8, "return"),
        (TIMES_30_SEED_1, 10, "climb"),
        (TIMES_30_SEED_2, 13, "standstill"),
        (TIMES_30_NO_CLIP, 13, "rebound"),
        (TIMES_100, 8, "excursion"),
        (STEEP_WARMUP, 4, "excursion"),
        (RATE_OF_5, 3, "jump"),
    ],
)
def test_an_explosion_is_seen_and_named(run, step, pattern) -> None:
    hit = found(*run)[0]
    assert (hit.step, hit.evidence["pattern"]) == (step, pattern)
    assert hit.evidence["cold_start"] == 1
    assert hit.severity is Severity.CRITICAL


def test_an_excess_after_the_first_20_losses() -> None:
    generator = random.Random(0)
    calm = [3 + 2 / (i + 1) + generator.gauss(0, 0.02) for i in range(30)]
    hits = found([*calm, 3.4, 3.9, 4.4, 4.9])
    assert [hit.evidence["pattern"] for hit in hits][:1] == ["excess"]
    assert hits[0].step == 33


@pytest.mark.parametrize("run", [HEALTHY, TIMES_3])
def test_a_start_that_goes_on_learning_is_left_alone(run) -> None:
    assert found(*run) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_start_without_a_clip_is_left_alone(reference_starts, seed) -> None:
    losses, norms = zip(*reference_starts[seed], strict=True)
    assert found(list(losses), list(norms)) == []


@pytest.mark.parametrize(("scatter", "most"), [(0.02, 0), (0.05, 4), (0.07, 12)])
def test_a_start_that_falls_fast_and_then_stands_is_seldom_an_explosion(scatter, most) -> None:
    # The healthy run that looks most like one: a fine-tuning that learns the format in 4 steps.
    false = 0
    for seed in range(500):
        g = random.Random(seed)
        floor, pace = g.choice((0.5, 0.6, 0.65, 0.7, 0.75)), g.choice((0.5, 1, 2, 3, 5))
        falls = [math.exp(-i / pace) for i in range(20)]
        losses = [(floor + (1 - floor) * x) * g.lognormvariate(0, scatter) for x in falls]
        norms = [(0.15 + 0.85 * x) * g.lognormvariate(0, 0.3) for x in falls]
        false += bool(found(losses, norms))
    assert false <= most


@pytest.mark.parametrize(("level", "scatter"), [(1.7, 0.04), (2.5, 0.1), (3.5, 0.2)])
def test_a_loss_that_never_comes_back_to_its_first_is_worse_than_untrained(level, scatter) -> None:
    seen = 0
    for seed in range(10):
        g = random.Random(seed)
        later = [5.5 * (level + g.gauss(0, scatter * level)) for _ in range(11)]
        hits = found([5.5, 9.0, *later])
        seen += bool(hits) and hits[0].step <= 12
    assert seen >= 9


@pytest.mark.parametrize(("scatter", "most"), [(0.1, 1), (0.2, 5), (0.3, 5)])
def test_a_first_loss_below_the_others_is_seldom_an_explosion(scatter, most) -> None:
    false = 0
    for seed in range(1000):
        g = random.Random(seed)
        false += bool(found([3.0 * g.lognormvariate(0, scatter) for _ in range(13)]))
    assert false <= most


def test_a_fine_tuning_that_scatters_from_the_start_is_left_alone() -> None:
    false = 0
    for seed in range(300):
        generator = random.Random(seed)
        losses = [generator.lognormvariate(0, 0.15) for _ in range(64)]
        norms = [generator.lognormvariate(0, 0.35) for _ in range(64)]
        false += bool(found(losses, norms))
    assert false <= 1


@pytest.mark.parametrize("jump", [3.0, 4.5, 9.0])
@pytest.mark.parametrize("at", [6, 12, 18])
def test_one_jump_that_is_recovered_from_is_left_alone(jump, at) -> None:
    falling = [5 - 0.15 * i for i in range(at)]
    assert found([*falling, *[jump + falling[-1] - 0.1 * i for i in range(20)]]) == []


def test_a_norm_of_44_in_a_warm_up_is_left_alone() -> None:
    norms = [44.0, 47.0, 30.0, 41.0, 22.0, 17.0, 9.0, 8.0, 6.0, 5.0]
    assert found([10.6 - 0.15 * i for i in range(10)], norms) == []


def test_the_cold_start_ends() -> None:
    state = DetectorState()
    for step in range(1, 200):
        _, state = update(Observation(step=step, loss=2.0 + 0.001 * (step % 7)), state)
        if step == 64:
            at_the_end = state.cold_start
    assert state.cold_start is at_the_end
