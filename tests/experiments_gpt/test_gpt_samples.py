"""The text, its split, and that any split over ranks and micro-batches sees the same samples."""

import functools

import numpy as np
import pytest

from mindtune.experiments.gpt.config import parse_config
from mindtune.experiments.gpt.corpus import Corpus, list_files, split_of
from mindtune.experiments.gpt.faults import DataFaults
from mindtune.experiments.gpt.samples import MicroBatches, SampleOrder, evaluation_batches


@functools.cache
def _train_corpus(*, cache):
    return Corpus.load("train", cache=cache)


def _source(
    *,
    data_parallel=1,
    micro_batch_size=8,
    data_rank=0,
    seed=0,
    cache=True,
    faults=None,
    seq_length=16,
):
    config = parse_config(
        {
            "model": {"seq_length": seq_length},
            "parallel": {"data_parallel": data_parallel},
            "training": {
                "global_batch_size": 8,
                "micro_batch_size": micro_batch_size,
                "eval_samples": 12,
            },
            "faults": faults or {},
        }
    )
    corpus = _train_corpus(cache=cache)
    order = SampleOrder((len(corpus) - 1) // seq_length, seed)
    planted = DataFaults(config.faults)
    return MicroBatches(corpus, order, config, 4, data_rank, planted)


def _step(step, **split):
    """All samples of a step (from 0) in their global order."""
    degree = split.get("data_parallel", 1)
    sources = [_source(data_rank=rank, **split) for rank in range(degree)]
    count = sources[0].config.micro_batch_num
    return np.concatenate(
        [
            sources[rank][step * count + micro][0]
            for micro in range(count)
            for rank in range(degree)
        ]
    )


def test_splits_are_disjoint_complete_and_hold_only_the_library():
    train, validation = list_files("train"), list_files("validation")
    assert not set(train) & set(validation)
    assert len(train) > 200
    assert 10 < len(validation) < len(train) / 5
    folders = {part for path in train + validation for part in path.parts}
    assert not folders & {"site-packages", "idlelib", "lib2to3"}
    assert list_files("train") == train


def test_the_split_depends_on_the_path_alone():
    # Fixed values: a change of the rule would silently change every validation loss.
    names = ["ast.py", "enum.py", "typing.py", "uuid.py", "json/decoder.py", "pydoc.py"]
    assert [split_of(name) for name in names] == ["train", "validation"] * 3


def test_a_library_without_sources_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be readable as files"):
        list_files("train", tmp_path)


def test_the_text_is_the_same_from_memory_and_from_the_files():
    cached, uncached = (
        Corpus.load("validation", cache=True),
        Corpus.load("validation", cache=False),
    )
    assert len(cached) == len(uncached)
    border = cached.starts[1]
    for start in (0, border - 5, border - 1, border, cached.starts[3] - 700, len(cached) - 1000):
        expected = cached.window(start, 1000)
        assert np.array_equal(uncached.window(start, 1000), expected)
    assert cached.window(border - 1, 1)[0] == 0


def test_a_window_outside_of_the_text_is_an_error():
    corpus = Corpus.load("validation", cache=True)
    with pytest.raises(IndexError, match="must lie inside"):
        corpus.window(len(corpus) - 5, 6)


@pytest.mark.parametrize(
    "split",
    [
        {"micro_batch_size": 2},
        {"data_parallel": 2, "micro_batch_size": 4},
        {"data_parallel": 2, "micro_batch_size": 1},
        {"data_parallel": 4, "micro_batch_size": 2},
        {"micro_batch_size": 4, "cache": False},
    ],
)
def test_any_split_sees_the_same_samples_per_step(split):
    for step in range(3):
        assert np.array_equal(_step(step, **split), _step(step))


def test_order_depends_on_seed_and_pass_and_visits_every_window_once():
    order = SampleOrder(50, seed=1)
    first, second = ([order[epoch * 50 + i] for i in range(50)] for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == [SampleOrder(50, seed=1)[i] for i in range(50)]
    assert first != [SampleOrder(50, seed=2)[i] for i in range(50)]


def test_evaluation_is_the_same_for_every_micro_batch_size():
    one = evaluation_batches(_source(micro_batch_size=8).config)
    other = evaluation_batches(_source(micro_batch_size=2, seed=5).config)
    assert len(one) == 3
    for (tokens, weights), (same, ones) in zip(one, other, strict=True):
        assert tokens.shape == (4, 17)
        assert np.array_equal(tokens, same)
        assert np.array_equal(weights, ones)


@pytest.mark.parametrize(
    ("poison", "weight"),
    [
        ({"kind": "scale", "factor": 1e6}, 1e6),
        ({"kind": "noise"}, 1.0),
    ],
)
def test_only_the_poisoned_step_is_spoilt(poison, weight):
    healthy = _source(micro_batch_size=4)
    spoilt = _source(micro_batch_size=4, faults={"poison": {"steps": [2], **poison}})
    for index in range(8):
        tokens, weights = spoilt[index]
        poisoned = index // 2 == 1
        assert np.array_equal(
            weights, np.full(4, weight if poisoned else 1.0, np.float32), equal_nan=True
        )
        same = np.array_equal(tokens, healthy[index][0])
        assert same == (not poisoned or poison["kind"] != "noise")
        assert tokens.min() >= 0
        assert tokens.max() < 256


def test_noise_is_the_same_for_any_split():
    faults = {"poison": {"steps": [1], "kind": "noise"}}
    assert np.array_equal(
        _step(0, faults=faults), _step(0, faults=faults, data_parallel=2, micro_batch_size=2)
    )


@pytest.mark.parametrize(
    ("slow_data", "delays"),
    [
        ({"seconds": 0.5}, [0.5, 0.5, 0.5, 0.5]),
        ({"seconds": 0.5, "first_step": 2, "last_step": 3}, [0, 0.5, 0.5, 0]),
    ],
)
def test_the_pipeline_sleeps_where_the_fault_says(slow_data, delays):
    planted = DataFaults(parse_config({"faults": {"slow_data": slow_data}}).faults)
    assert [planted.delay_s(step) for step in (1, 2, 3, 4)] == delays
