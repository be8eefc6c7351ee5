"""Expansion of a space, lazily, and the one hash of a config."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindtune.search.errors import SearchError
from mindtune.search.facts import Cluster, StudyFacts, Training
from mindtune.search.space import Space, config_hash, divisors

FACTS = StudyFacts(cluster=Cluster(num_devices=12), training=Training(global_batch_size=24))


def test_auto_is_the_divisors_of_the_devices_for_degrees_and_the_defaults_otherwise():
    space = Space.from_spec(
        {"data_parallel": "auto", "micro_batch_size": "auto", "recompute": "auto"}, FACTS
    )
    assert space.choices["data_parallel"] == (1, 2, 3, 4, 6, 12)
    assert space.choices["micro_batch_size"] == (1, 2, 4, 8)
    assert space.choices["recompute"] == ("none", "interval:2", "full")
    assert space.total == 6 * 4 * 3 == sum(1 for _ in space.configs())


@pytest.mark.parametrize(("number", "expected"), [(1, (1,)), (36, (1, 2, 3, 4, 6, 9, 12, 18, 36))])
def test_divisors(number, expected):
    assert divisors(number) == expected


def test_a_value_fixes_a_knob_and_spellings_of_one_value_are_one_choice():
    space = Space.from_spec({"micro_batch_size": 2, "recompute": ["full", "interval:1"]}, FACTS)
    assert space.searched == ()
    assert list(space.configs()) == [{"micro_batch_size": 2, "recompute": "full"}]


def test_a_million_configs_are_counted_and_walked_lazily():
    space = Space.from_spec({f"env.A{i}": list(range(10)) for i in range(6)}, FACTS)
    assert space.total == 10**6
    assert len(list(itertools.islice(space.configs(), 3))) == 3


def test_unnamed_knobs_come_from_the_base_config_and_then_from_the_defaults():
    space = Space.from_spec({"recompute": "auto"}, FACTS, {"micro_batch_size": "4",
                                                           "micro_batch_num": 3})  # fmt: skip
    config = space.complete({"recompute": "none"})
    assert (config["micro_batch_size"], config["data_parallel"]) == (4, 1)
    assert "precision" not in config  # unknown stays unknown
    assert "micro_batch_num" not in config


def test_micro_batch_num_follows_and_is_left_out_where_it_is_not_whole():
    space = Space.from_spec({"micro_batch_size": [4, 5]}, FACTS)
    assert space.with_derived({"micro_batch_size": 4})["micro_batch_num"] == 6
    assert "micro_batch_num" not in space.with_derived({"micro_batch_size": 5})


def test_candidates_keep_their_order_lose_repeats_and_take_any_spelling():
    rows = [
        {"data_parallel": "4", "recompute": "full"},
        {"recompute": "none", "data_parallel": 2},
        {"data_parallel": 4, "recompute": "interval:1"},
    ]
    space = Space.from_spec(rows, FACTS)
    assert space.total == 2
    assert list(space.configs())[1] == {"data_parallel": 2, "recompute": "none"}
    assert {"data_parallel": 2, "recompute": "full"} not in space
    assert {"data_parallel": 4, "recompute": "full"} in space


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "must name at least one knob"),
        ({"tensor_paralel": 2}, "must be one of data_parallel.*but got 'tensor_paralel'"),
        ({"model_paralel": 2}, "but got 'model_paralel'; did you mean model_parallel[?]"),
        ({"TP": 2}, "but got 'TP'; did you mean model_parallel[?]"),
        ({"batch_size": 2}, "did you mean micro_batch_size[?]"),
        ({"global_batch_size": [8, 16]}, "cannot be searched: it follows from training"),
        (
            {"learning_rate": [1e-3]},
            "'learning_rate' cannot be searched: it changes what is learnt",
        ),
        ({"seq_length": [512]}, "'seq_length' cannot be searched: all configs train one model"),
        ({"num_devices": [2, 4]}, "'num_devices' cannot be searched: it is the machine's"),
        ({"gradient_accumulation_steps": [2]}, "it is micro_batch_num here"),
        ({"micro_batch_interleave_num": [2]}, "gradient norm, which is clipped, grows with it"),
        ({"compute_dtype": ["float16"]}, "did you mean precision"),
        (
            {"data_parallel": ["many"]},
            "data_parallel must be a whole number of at least 1, but got 'many'",
        ),
        ({"data_parallel": [1.5]}, "at least 1, but got 1.5"),
        ({"micro_batch_size": [float("nan")]}, "at least 1, but got nan"),
        ({"micro_batch_size": [0]}, "at least 1, but got 0"),
        ({"model_parallel": [-2]}, "at least 1, but got -2"),
        ({"gradient_compression": ["topk:0"]}, "topk:R with a ratio R in"),
        ({"gradient_compression": ["topk:nan"]}, "topk:R with a ratio R in"),
        ({"micro_batch_num": [1, 2]}, "cannot be searched: it follows from global_batch_size"),
        ({"micro_batch_size": []}, "at least one value"),
        ({"env.OMP_NUM_THREADS": "auto"}, "list its values"),
        ({"recompute": ["most"]}, "must be one of none, selective, full"),
        ([{"data_parallel": 1}, {"recompute": "none"}], "candidate 2 names recompute"),
    ],
)
def test_wrong_spaces_are_refused_by_rule_and_value(spec, message):
    with pytest.raises(SearchError, match=message):
        Space.from_spec(spec, FACTS)


@given(
    st.dictionaries(
        st.sampled_from(["data_parallel", "recompute", "use_seq_parallel", "env.X"]),
        st.one_of(st.booleans(), st.integers(1, 64), st.sampled_from(["none", "full"])),
        min_size=1,
    ),
    st.randoms(use_true_random=False),
)
def test_the_hash_depends_on_content_and_never_on_order(config, draw: random.Random):
    items = list(config.items())
    draw.shuffle(items)
    assert config_hash(dict(items)) == config_hash(config)
    name, value = items[0]
    assert config_hash({**config, name: f"other-{value}"}) != config_hash(config)


def test_the_hash_is_stable_over_versions_and_processes():
    assert config_hash({"b": 1, "a": "none", "c": True}) == "2b08a9ebc08f5c36"


def test_true_and_one_hash_apart():
    assert config_hash({"a": True}) != config_hash({"a": 1})


def test_a_knob_at_its_default_does_not_change_the_key_of_a_config():
    wide = Space.from_spec({"micro_batch_size": [1, 2], "comm_fusion": [0, 8]}, FACTS)
    narrow = Space.from_spec({"micro_batch_size": [1, 2]}, FACTS)
    assert narrow.key({"micro_batch_size": 2}) == wide.key(
        {"micro_batch_size": 2, "comm_fusion": 0}
    )
