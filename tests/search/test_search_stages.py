"""Layers over stages and chunks, and lists per stage, as MindFormers reads them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindtune.search import layout
from mindtune.search.constraints import check, explain
from mindtune.search.cost_model import CostModel
from mindtune.search.errors import SearchError
from mindtune.search.facts import Cluster, StudyFacts, Training
from mindtune.search.knobs import KNOBS, canonical
from mindtune.search.model_shape import ModelShape
from mindtune.search.rules import RULES
from mindtune.search.space import Space
from mindtune.search.stage_list import parse_stage_list, plain_list, stage_list_text


def facts(num_layers, num_devices=8):
    return StudyFacts(
        cluster=Cluster(num_devices=num_devices),
        training=Training(global_batch_size=96),
        model=ModelShape(
            num_layers=num_layers, hidden_size=64, num_heads=8, intermediate_size=256,
            vocab_size=512, seq_length=64,
        ),
    )  # fmt: skip


def placed(**knobs):
    defaults = {k.name: k.default for k in KNOBS.values() if k.default is not None}
    return {**defaults, **knobs}


@pytest.mark.parametrize(
    ("value", "text", "plain"),
    [
        ([1, 2, 0, 1], "1/2/0/1", [1, 2, 0, 1]),
        ([[1, 0, 0, 0], [0, 0, 0, 1]], "1/0/0/0+0/0/0/1", [[1, 0, 0, 0], [0, 0, 0, 1]]),
        ("2/-1", "2/-1", [2, -1]),
        (" 1/1+0/0 ", "1/1+0/0", [[1, 1], [0, 0]]),
        ([3], "3", [3]),
    ],
)
def test_lists_have_one_spelling_and_come_back(value, text, plain):
    rows = parse_stage_list(value)
    assert stage_list_text(rows) == text
    assert plain_list(rows) == plain
    assert parse_stage_list(text) == parse_stage_list(plain) == rows


@pytest.mark.parametrize(
    "value",
    [
        [],
        [[]],
        [[], []],
        [1, [2]],
        [[1], [2, 3]],
        [1.5],
        [True],
        ["a"],
        "",
        "1//2",
        "1/",
        "1+1/2",
        3,
        None,
        "1:2",
        {},
    ],
)
def test_what_is_no_list_per_stage_is_refused(value):
    with pytest.raises(ValueError, match="must"):
        parse_stage_list(value)


@pytest.mark.parametrize(
    ("knob", "value", "canonical_text"),
    [
        ("recompute", [1, 2, 0, 1], "layers:1/2/0/1"),
        ("recompute", "LAYERS:1/2/0/1", "layers:1/2/0/1"),
        ("recompute", [[1, 0], [0, 1]], "layers:1/0+0/1"),
        ("recompute", "selective:0/2", "selective:0/2"),
        ("recompute", [0, 0], "none"),
        ("recompute", "selective:0/0", "none"),
        ("offset", [0, 1, 1, 0], "0/1/1/0"),
        ("offset", 0, "even"),
        ("offset", None, "even"),
        ("offset", [0, 0], "even"),
        ("offset", "Balanced", "balanced"),
        ("offset", [[0, 1], [0, 0]], "0/1+0/0"),
    ],
)
def test_knobs_take_mindformers_own_forms(knob, value, canonical_text):
    assert canonical(knob, value) == canonical_text
    assert canonical(knob, canonical_text) == canonical_text


@pytest.mark.parametrize(
    ("knob", "value", "message"),
    [
        ("recompute", [1, -1], "at least 0"),
        ("recompute", "layers:", "recompute must be layers:A/B"),
        ("recompute", "layers:a/b", "layers must be whole numbers per stage"),
        ("recompute", 3, "numbers per stage are a list among the values"),
        ("recompute", "3", "must be one of none, selective, full"),
        ("recompute", [True, False], "one whole number per stage"),
        ("offset", 1, "numbers per stage are a list among the values"),
        ("offset", "some", "whole numbers per stage"),
        ("offset", [1, 2.5], "one whole number per stage"),
    ],
)
def test_other_forms_are_refused_by_rule_and_value(knob, value, message):
    with pytest.raises(SearchError, match=message):
        canonical(knob, value)


@given(st.integers(1, 130), st.integers(2, 16), st.integers(1, 4))
def test_a_balanced_offset_places_every_layer_and_spares_both_ends(layers, stages, chunks):
    config = placed(pipeline_stage=stages, pp_interleave_num=chunks, offset="balanced")
    rows = layout.chunk_layers(config, layers)
    assert (len(rows), len(rows[0])) == (chunks, stages)
    assert sum(map(sum, rows)) == layers
    per_stage = layout.stage_layers(config, layers)
    assert max(per_stage) - min(per_stage) <= 1
    assert layout.layers_per_stage(config, layers) == max(per_stage)
    assert per_stage[-1] == min(per_stage)  # the output layer lies there
    if layers >= stages * chunks - 2:
        first, *middle, last = (count for row in rows for count in row)
        assert min(middle, default=1) >= 1
        assert min(first, last) >= 0
    if layers % (stages * chunks) % stages < stages - 1:
        assert per_stage[0] == min(per_stage)  # most micro-batches wait there


def test_layers_per_stage_follow_the_offset_as_in_mindformers():
    """num_layers 9 over 4 stages: 2 each, and the offset's sum is the remainder 1."""
    config = placed(pipeline_stage=4, offset="0/1/0/0")
    assert layout.stage_layers(config, 9) == (2, 3, 2, 2)
    interleaved = placed(pipeline_stage=2, pp_interleave_num=2, offset="0/1+0/0")
    assert layout.chunk_layers(interleaved, 9) == ((2, 3), (2, 2))
    assert layout.stage_layers(interleaved, 9) == (4, 5)


