"""Batch resizing over a plant with a fixed cost per optimizer step."""

from __future__ import annotations

import pytest

from mindtune.policies.decisions import Advise, SetBatchSize, SetLearningRateScale
from mindtune.policies.settings import PolicySettings
from mindtune.policies.signals import Observation


class Plant:
    """A step costs `fixed` seconds, plus `each` per sample, plus the wait for data."""

    def __init__(self, fixed: float, each: float, wait: float = 0.0, batch: int = 8) -> None:
        self.fixed, self.each, self.wait, self.batch = fixed, each, wait, batch
        self.scale = 1.0
        self.extra: dict = {}

    def observe(self, step: int) -> Observation:
        work = self.each * self.batch
        total = self.fixed + work + self.wait
        jitter = 1 + 0.01 * (step % 3 - 1)
        return Observation(
            **{
                "step": step,
                "loss": 3 - 0.001 * step + 0.01 * (step % 5),
                "grad_norm": 1 + 0.05 * (step % 4),
                "global_batch_size": self.batch,
                "micro_batch_size": 2,
                "learning_rate_scale": self.scale,
                "tokens": 128 * self.batch,
                "step_time_s": total * jitter,
                "data_time_s": self.wait,
                "device_utilization": work / total,
                **self.extra,
            }
        )

    def drive(self, run, first: int, last: int) -> None:
        for step in range(first, last + 1):
            for grant in run.feed(self.observe(step)):
                if isinstance(grant, SetBatchSize):
                    self.batch = grant.value
                elif isinstance(grant, SetLearningRateScale):
                    self.scale = grant.value


def test_an_under_fed_device_gets_twice_the_batch_until_it_is_busy(start) -> None:
    run, plant = start(optimizer_family="adam"), Plant(fixed=0.2, each=0.01)
    plant.drive(run, 1, 600)
    assert run.set_points(SetBatchSize) == [(32, 16), (96, 32)]
    kept = [r.outcome for r in run.records if r.action == "SetBatchSize" and r.outcome]
    assert kept[0].startswith("tokens/s went from 3657 to 5689, a gain of 1.556")
    # 0.32 / (0.2 + 0.32) is above the limit of 0.55.
    assert plant.batch == 32


@pytest.mark.parametrize(
    ("limits", "expected"), [({}, 8), ({"max_growth": 3}, 4), ({"max_growth": 1}, 2)]
)
def test_one_micro_batch_grows_to_four_where_that_is_allowed(start, limits, expected) -> None:
    run = start(settings={"batch_size": PolicySettings(limits=limits)}, micro_batch_size=2)
    plant = Plant(fixed=0.2, each=0.01, batch=2)
    plant.drive(run, 1, 90)
    assert plant.batch == expected


def test_the_learning_rate_follows_the_batch(start) -> None:
    for family, expected in (("adam", [2**0.5, 2.0]), ("sgd", [2.0, 4.0]), ("unknown", [])):
        run, plant = start(optimizer_family=family), Plant(fixed=0.2, each=0.01)
        plant.drive(run, 1, 600)
        scales = run.set_points(SetLearningRateScale)
        assert [value for _, value in scales] == pytest.approx(expected)
        assert [step for step, _ in scales] == [32, 96][: len(expected)]


def test_a_starved_device_gets_advice_and_no_larger_batch(start) -> None:
    run, plant = start(), Plant(fixed=0.02, each=0.01, wait=0.5)
    plant.drive(run, 1, 400)
    assert run.set_points(SetBatchSize) == []
    assert [name for _, name in run.events(Advise)] == ["data-workers"]
    assert "num_parallel_workers" in run.grants[0][1].message
    assert "low_utilization" not in run.kinds()


def test_a_busy_device_is_left_alone(start) -> None:
    run, plant = start(), Plant(fixed=0.02, each=0.02)
    plant.drive(run, 1, 500)
    assert run.records == []


def test_a_move_that_does_not_pay_is_undone_and_not_tried_again(start) -> None:
    run, plant = start(optimizer_family="adam"), Plant(fixed=0.0, each=0.05)
    plant.extra = {"device_utilization": 0.3}
    plant.drive(run, 1, 2000)
    assert run.set_points(SetBatchSize) == [(32, 16), (80, 8)]
    assert run.set_points(SetLearningRateScale) == [(32, 2**0.5), (80, 1.0)]
    assert (plant.batch, plant.scale) == (8, 1.0)
    undone = [r for r in run.records if r.verdict == "undone"]
    assert undone[0].requested == 8
    assert "a gain of 1.0" in undone[0].reason


@pytest.mark.parametrize(
    ("settings", "facts", "limit"),
    [
        ({"limits": {"max_growth": 2}}, {}, 16),
        ({"limits": {"max_global_batch_size": 16}}, {}, 16),
        ({}, {"max_num_microbatches": 4, "data_parallel": 2}, 16),
    ],
)
def test_limits_end_the_growth_with_one_advice(start, settings, facts, limit) -> None:
    run = start(settings={"batch_size": PolicySettings(**settings)}, **facts)
    plant = Plant(fixed=1.0, each=0.001)
    plant.drive(run, 1, 600)
    assert plant.batch == limit
    assert [name for _, name in run.events(Advise)] == ["batch-limit"]


@pytest.mark.parametrize(
    "extra",
    [
        {"device_memory_used_bytes": 90, "device_memory_total_bytes": 100},
        {"overflow": 1.0, "loss_scale": 1024.0, "update_skipped": 1.0},
        {"global_batch_size": None},
        {"micro_batch_size": None},
    ],
)
def test_it_waits_while_memory_is_short_or_the_run_in_trouble(start, extra) -> None:
    run, plant = start(micro_batch_size=None), Plant(fixed=0.2, each=0.01)
    plant.extra = extra
    plant.drive(run, 1, 300)
    assert run.set_points(SetBatchSize) == []


@pytest.mark.parametrize(
    ("ratio", "waits"),
    [
        (1.1, False),  # some rank is always the slowest
        (4.0, True),
    ],
)
def test_while_one_rank_keeps_the_others_waiting_the_batch_stays(start, ratio, waits) -> None:
    run, plant = start(data_parallel=2), Plant(fixed=0.2, each=0.01)
    for step in range(1, 301):
        # Now and then a step is as fast as any, and no straggler is named in it.
        plant.extra = {"straggler_rank": 1, "straggler_ratio": ratio if step % 5 else 1.01}
        plant.drive(run, step, step)
    assert ("straggler" in run.kinds()) == waits
    assert (run.set_points(SetBatchSize) == []) == waits


def test_one_low_sample_in_two_is_not_sustained(start) -> None:
    run, plant = start(), Plant(fixed=0.2, each=0.01)
    for step in range(1, 300):
        plant.extra = {"device_utilization": 0.2 if step % 2 else 0.95}
        plant.drive(run, step, step)
    assert "low_utilization" not in run.kinds()
