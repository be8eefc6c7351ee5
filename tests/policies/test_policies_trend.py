"""Where the loss is heading, on excerpts of real runs and on the replay cases."""

from __future__ import annotations

import math
import random

import pytest

from mindtune.policies.detectors import DetectorState, update
from mindtune.policies.findings import FindingKind, Severity
from mindtune.policies.signals import Observation


def found(losses: list[float], kind: FindingKind = FindingKind.DIVERGENCE, **signals):
    state, hits = DetectorState(), []
    for step, loss in enumerate(losses, start=1):
        findings, state = update(Observation(step=step, loss=loss, **signals), state)
        hits.extend(finding for finding in findings if finding.kind is kind)
    return hits


def recovering(seed: int | None, jump: float = 4.5) -> list[float]:
    """R15: falls from 5 to 2, jumps once, and comes down again."""
    generator = random.Random(seed)
    losses = [5 - 3 * i / 29 for i in range(30)]
    losses += [jump] + [jump - 0.1 - (jump - 2.15) * i / 59 for i in range(60)]
    if seed is None:
        return losses
    return [loss + generator.gauss(0, 0.05) for loss in losses]


@pytest.mark.parametrize("seed", [None, *range(20)])
@pytest.mark.parametrize("jump", [3.0, 4.5, 9.0])
def test_a_jump_that_is_being_recovered_from_is_no_divergence(seed, jump) -> None:
    assert found(recovering(seed, jump)) == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("scatter", [0.02, 0.1, 0.2])
def test_stationary_noise_is_no_divergence(seed, scatter) -> None:
    generator = random.Random(seed)
    assert found([2 * generator.lognormvariate(0, scatter) for _ in range(1000)]) == []


def test_a_rising_loss_is_a_divergence_and_a_plateau_above_is_none() -> None:
    generator = random.Random(0)
    level = [2 + generator.gauss(0, 0.05) for _ in range(200)]
    rising = found([*level, *[2 + 0.1 * i for i in range(1, 40)]])
    assert rising[0].step == 200 + 5
    assert rising[0].evidence["cold_start"] == 0
    assert found([*level, *[4 - 0.02 * i for i in range(60)]]) == []
    assert found([*level, *[4 + generator.gauss(0, 0.05) for i in range(100)]]) == []


def test_a_climb_needs_no_outlier() -> None:
    losses = [3 + 0.02 * (i % 3) for i in range(70)]
    hits = found([*losses, *[3.04 + 0.1 * i for i in range(1, 9)]])
    assert [(hit.step, hit.evidence.get("window")) for hit in hits] == [
        (step, 6) for step in (76, 77, 78)
    ]


@pytest.mark.parametrize(
    ("skipped", "severity"), [(1.0, Severity.CRITICAL), (0.0, Severity.WARNING)]
)
def test_a_frozen_loss(skipped, severity) -> None:
    hits = found([3.0, *[math.log(256)] * 9], FindingKind.FROZEN_LOSS, update_skipped=skipped)
    assert [hit.step for hit in hits] == [9, 10]
    assert hits[0].severity is severity


def test_zero_losses_are_not_frozen() -> None:
    assert found([0.0, -0.0] * 50, FindingKind.FROZEN_LOSS) == []
