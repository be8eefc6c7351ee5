"""Noise of launches, the front under noise, and the way from base to winner."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindtune.search.ablation import way
from mindtune.search.noise import between_launches, part_noise, step_noise
from mindtune.search.pareto import front


def test_deviations_of_known_size_are_found_again():
    draw = np.random.default_rng(3)
    rounds = 0.05 * draw.normal(size=400)
    values = {
        config: {
            turn: math.exp(config + shared + 0.02 * draw.normal())
            for turn, shared in enumerate(rounds)
        }
        for config in range(3)
    }
    found = between_launches(values)
    assert found.common == pytest.approx(0.05, rel=0.1)
    assert found.own == pytest.approx(0.02, rel=0.1)
    assert found.total == pytest.approx(math.hypot(0.05, 0.02), rel=0.1)
    assert found.freedom == 3 * 399
    launches = [(0.1 * np.exp(0.03 * draw.normal(size=90))).tolist() for _ in range(200)]
    # The median of 30 draws deviates by 1.25 / sqrt(30) of their deviation.
    assert part_noise(launches) == pytest.approx(0.03 * 1.2533 / 30**0.5, rel=0.1)
    assert step_noise(launches[0] + launches[1]) == pytest.approx(0.03, rel=0.15)


def test_what_was_measured_once_has_no_noise_to_tell():
    assert between_launches({0: {1: 1.0}, 1: {1: 2.0}}) is None
    assert between_launches({}) is None
    single = between_launches({0: {1: 1.0, 2: 1.1}, 1: {1: 2.0}})
    assert (single.common, single.own, single.freedom) == (None, None, 1)
    assert step_noise([0.1]) is None
    assert part_noise([[0.1] * 5]) is None
    # A start that is slower for a reason is no noise.
    assert part_noise([[9.0] * 4 + [0.1] * 8]) == 0.0


POINTS = st.dictionaries(
    st.integers(0, 30), st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12
)


@given(POINTS, st.floats(0, 0.3), st.floats(0, 0.3))
def test_the_front_is_never_empty_and_holds_what_is_best_beyond_noise(points, first, second):
    found = front(points, noise=(first, second))
    assert found
    best = max(points, key=lambda number: points[number][0])
    others = [value for number, (value, _) in points.items() if number != best]
    if all(points[best][0] > value * (1 + first) for value in others):
        assert best in found


def test_dominated_means_nowhere_better_and_somewhere_worse_beyond_noise():
    points = {0: (1.0, 0.5), 1: (0.5, 1.0), 2: (0.5, 0.5), 3: (0.99, 0.5)}
    assert front(points) == (0, 1)
    assert front(points, noise=(0.05, 0.05)) == (0, 1, 3)


def test_what_is_better_within_noise_saves_nobody_who_is_worse_beyond_it():
    points = {0: (0.50, 0.990), 1: (0.25, 0.991)}
    assert front(points) == (0, 1)
    assert front(points, noise=(0.05, 0.05)) == (0,)
    assert front(points, noise=(0.05, 0.0)) == (0, 1), "stability's own noise decides"
    assert front(points, noise=(2.0, 0.05)) == (0, 1)


def test_knobs_that_can_only_change_together_make_one_step():
    base = {"data_parallel": 4, "model_parallel": 1, "recompute": "full"}
    winner = {"data_parallel": 2, "model_parallel": 2, "recompute": "none"}

    def fills(config):
        return config["data_parallel"] * config["model_parallel"] == 4

    path = way(base, winner, is_measured=lambda _config: False, may_run=fills)
    # Memory before parallelism.
    assert path == (base, {**base, "recompute": "none"}, winner)
    measured = {**winner, "recompute": "full"}
    other = way(base, winner, is_measured=lambda config: config == measured, may_run=fills)
    assert other == (base, measured, winner), "what was measured spares a trial"


def test_the_way_has_both_ends_whatever_lies_between():
    base = {f"env.K{i}": "0" for i in range(14)}
    winner = dict.fromkeys(base, "1")
    nothing = {"is_measured": lambda _config: False}
    assert way(base, winner, **nothing) == (base, winner)
    assert way(base, winner, **nothing, may_run=lambda config: config == base) == (base, winner)
    assert way(base, base, **nothing) == (base,)
    assert way({"prefetch": 2}, {"prefetch": 8}, **nothing) == ({"prefetch": 2}, {"prefetch": 8})


MANY = {
    **{f"env.K{i}": ("0", "1") for i in range(9)},
    "micro_batch_size": (1, 4), "recompute": ("full", "none"), "data_parallel": (4, 2),
    "model_parallel": (1, 2), "gradient_compression": ("none", "float16"),
}  # fmt: skip


def test_more_knobs_than_all_orders_of_go_stage_by_stage():
    base = {name: old for name, (old, _) in MANY.items()}
    winner = {name: new for name, (_, new) in MANY.items()}

    def fills(config):
        return config["data_parallel"] * config["model_parallel"] == 4

    path = way(base, winner, is_measured=lambda _config: False, may_run=fills)
    steps = [
        {name for name in after if after[name] != before[name]}
        for before, after in itertools.pairwise(path)
    ]
    assert steps[:4] == [
        {"micro_batch_size"}, {"recompute"}, {"data_parallel", "model_parallel"},
        {"gradient_compression"},
    ]  # fmt: skip
    assert [len(step) for step in steps[4:]] == [1] * 9

    # Stages between which nothing can run are taken together, and in their best order.
    def no_memory_alone(config):
        return fills(config) and (config["data_parallel"] == 2 or config == base)

    path = way(base, winner, is_measured=lambda _config: False, may_run=no_memory_alone)
    first = {name for name in base if path[1][name] != base[name]}
    assert first == {"data_parallel", "model_parallel"}
    assert len(path) == 1 + 4 + 9