def test_the_two_ends_may_go_without_a_layer():
    """Llama 3.1 405B was trained so: 126 layers over 16 stages of 8 chunks."""
    config = placed(pipeline_stage=16, pp_interleave_num=8, offset="balanced")
    rows = layout.chunk_layers(config, 126)
    assert [rows[0][0], rows[-1][-1]] == [0, 0]
    assert sum(map(sum, rows)) == 126
    assert layout.stage_layers(config, 126) == (7, *[8] * 14, 7)
    spec = {"pipeline_stage": 16, "pp_interleave_num": 8, "offset": "balanced"}
    report = check(Space.from_spec({**spec, "data_parallel": 1}, facts(126, num_devices=16)))
    assert report.feasible == 1


def test_repeated_layers_are_counted_per_stage():
    config = placed(pipeline_stage=4, offset="0/1/0/0")
    for recompute, expected in (
        ("none", [(0, 0)] * 4),
        ("full", [(2, 0), (3, 0), (2, 0), (2, 0)]),
        ("interval:2", [(1, 0), (1.5, 0), (1, 0), (1, 0)]),
        ("selective", [(0, 2), (0, 3), (0, 2), (0, 2)]),
        ("layers:2/1/0/0", [(2, 0), (1, 0), (0, 0), (0, 0)]),
        ("layers:1/1/0/0+1/0/0/0", [(2, 0), (1, 0), (0, 0), (0, 0)]),
        ("selective:2/1/0/0", [(0, 2), (0, 1), (0, 0), (0, 0)]),
    ):
        assert layout.repeated_layers({**config, "recompute": recompute}, 9) == tuple(expected)


def test_every_pipeline_depth_is_reached_where_offset_is_searched():
    """A public tuner knew 2, 4 and 8 stages only; another lost as many stages as layers."""
    spec = {"pipeline_stage": "auto", "data_parallel": "auto", "offset": "auto"}
    report = check(Space.from_spec(spec, facts(10, num_devices=12)))
    found = {(e.config["pipeline_stage"], e.config["offset"]) for e in report.configs}
    assert found == {
        (1, "even"), (2, "even"), (3, "balanced"), (4, "balanced"), (6, "balanced"), (12, "balanced"),
    }  # fmt: skip
    even = check(Space.from_spec({**spec, "offset": "even"}, facts(10, num_devices=12)))
    assert {e.config["pipeline_stage"] for e in even.configs} == {1, 2}
    told = explain(even.space, {"pipeline_stage": 4, "data_parallel": 3, "offset": "even"})
    assert "offset = balanced would place the remainder" in told.rejected[0].reason


def test_a_program_gets_the_layers_of_each_stage_and_not_a_word_for_them():
    space = Space.from_spec({"pipeline_stage": [3], "offset": ["balanced"]}, facts(10))
    assert space.with_derived({"pipeline_stage": 3, "offset": "balanced"})["offset"] == "0/1/0"
    assert space.with_derived({"pipeline_stage": 3, "offset": "1/0/0"})["offset"] == "1/0/0"


def test_recompute_lists_are_asked_for_the_depth_that_they_are_written_for():
    spec = {"pipeline_stage": [1, 2, 4], "data_parallel": "auto",
            "recompute": ["none", [2, 1], [2, 2, 1, 0], "layers:3/0/0/0"]}  # fmt: skip
    report = check(Space.from_spec(spec, facts(8)))
    found = {(e.config["pipeline_stage"], e.config["recompute"]) for e in report.configs}
    assert found == {
        (1, "none"), (2, "none"), (4, "none"), (2, "layers:2/1"), (4, "layers:2/2/1/0"),
    }  # fmt: skip
    told = explain(report.space, {"pipeline_stage": 4, "data_parallel": 2,
                                  "recompute": "layers:3/0/0/0"})  # fmt: skip
    assert [entry.rule for entry in told.rejected] == ["recompute_per_stage"]
    assert "repeats 3 layers on stage 0, which has 2" in told.rejected[0].reason


def test_no_rule_fails_on_a_list_that_another_rule_rejects():
    for offset in ("0/1", "1/0+0/0", "9/-9/0", "balanced"):
        for recompute in ("layers:1/2", "layers:1/0+0/1", "selective:1/0/9/2"):
            for stages in (1, 2, 3):
                config = placed(pipeline_stage=stages, offset=offset, recompute=recompute)
                for model_facts in (facts(8), StudyFacts(cluster=Cluster(num_devices=8),
                                                         training=Training(global_batch_size=8))):  # fmt: skip
                    for rule in RULES:
                        rule.check(config, CostModel(model_facts))
