"""The skip guard on the norms of real healthy starts, with bad batches among them."""

from __future__ import annotations

import math
import random

import pytest

from mindtune.policies.decisions import SetSkipThreshold
from mindtune.policies.signals import Observation

GUARDED = frozenset({"skip_threshold"})
SEEDS = pytest.mark.parametrize("seed", range(3))
ARMED = 34


def guard(start, rows: list[tuple[float, float]]) -> tuple[list[int], int]:
    """Return the steps whose updates the guard skips, and how often it moved."""
    run, threshold, skipped = start(reachable=GUARDED), math.inf, []
    for step, (loss, norm) in enumerate(rows, start=1):
        skips = norm > threshold
        if skips:
            skipped.append(step)
        for grant in run.feed(
            Observation(
                step=step, loss=loss, grad_norm=norm, skip_threshold=threshold,
                update_skipped=float(skips),
            )
        ):  # fmt: skip
            if isinstance(grant, SetSkipThreshold):
                threshold = grant.value
    return skipped, len(run.set_points(SetSkipThreshold))


def worse(rows: list[tuple[float, float]], first: int, count: int, factor: float):
    return [
        (loss * factor, norm * factor) if first <= step < first + count else (loss, norm)
        for step, (loss, norm) in enumerate(rows, start=1)
    ]


@SEEDS
def test_healthy_starts_are_never_skipped(start, reference_starts, seed) -> None:
    skipped, moves = guard(start, reference_starts[seed])
    assert skipped == []
    assert moves <= 3


@SEEDS
def test_a_hundredfold_gradient_is_skipped_in_its_own_step(start, reference_starts, seed) -> None:
    # Also while the window still holds the large norms of the warm-up.
    for step in range(ARMED, 101, 3):
        skipped, _ = guard(start, worse(reference_starts[seed], step, 1, 100.0))
        assert skipped == [step]


@SEEDS
def test_of_ten_thirtyfold_gradients_most_are_skipped(start, reference_starts, seed) -> None:
    for first in range(ARMED + 6, 90, 5):
        skipped, _ = guard(start, worse(reference_starts[seed], first, 10, 30.0))
        assert set(skipped) <= set(range(first, first + 10))
        assert len(skipped) >= 6


@SEEDS
@pytest.mark.parametrize("factor", [2.0, 3.0, 4.0])
def test_a_legal_level_is_never_skipped(start, reference_starts, seed, factor) -> None:
    rows = [
        (loss, norm * factor if step >= 50 else norm)
        for step, (loss, norm) in enumerate(reference_starts[seed], start=1)
    ]
    assert guard(start, rows)[0] == []


@pytest.mark.parametrize("sigma", [0.3, 0.6, 1.0])
def test_log_normal_norms_are_skipped_in_less_than_one_of_10000_steps(start, sigma) -> None:
    g = random.Random(1)
    rows = [(2.0 + g.gauss(0, 0.02), g.lognormvariate(0, sigma)) for _ in range(10_000)]
    skipped, moves = guard(start, rows)
    assert len(skipped) <= 1
    assert moves <= 200
