"""The walk over a space: counts add up, whatever the order in which knobs are fixed."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindtune.search.constraints import check, explain, first_failure
from mindtune.search.cost_model import CostModel
from mindtune.search.errors import SearchError
from mindtune.search.facts import Cluster, Limits, StudyFacts, Training
from mindtune.search.model_shape import ModelShape
from mindtune.search.rules import RULES
from mindtune.search.space import Space

MODEL = ModelShape(
    num_layers=8, hidden_size=512, num_heads=8, num_kv_heads=4, intermediate_size=2048,
    vocab_size=1024, seq_length=256,
)  # fmt: skip
FACTS = StudyFacts(
    cluster=Cluster(
        num_devices=8, devices_per_node=4, device="gpu", device_memory=2**30, peak_flops=1e14,
        intra_node_bandwidth=1e11, inter_node_bandwidth=1e10,
    ),
    training=Training(global_batch_size=32),
    model=MODEL,
    limits=Limits(memory_utilization=0.9),
)  # fmt: skip
SPEC = {
    "recompute": ["none", "interval:2", "full"],
    "gradient_compression": ["none", "float16", "int8"],
    "micro_batch_size": [1, 2, 3, 4],
    "data_parallel": "auto",
    "model_parallel": "auto",
    "pipeline_stage": [1, 2],
    "optimizer_sharding": ["none", "optimizer"],
    "comm_overlap": [False, True],
}


def naive(space):
    """Return count per rule and feasible configs, config by config."""
    cost = CostModel(space.facts)
    counts, feasible = dict.fromkeys((rule.name for rule in RULES), 0), []
    for config in space.configs():
        failure = first_failure(space.complete(config), cost)
        if failure is None:
            feasible.append(config)
        else:
            counts[failure.partition(":")[0]] += 1
    return counts, feasible


def as_set(configs):
    return {tuple(sorted(config.items())) for config in configs}


def test_counts_are_those_of_asking_every_config_and_add_up():
    space = Space.from_spec(SPEC, FACTS)
    report = check(space)
    counts, feasible = naive(space)
    assert report.total == space.total == 3 * 3 * 4 * 4 * 4 * 2 * 2 * 2
    assert {entry.rule: entry.count for entry in report.rejected} == counts
    assert as_set(entry.config for entry in report.configs) == as_set(feasible)
    assert report.total == report.feasible + sum(entry.count for entry in report.rejected)
    assert 0 < report.feasible < report.total / 5
    assert [entry.rule for entry in report.rejected] == [rule.name for rule in RULES]


@given(
    st.fixed_dictionaries(
        {
            name: st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True)
            for name, values in {
                "data_parallel": [1, 2, 4, 8, 3],
                "model_parallel": [1, 2, 4, 8],
                "micro_batch_size": [1, 2, 3, 8],
                "recompute": ["none", "full", "interval:9"],
                "gradient_compression": ["none", "topk:0.1", "powersgd:2"],
                "pp_interleave_num": [1, 2],
                "pipeline_stage": [1, 2, 4],
                "comm_fusion": [0, 8],
            }.items()
        }
    ),
    st.randoms(use_true_random=False),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_space_counts_like_asking_every_config(spec, draw, allow_idle):
    names = list(spec)
    draw.shuffle(names)
    facts = dataclasses.replace(
        FACTS, cluster=dataclasses.replace(FACTS.cluster, allow_idle=allow_idle)
    )
    space = Space.from_spec({name: spec[name] for name in names}, facts)
    report = check(space)
    counts, feasible = naive(space)
    assert {entry.rule: entry.count for entry in report.rejected} == counts
    assert as_set(entry.config for entry in report.configs) == as_set(feasible)


def test_every_example_falls_under_its_rule_with_the_reason_given():
    space = Space.from_spec(SPEC, FACTS)
    report = check(space)
    fired = [entry for entry in report.rejected if entry.count]
    assert len(fired) >= 6
    for entry in fired:
        assert entry.example in space
        failure = first_failure(space.complete(entry.example), report.cost)
        assert failure == f"{entry.rule}: {entry.reason}"


def test_rules_that_never_fired_are_listed_with_0_and_their_words():
    report = check(Space.from_spec({"data_parallel": 8}, FACTS))
    assert all(entry.count == 0 and entry.example is None for entry in report.rejected)
    assert "memory" in report.rejected[-1].reason


def test_configs_come_best_predicted_first():
    report = check(Space.from_spec(SPEC, FACTS))
    times = [entry.prediction.step_time_s for entry in report.configs]
    assert None not in times
    assert times == sorted(times)


def test_without_a_prediction_advice_orders_and_rejects_nothing():
    cluster = Cluster(num_devices=8, devices_per_node=2)
    facts = dataclasses.replace(FACTS, cluster=cluster)
    spec = {"model_parallel": [4, 2, 1], "data_parallel": [8, 4, 2]}
    report = check(Space.from_spec(spec, facts))
    assert {entry.config["model_parallel"] for entry in report.configs[:2]} == {1, 2}
    assert report.configs[2].config["model_parallel"] == 4
    assert [entry.num_advice for entry in report.configs] == [0, 0, 1]
    counts = {entry.rule: entry.count for entry in report.advice}
    assert counts.pop("tensor_parallel_inside_node") == 1
    assert set(counts.values()) == {0}
    assert "model_parallel = 4" in report.advice[0].reason


def test_advice_decides_between_configs_of_equal_predicted_time():
    spec = {
        "data_parallel": 8,
        "gradient_compression": ["topk:0.5", "none"],
        "data_workers": [2, 1],
    }
    report = check(Space.from_spec(spec, FACTS))
    assert report.feasible == 4
    first = report.configs[0]
    assert first.prediction.step_time_s == min(e.prediction.step_time_s for e in report.configs)
    assert [e.config["data_workers"] for e in report.configs] == [2, 1, 2, 1]


def test_candidates_go_through_the_same_rules():
    rows = [
        {"data_parallel": 8, "micro_batch_size": 1},
        {"data_parallel": 8, "micro_batch_size": 3},
        {"data_parallel": 4, "micro_batch_size": 1},
    ]
    report = check(Space.from_spec(rows, FACTS))
    counts = {entry.rule: entry.count for entry in report.rejected if entry.count}
    assert counts == {"degrees_fill_cluster": 1, "micro_batch_identity": 1}
    assert (report.total, report.feasible) == (3, 1)


def test_an_empty_space_names_the_constraint_that_emptied_it():
    report = check(Space.from_spec({"data_parallel": [2, 4], "micro_batch_size": [1, 2]}, FACTS))
    assert report.feasible == 0
    assert report.emptied_by.startswith(
        "no config of 4 is feasible: degrees_fill_cluster alone rejects all of them; e.g. "
    )
    assert "must be num_devices = 8" in report.emptied_by
    assert "Values here: data_parallel 2, 4; model_parallel 1 (not in the" in report.emptied_by


def test_an_empty_space_names_the_smallest_set_where_no_rule_did_it_alone():
    """Wide tensor groups have whole heads but span nodes; narrow ones do not fill the cluster."""
    facts = dataclasses.replace(FACTS, limits=Limits(tensor_parallel_inside_node=True))
    spec = {"data_parallel": [1, 8], "model_parallel": [8, 3], "recompute": ["none", "full"]}
    shape = dataclasses.replace(MODEL, num_kv_heads=8)
    report = check(Space.from_spec(spec, dataclasses.replace(facts, model=shape)))
    assert report.feasible == 0
    assert [rule.name for rule in report.conflict.rules] == ["tensor_parallel_inside_node"]
    assert report.conflict.left_without == (2,)
    roomy = dataclasses.replace(
        facts, cluster=dataclasses.replace(FACTS.cluster, devices_per_node=3)
    )
    report = check(Space.from_spec({**spec, "model_parallel": [8, 3, 1]},
                                   dataclasses.replace(roomy, model=shape)))  # fmt: skip
    assert report.feasible == 2  # data_parallel 8 alone
    report = check(Space.from_spec({**spec, "data_parallel": [1]},
                                   dataclasses.replace(roomy, model=shape)))  # fmt: skip
    assert [rule.name for rule in report.conflict.rules] == [
        "degrees_fill_cluster", "tensor_parallel_inside_node",
    ]  # fmt: skip
    assert "and tensor_parallel_inside_node together reject all of them" in report.emptied_by
    assert "2 without tensor_parallel_inside_node" in report.emptied_by


def test_the_smallest_set_rejects_everything_and_no_smaller_one_does():
    from itertools import combinations

    draw = random.Random(3)
    seen = set()
    for _ in range(60):
        spec = {
            "data_parallel": draw.sample([1, 2, 4, 8, 3], 2),
            "model_parallel": draw.sample([1, 2, 8, 3], 2),
            "pipeline_stage": draw.sample([1, 3, 16], 1),
            "recompute": draw.sample(["none", "interval:9", "layers:9"], 1),
            "gradient_compression": draw.sample(["none", "int8", "topk:0.1"], 1),
            "use_seq_parallel": [draw.random() < 0.5],
        }
        space = Space.from_spec(spec, FACTS)
        report = check(space)
        if report.feasible:
            assert report.conflict is None
            continue
        cost = CostModel(FACTS)
        failing = [
            {rule.name for rule in RULES if rule.check(space.complete(config), cost)}
            for config in space.configs()
        ]
        names = [rule.name for rule in report.conflict.rules]
        seen.add(len(names))
        assert all(entry & set(names) for entry in failing)
        for smaller in combinations(sorted(set().union(*failing)), len(names) - 1):
            assert not all(entry & set(smaller) for entry in failing)
    assert seen >= {1, 2}


def test_memory_that_empties_a_space_is_named_among_configs_that_fill_the_cluster():
    small = dataclasses.replace(FACTS.cluster, device_memory=2**20)
    spec = {"data_parallel": "auto", "model_parallel": "auto", "micro_batch_size": [1, 2]}
    report = check(Space.from_spec(spec, dataclasses.replace(FACTS, cluster=small)))
    assert [rule.name for rule in report.conflict.rules] == ["memory"]
    assert (
        "memory alone rejects all that fill the cluster with whole micro-batches"
        in report.emptied_by
    )


def test_a_space_with_something_left_is_not_empty():
    assert check(Space.from_spec({"data_parallel": 8}, FACTS)).emptied_by is None


def test_an_explicit_list_emptied_by_rules_says_so_too():
    report = check(Space.from_spec([{"data_parallel": 3}], FACTS))
    assert "degrees_fill_cluster alone rejects all of them" in report.emptied_by


def test_explain_lists_every_failing_rule_and_the_users_own_limits():
    space = Space.from_spec({"data_parallel": [8], "micro_batch_size": [1, 2]}, FACTS)
    found = explain(space, {"micro_batch_size": "3", "gradient_compression": "int8"})
    assert [entry.rule for entry in found.rejected] == [
        "allowed_values", "micro_batch_identity", "compression_method"
    ]  # fmt: skip
    assert "not among the space's values: 1, 2" in found.rejected[0].reason
    assert found.config["data_parallel"] == 8


def test_explain_refuses_what_an_explicit_list_does_not_hold():
    rows = [
        {"data_parallel": 1, "micro_batch_size": 1}, {"data_parallel": 2, "micro_batch_size": 2},
    ]  # fmt: skip
    facts = StudyFacts(
        cluster=Cluster(num_devices=2, allow_idle=True), training=Training(global_batch_size=4)
    )
    space = Space.from_spec(rows, facts, {})
    assert explain(space, rows[1]).rejected == ()
    (rejected,) = explain(space, {"data_parallel": 1, "micro_batch_size": 2}).rejected
    assert (rejected.rule, rejected.reason) == (
        "allowed_values", "the space does not list this config",
    )  # fmt: skip


def test_explain_fills_unnamed_knobs_from_the_base_config():
    space = Space.from_spec({"data_parallel": [8], "recompute": "auto"}, FACTS,
                            {"recompute": "full", "micro_batch_size": 4})  # fmt: skip
    found = explain(space, {})
    assert (found.config["recompute"], found.config["micro_batch_size"]) == ("full", 4)
    assert found.rejected == ()
    assert any("recompute = full takes" in line for line in found.advice)
    assert found.prediction.step_time_s > 0


def test_explain_refuses_what_is_no_knob():
    space = Space.from_spec({"data_parallel": [8]}, FACTS)
    with pytest.raises(SearchError, match="knob names must be one of"):
        explain(space, {"dp": 8})


def test_other_knobs_pass_through():
    spec = {"data_parallel": 8, "env.OMP_NUM_THREADS": [1, 2], "data_workers": [1, 4],
            "prefetch": [2]}  # fmt: skip
    report = check(Space.from_spec(spec, FACTS))
    assert report.feasible == report.total == 4
    assert report.configs[0].config["env.OMP_NUM_THREADS"] in ("1", "2")


def test_memory_is_named_alone_although_configs_that_do_not_fill_the_cluster_would_fit():
    """They are no answer to a lack of memory: nothing means anything that is predicted of them."""
    cluster = dataclasses.replace(FACTS.cluster, num_devices=64)
    facts = dataclasses.replace(FACTS, cluster=cluster, training=Training(global_batch_size=64))
    spec = {"data_parallel": [8], "model_parallel": [1, 4], "pipeline_stage": [2, 8]}
    least = min(e.prediction.memory_bytes for e in check(Space.from_spec(spec, facts)).configs)
    tight = dataclasses.replace(facts, limits=Limits(max_memory=0.99 * least))
    space = Space.from_spec(spec, tight)
    report = check(space)
    memory = next(rule for rule in RULES if rule.name == "memory")
    fitting = [c for c in space.configs() if not memory.check(space.complete(c), report.cost)]
    assert fitting == [{"data_parallel": 8, "model_parallel": 4, "pipeline_stage": 8}]
    assert [rule.name for rule in report.conflict.rules] == ["memory"]


def test_a_large_empty_space_is_explained_in_a_moment(monkeypatch):
    """Without the rule that emptied it, a million configs would have to be predicted."""
    from mindtune.search import conflict

    monkeypatch.setattr(conflict, "_MOST_LOOKED_AT", 50)
    devices = dataclasses.replace(FACTS.cluster, num_devices=1009, devices_per_node=None)
    spec = {
        "data_parallel": [2, 4, 8], "model_parallel": [1, 2], "micro_batch_size": list(range(1, 33)),
        "recompute": ["none", "full", *(f"interval:{k}" for k in range(2, 9))],
        "comm_overlap": "auto", "data_workers": list(range(1, 65)),
    }  # fmt: skip
    report = check(Space.from_spec(spec, dataclasses.replace(FACTS, cluster=devices)))
    assert report.total == 221184
    assert [rule.name for rule in report.conflict.rules] == ["degrees_fill_cluster"]
    assert "Left would be at least 50 without degrees_fill_cluster." in report.emptied_by
