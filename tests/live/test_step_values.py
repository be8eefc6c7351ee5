"""What the training step needs before MindSpore starts: layout, loss scale, packed report."""

import math

import pytest

from mindtune.controller.errors import ConfigError
from mindtune.controller.live.layout import ParallelLayout
from mindtune.controller.live.loss_scale import LossScale
from mindtune.controller.live.packed import NUM_HOST_SIGNALS, PACKED_FIELDS, unpack


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"data_parallel": 0}, "got 0"),
        ({"rank": 2, "world_size": 2}, "got 2"),
        ({"data_parallel": 3, "world_size": 4}, "got 3 * 1"),
        ({"data_parallel": 2, "model_parallel": 4, "world_size": 4}, "got 2 * 4"),
    ],
)
def test_impossible_layouts_are_refused(fields, value):
    with pytest.raises(ConfigError) as caught:
        ParallelLayout(**fields)
    assert value in str(caught.value)


def test_a_layout_without_group_reduces_nothing():
    assert not ParallelLayout(data_parallel=2, world_size=2).reduces_gradients
    assert not ParallelLayout(data_parallel_group="g").reduces_gradients
    layout = ParallelLayout(data_parallel=2, world_size=4, data_parallel_group="g")
    assert layout.reduces_gradients
    assert layout.gradient_divisor == 2.0
    summing = ParallelLayout(data_parallel=2, world_size=2, gradients_mean=False)
    assert summing.gradient_divisor == 1.0


@pytest.mark.parametrize(
    ("scale", "overflow", "clean_steps", "following"),
    [
        (1024.0, True, 0, 512.0),
        (1.0, True, 0, 1.0),  # the floor
        (1024.0, False, 1, 1024.0),
        (1024.0, False, 999, 1024.0),
        (1024.0, False, 1000, 2048.0),
        (1024.0, False, 1001, 1024.0),
        (1024.0, False, 2000, 2048.0),
        (2.0**24, False, 1000, 2.0**24),  # the cap
    ],
)
def test_dynamic_loss_scale(scale, overflow, clean_steps, following):
    rule = LossScale()
    assert rule.following(scale, overflow=overflow, clean_steps=clean_steps) == following


def test_a_fixed_loss_scale_stays():
    rule = LossScale(initial=3e9, dynamic=False)
    assert rule.following(3e9, overflow=True, clean_steps=0) == 3e9


@pytest.mark.parametrize(
    "fields",
    [
        {"initial": 0.0},
        {"initial": math.nan},
        {"initial": 2.0**25},
        {"initial": 0.5},
        {"factor": 1.0},
        {"window": 0},
        {"floor": 0.0},
    ],
)
def test_impossible_loss_scales_are_refused(fields):
    with pytest.raises(ConfigError):
        LossScale(**fields)


def packed(**changed):
    head = dict.fromkeys(PACKED_FIELDS, 0.0) | changed
    return [head[name] for name in PACKED_FIELDS]


def test_report_reads_the_packed_vector():
    nothing = [math.nan] * (NUM_HOST_SIGNALS - 1)
    vector = packed(
        loss=2.0, overflow=1.0, loss_scale=8.0, num_microbatches=4.0, clip_norm=math.inf
    )
    vector += [1.5, math.nan, 7.0, *nothing, 2.5, math.nan, 8.0, *nothing]
    report = unpack(vector, world_size=2, uses_loss_scale=True)
    assert report.loss == 2.0
    assert report.overflow is True
    assert report.update_skipped is False
    assert report.loss_scale == 8.0
    assert report.num_microbatches == 4
    assert report.clip_norm == math.inf
    assert report.rank_losses == (1.5, 2.5)
    assert report.rank_grad_norms is None
    assert [row[0] for row in report.rank_rows] == [7.0, 8.0]
    assert all(len(row) == NUM_HOST_SIGNALS for row in report.rank_rows)


def test_without_loss_scaling_no_scale_is_reported():
    row = [1.0, 0.5, *[0.0] * NUM_HOST_SIGNALS]
    report = unpack(packed(loss_scale=1.0) + row, world_size=1, uses_loss_scale=False)
    assert report.loss_scale is None
    assert report.rank_grad_norms == (0.5,)
