"""Replay cases of public spike rules, each with the behaviour that is right."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from mindtune.policies.detectors import DetectorState, DetectorThresholds, update
from mindtune.policies.findings import Finding, FindingKind
from mindtune.policies.signals import Observation


def noise(mean: float, sigma: float, count: int, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, sigma) for _ in range(count)]


def run(values: list[float | None], signal: str = "grad_norm", **options) -> list[list[Finding]]:
    state, found = DetectorState(), []
    for step, value in enumerate(values, start=1):
        findings, state = update(Observation(step=step, **{signal: value}), state, **options)
        found.append(list(findings))
    return found


def steps_with(found: list[list[Finding]], kind: FindingKind) -> list[int]:
    return [i for i, at in enumerate(found, start=1) if any(f.kind is kind for f in at)]


@pytest.mark.parametrize(
    ("signal", "bad", "spike"),
    [
        ("grad_norm", FindingKind.NON_FINITE_GRAD, FindingKind.GRAD_NORM_SPIKE),
        ("loss", FindingKind.NON_FINITE_LOSS, FindingKind.LOSS_SPIKE),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_non_finite_value_blinds_nothing(signal, bad, spike, value) -> None:
    values = [
        *noise(2, 0.05, 200),
        value,
        *noise(2, 0.05, 60, 1),
        *[50.0] * 5,
        *noise(2, 0.05, 9, 2),
    ]
    found = run(values, signal)
    assert steps_with(found, bad) == [201]
    assert steps_with(found, spike) == [262, 263, 264, 265, 266]


def test_a_burst_does_not_hide_its_own_tail() -> None:
    found = run([*noise(2, 0.05, 200), *[20.0] * 10, *noise(2, 0.05, 100, 1)])
    assert steps_with(found, FindingKind.GRAD_NORM_SPIKE) == list(range(201, 211))
    assert steps_with(found, FindingKind.LEVEL_SHIFT) == []


def test_a_level_shift_is_declared_at_the_32nd_flag_and_released() -> None:
    found = run([*noise(1, 0.1, 100), *noise(3, 0.1, 300, 1)])
    assert steps_with(found, FindingKind.LEVEL_SHIFT) == [132]
    assert steps_with(found, FindingKind.GRAD_NORM_SPIKE) == list(range(101, 133))
    shift = next(f for f in found[131] if f.kind is FindingKind.LEVEL_SHIFT)
    assert (shift.step, shift.last_step) == (101, 132)
    assert shift.evidence["median"] == pytest.approx(1.0, abs=0.05)


def test_a_shift_back_down_needs_no_declaration() -> None:
    found = run([*noise(3, 0.1, 100), *noise(1, 0.1, 200, 1), *[3.0] * 3])
    assert steps_with(found, FindingKind.LEVEL_SHIFT) == []
    assert steps_with(found, FindingKind.GRAD_NORM_SPIKE) == [301, 302, 303]


def test_a_disorderly_level_is_taken_over_after_four_times_as_many() -> None:
    wild = [10.0 if i % 2 else 100.0 for i in range(200)]
    found = run([*noise(1, 0.05, 100), *wild])
    assert steps_with(found, FindingKind.LEVEL_SHIFT) == [100 + 4 * 32]
    assert steps_with(found, FindingKind.GRAD_NORM_SPIKE)[-1] == 100 + 4 * 32


def test_an_early_outlier_does_not_make_the_next_one_pass() -> None:
    found = run([*noise(1, 0.1, 10), 50.0, *noise(1, 0.1, 14, 1), 10.0])
    assert steps_with(found, FindingKind.GRAD_NORM_SPIKE) == [11, 26]


def test_large_norms_in_the_first_steps_are_no_spikes() -> None:
    warmup = [44.0, 47.0, 31.0, 20.0, 12.0, 7.0, 4.0, 3.0, *noise(1.5, 0.2, 60)]
    assert steps_with(run(warmup), FindingKind.GRAD_NORM_SPIKE) == []


def test_a_quiet_signal_does_not_flag_its_own_noise() -> None:
    values = [1.0 + 1e-9 * (i % 3) for i in range(100)]
    assert steps_with(run([*values, 1.29]), FindingKind.GRAD_NORM_SPIKE) == []
    assert steps_with(run([*values, 1.31]), FindingKind.GRAD_NORM_SPIKE) == [101]


def test_the_score_is_exact() -> None:
    values = [1.0 + (i * 7 % 11) / 10 for i in range(44)]  # 1.0 to 2.0: median 1.5, MAD 0.3
    (finding,) = run([*values, 10.0])[-1]
    assert finding.evidence["median"] == pytest.approx(1.5)
    assert finding.evidence["score"] == pytest.approx((10.0 - 1.5) / (1.4826 * 0.3))
    assert finding.evidence["threshold"] == 6.0
    assert finding.severity.value == "info"


def test_flags_are_counted_in_a_row_and_within_the_window() -> None:
    burst = [20.0, 2.0] * 6
    found = run([*noise(2, 0.05, 100), *burst])
    flags = [f for at in found for f in at if f.kind is FindingKind.GRAD_NORM_SPIKE]
    assert [f.evidence["consecutive"] for f in flags] == [1] * 6
    assert [f.evidence["count"] for f in flags] == [1, 2, 3, 4, 5, 6]


@dataclass(frozen=True)
class Prior:
    median: float = 1.0
    mad: float = 0.1
    expires_after_steps: int = 100


def test_a_prior_stands_in_until_the_baseline_is_armed() -> None:
    values = [*[0.1] * 10, 0.9]
    assert steps_with(run(values), FindingKind.GRAD_NORM_SPIKE) == [11]
    assert steps_with(run(values, prior=Prior()), FindingKind.GRAD_NORM_SPIKE) == []
    # With it, spikes are told from the eighth sample on as later: by 6 deviations instead of 20.
    early = [*[1.0] * 10, 2.2]
    assert steps_with(run([*early[:-1], 1.5], prior=Prior()), FindingKind.GRAD_NORM_SPIKE) == []
    assert steps_with(run(early, prior=Prior()), FindingKind.GRAD_NORM_SPIKE) == [11]
    spread = [1.0, 1.1] * 5
    assert steps_with(run([*spread, 2.2]), FindingKind.GRAD_NORM_SPIKE) == []
    assert steps_with(run([*spread, 2.2], prior=Prior()), FindingKind.GRAD_NORM_SPIKE) == [11]
    # A run whose norms are higher or wider than those of the trials is judged by its own.
    high = [3.0, 4.0] * 5
    assert steps_with(run([*high, 5.0], prior=Prior()), FindingKind.GRAD_NORM_SPIKE) == []
    # One that scatters wider than they did is not judged by their narrow one.
    wide = [1.0, 2.0, 0.5, 1.2, 0.8, 2.4, 1.0, 0.6, 1.5, 0.9]
    assert steps_with(run([*wide, 5.0]), FindingKind.GRAD_NORM_SPIKE) == []
    assert steps_with(run([*wide, 5.0], prior=Prior()), FindingKind.GRAD_NORM_SPIKE) == []
    expired = Prior(expires_after_steps=10)
    assert steps_with(run(values, prior=expired), FindingKind.GRAD_NORM_SPIKE) == [11]


@pytest.mark.parametrize("level", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("mad", [0.0, 0.02, 0.2])
def test_a_prior_of_another_batch_or_rate_flags_no_more_than_none(level, mad) -> None:
    """Healthy norms (log-normal, 60 %) and a prior that is too narrow, too high or too low."""
    alone = judged = 0
    for seed in range(20):
        generator = random.Random(seed)
        values = [level * math.exp(generator.gauss(0.0, 0.6)) for _ in range(32)]
        kind = FindingKind.GRAD_NORM_SPIKE
        alone += len(steps_with(run(values), kind))
        judged += len(steps_with(run(values, prior=Prior(mad=mad)), kind))
    assert judged <= alone


@pytest.mark.parametrize("phase", ["compile", "eval", "save"])
def test_times_of_other_phases_enter_no_statistic_but_losses_do(phase) -> None:
    state = DetectorState()
    signals = {"loss": 5.5, "grad_norm": 9.0}
    times = {"step_time_s": 900.0, "data_time_s": 800.0, "device_utilization": 0.0, "mfu": 7.0}
    found = update(Observation(step=1, phase=phase, **signals, **times), state)
    assert found == update(Observation(step=1, phase="train", **signals), state)
    findings, _ = update(Observation(step=1, phase=phase, loss=math.nan, grad_norm=1.0), state)
    assert [finding.kind for finding in findings] == [FindingKind.NON_FINITE_LOSS]


def test_thresholds_hold() -> None:
    strict = DetectorThresholds(arm_after=12, early_after=12, score=3.0)
    values = [1.0 + (i * 7 % 11) / 10 for i in range(22)]
    assert steps_with(run([*values, 3.5], thresholds=strict), FindingKind.GRAD_NORM_SPIKE) == [23]
    assert steps_with(run([*values, 3.5]), FindingKind.GRAD_NORM_SPIKE) == []
