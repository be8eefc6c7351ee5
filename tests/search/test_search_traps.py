"""Known traps of public tuners about spaces, rules and units: each case shows the right behaviour."""

import dataclasses
import random

import pytest

from mindtune.controller.contract import StudyFile, parse
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.study_setup import study_facts
from mindtune.search import layout
from mindtune.search.advice import ADVICE
from mindtune.search.constraints import check, explain
from mindtune.search.cost_model import CostModel
from mindtune.search.facts import Cluster, Limits, StudyFacts, Training
from mindtune.search.history import Attempt, infer, needs_at_least
from mindtune.search.knobs import KNOBS
from mindtune.search.model_shape import ModelShape
from mindtune.search.rules import RULES
from mindtune.search.space import Space

MODEL = ModelShape(
    num_layers=12, hidden_size=768, num_heads=12, intermediate_size=3072, vocab_size=50257,
    seq_length=1024, flash_attention=True,
)  # fmt: skip
MOE = dataclasses.replace(MODEL, num_experts=12, experts_per_token=2)


def facts(num_devices=12, batch=96, model=MODEL, **changes):
    return StudyFacts(
        cluster=Cluster(num_devices=num_devices, device="npu", **changes.pop("cluster", {})),
        training=Training(global_batch_size=batch, precision="bfloat16"),
        model=model,
        limits=Limits(**changes),
    )


def values(report, name):
    return {entry.config[name] for entry in report.configs}


def test_every_degree_is_tried_from_1_to_all_devices_powers_of_two_or_not():
    """One tuner began at tensor parallel 2, one knew 2, 4 and 8 stages, one asked for 16 cards."""
    spec = {"data_parallel": "auto", "model_parallel": "auto", "pipeline_stage": "auto"}
    report = check(Space.from_spec(spec, facts()))
    for name in spec:
        assert values(report, name) == {1, 2, 3, 4, 6, 12}
    assert check(Space.from_spec(spec, facts(num_devices=1))).feasible == 1


def test_a_value_that_cannot_work_costs_its_own_configs_and_not_the_search():
    """One bad value in a list was an error for the whole search."""
    space = Space.from_spec({"data_parallel": "auto", "model_parallel": [1, 5, 8, 4]}, facts())
    report = check(space)
    assert values(report, "model_parallel") == {1, 4}
    for bad in (5, 8):
        told = explain(space, {"model_parallel": bad, "data_parallel": 1})
        assert told.rejected[1].rule == "heads_divisible"
        assert (
            f"num_heads = 12 must be a multiple of model_parallel = {bad}"
            in told.rejected[1].reason
        )


def test_the_users_list_is_the_only_one():
    """A list of stages in the user's file was ignored."""
    spec = {"data_parallel": [12], "optimizer_sharding": ["gradient"], "micro_batch_size": [1, 2]}
    report = check(Space.from_spec(spec, facts()))
    assert values(report, "optimizer_sharding") == {"gradient"}
    assert report.feasible == 2


def test_experts_lie_inside_data_parallelism_and_multiply_no_devices():
    """A rule of another framework was applied to all; one file had experts that divide nothing."""
    spec = {
        "data_parallel": [12, 6],
        "model_parallel": [1, 2],
        "expert_parallel": [1, 2, 3, 4, 5, 8],
    }
    report = check(Space.from_spec(spec, facts(model=MOE)))
    assert report.feasible == 4 + 3  # all divisors of 12 in the list; of 6, without 4
    for entry in report.configs:
        complete = report.space.complete(entry.config)
        assert layout.num_ranks(complete) == 12
        assert layout.data_parallel(complete) % layout.expert_parallel(complete) == 0
    dense = check(Space.from_spec({**spec, "expert_parallel": [1, 2]}, facts()))
    assert values(dense, "expert_parallel") == {1}


def test_the_batch_identity_holds_in_every_feasible_config():
    """global_batch_size = data_parallel x micro_batch_size x micro_batch_num, in any layout."""
    spec = {"data_parallel": "auto", "model_parallel": "auto", "pipeline_stage": "auto",
            "micro_batch_size": [1, 2, 3, 4, 5, 7, 8]}  # fmt: skip
    report = check(Space.from_spec(spec, facts(batch=120)))
    assert report.feasible > 20
    for entry in report.configs:
        full = report.space.with_derived(entry.config)
        assert full["data_parallel"] * full["micro_batch_size"] * full["micro_batch_num"] == 120
        assert full["micro_batch_num"] >= full["pipeline_stage"]


def test_interleaving_needs_stages_whole_rounds_and_layers_for_every_chunk():
    spec = {
        "data_parallel": "auto",
        "pipeline_stage": [1, 2, 3, 4],
        "pp_interleave_num": [1, 2, 3, 6],
    }
    report = check(Space.from_spec(spec, facts()))
    found = {(e.config["pipeline_stage"], e.config["pp_interleave_num"]) for e in report.configs}
    assert found == {(1, 1), (2, 1), (2, 2), (2, 3), (2, 6), (3, 1), (3, 2), (4, 1), (4, 3)}


@pytest.mark.parametrize("tensor", [2, 4, 12])
def test_a_vocabulary_that_does_not_divide_is_padded_and_rejects_nothing(tensor):
    """50257 is odd: Megatron-LM pads it, MindFormers leaves the output layer whole."""
    space = Space.from_spec({"model_parallel": tensor, "data_parallel": 12 // tensor}, facts())
    report = check(space)
    assert report.feasible == 1
    advice = {entry.rule: entry for entry in report.advice}["vocab_divisible"]
    assert advice.count == 1
    assert f"pad it to {layout.padded_vocabulary(50257, tensor)}" in advice.reason
    strict = check(Space.from_spec({"model_parallel": tensor, "data_parallel": 12 // tensor},
                                   facts(vocab_divisible=True)))  # fmt: skip
    assert strict.emptied_by.startswith("no config of 1 is feasible: vocab_divisible alone")


@pytest.mark.parametrize(("vocab", "tensor", "padded"), [(50257, 1, 50304), (50257, 2, 50432),
                                                         (50257, 8, 51200), (128256, 8, 129024)])  # fmt: skip
def test_padding_is_to_a_multiple_of_128_per_tensor_rank(vocab, tensor, padded):
    assert layout.padded_vocabulary(vocab, tensor) == padded


def test_4_to_8_micro_batches_per_stage_are_advice_and_never_lose_a_config():
    """Enforced, they would lose the best config of 22 in 45 groups of published runs."""
    spec = {
        "data_parallel": "auto",
        "pipeline_stage": "auto",
        "micro_batch_size": [1, 2, 4, 8, 16],
    }
    free = check(Space.from_spec(spec, facts(batch=384)))
    bound = check(Space.from_spec(spec, facts(batch=384, min_micro_batches_per_stage=4,
                                              max_micro_batches_per_stage=8)))  # fmt: skip
    counts = {entry.rule: entry.count for entry in free.advice}
    assert counts["micro_batches_per_stage"] > 0
    assert counts["max_micro_batches_per_stage"] > 0
    assert free.feasible - bound.feasible == (
        counts["micro_batches_per_stage"] + counts["max_micro_batches_per_stage"]
    )


def test_sizes_of_any_model_and_device_are_taken_as_they_are():
    """Tables knew 40 and 80 GB, fixed sequence lengths, and read 1P5B as 5B."""
    odd = dataclasses.replace(MODEL, num_layers=37, hidden_size=1560, seq_length=3000)
    for memory in (24, 40, 61, 80, 141):
        small = facts(num_devices=6, batch=12, model=odd,
                      cluster={"device_memory": memory * 2**30})  # fmt: skip
        report = check(Space.from_spec({"data_parallel": 6, "micro_batch_size": [1, 2]}, small))
        assert all(entry.prediction.memory_bytes > 0 for entry in report.configs)


def test_rules_name_knobs_one_by_one():
    """A string taken for a list of names matched a part of another name."""
    for rule in (*RULES, *ADVICE):
        assert isinstance(rule.reads, tuple), rule.name
        assert rule.reads, rule.name
        assert set(rule.reads) <= set(KNOBS), rule.name


STUDY = {
    "schema": 1, "study": {"name": "x"}, "trial": {"command": ["true"]},
    "cluster": {"num_devices": 1}, "training": {"global_batch_size": 1},
    "space": {"micro_batch_size": 1},
}  # fmt: skip


def study(memory, **constraints):
    cluster = {"num_devices": 1, "device_memory": memory}
    return parse(StudyFile, {**STUDY, "cluster": cluster, "constraints": constraints}, source="s")


@pytest.mark.parametrize(
    "memory", ["58.5GB", "58.5 GiB", "59904MB", "59904MiB", 62813896704, "62813896704"]
)
def test_one_memory_in_any_unit_is_one_limit(memory):
    assert study_facts(study(memory), None).cluster.device_memory == int(58.5 * 2**30)
    assert study_facts(study("64GB", max_memory=memory), None).memory_limit == (
        int(58.5 * 2**30), "constraints.max_memory = 58.5GB",
    )  # fmt: skip


@pytest.mark.parametrize(
    "memory",
    ["-58.5GB", "nan", float("nan"), float("inf"), "58.5 parsecs", "plenty", "GB", "", 0, -1, True,
     "58.5GB/s", "5 8GB", "64", 64, ["64GB"]],
)  # fmt: skip
def test_nonsense_is_no_memory(memory):
    with pytest.raises(ConfigError, match="cluster.device_memory"):
        study(memory)
    with pytest.raises(ConfigError, match="constraints.max_memory"):
        study("64GB", max_memory=memory)


@pytest.mark.parametrize(
    ("name", "value"),
    [("memory_utilization", float("nan")), ("memory_utilization", -0.1), ("memory_utilization", 85),
     ("max_pipeline_bubble", "15%"), ("max_recompute_share", 1.5), ("min_overlap_headroom", -1),
     ("min_micro_batches_per_stage", 0), ("max_micro_batches_per_stage", 2.5)],
)  # fmt: skip
def test_nonsense_is_no_limit(name, value):
    with pytest.raises(ConfigError, match=f"constraints.{name}"):
        study("64GB", **{name: value})


def test_a_limit_that_can_judge_nothing_is_named_with_what_is_missing():
    spec = {"data_parallel": 12}
    known = facts(memory_utilization=0.8, cluster={"device_memory": 2**36})
    assert check(Space.from_spec(spec, known)).notes == ()
    assert check(Space.from_spec(spec, facts())).notes == ()
    assert check(Space.from_spec(spec, facts(memory_utilization=0.8))).notes == (
        "constraints.memory_utilization judges nothing: cluster.device_memory is not known",
    )
    odd = dataclasses.replace(
        known, training=Training(global_batch_size=96, optimizer="lion"),
        limits=Limits(memory_utilization=0.8, max_memory=2**34, max_pipeline_bubble=0.1),
    )  # fmt: skip
    assert check(Space.from_spec(spec, odd)).notes == (
        "constraints.memory_utilization judges nothing: training.optimizer = lion is not known",
        "constraints.max_memory judges nothing: training.optimizer = lion is not known",
    )
    blind = facts(model=None, vocab_divisible=True, cluster={"device_memory": 2**36})
    assert check(Space.from_spec(spec, blind)).notes == (
        "constraints.vocab_divisible judges nothing: model is not known",
    )


def test_too_empty_configs_are_rejected_where_the_user_says_so():
    spec = {"data_parallel": 12, "micro_batch_size": [1, 2, 4, 8], "recompute": ["none", "full"]}
    free = check(Space.from_spec(spec, facts()))
    most = max(entry.prediction.memory_bytes for entry in free.configs)
    fitting = {"cluster": {"device_memory": 1.01 * most}}
    window = check(Space.from_spec(spec, facts(**fitting, min_memory_utilization=0.5)))
    assert free.feasible == 8
    assert 0 < window.feasible < 8
    assert {r.rule: r.count for r in window.rejected}["memory_used"] == 8 - window.feasible


@pytest.mark.parametrize(
    ("more", "less", "certain"),
    [
        ("none", "layers:2/1", True),
        ("layers:2/1", "full", True),
        ("layers:1/1", "layers:2/1", True),
        ("layers:2/0", "layers:1/1", False),
        ("layers:2/1", "layers:2/1/0", False),
        ("selective:1/1", "selective", True),
        ("selective", "selective:1/1", False),
        ("selective:1/1", "layers:1/1", False),
        ("layers:1/1", "interval:2", False),
        ("interval:2", "layers:1/1", False),
        ("layers:1/0+0/1", "layers:1/1+1/1", True),
    ],
)
def test_lists_per_stage_are_ordered_by_memory_only_stage_by_stage(more, less, certain):
    """A config that repeats no more anywhere runs out of memory where the other one did."""
    base = {"pipeline_stage": 2, "micro_batch_size": 1}
    assert needs_at_least({**base, "recompute": more}, {**base, "recompute": less}) is certain
    failed = Attempt(1, {**base, "recompute": less}, "oom")
    assert (infer({**base, "recompute": more}, [failed]) is not None) is certain
    assert infer({**base, "pipeline_stage": 4, "recompute": more}, [failed]) is None


DENSE = ModelShape(
    num_layers=8, hidden_size=512, num_heads=8, intermediate_size=2048, vocab_size=8192,
    seq_length=512,
)  # fmt: skip
EXPERTS = dataclasses.replace(
    DENSE, num_experts=8, experts_per_token=2, moe_intermediate_size=1024, flash_attention=True
)


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_what_certainly_needs_no_less_is_predicted_to_need_no_less(model):
    """History and cost model are of one mind, pipelines, interleaving and experts included."""
    spec = {
        "data_parallel": [1, 2, 4], "pipeline_stage": [1, 2, 4], "pp_interleave_num": [1, 2],
        "micro_batch_size": [1, 2, 4, 8], "optimizer_sharding": ["none", "optimizer"],
        "recompute": ["none", "interval:2", "selective", "full"],
        "expert_parallel": [1] if model is DENSE else [1, 2],
    }  # fmt: skip
    facts = StudyFacts(
        cluster=Cluster(num_devices=8, devices_per_node=8, allow_idle=True),
        training=Training(global_batch_size=32, precision="bfloat16"),
        model=model,
    )
    space, cost = Space.from_spec(spec, facts), CostModel(facts)
    known = [(entry.config, cost.memory_bytes(space.complete(entry.config)))
             for entry in check(space).configs]  # fmt: skip
    pairs = 0
    for config, memory in known:
        for other, reference in known:
            if config is not other and needs_at_least(config, other):
                pairs += 1
                assert memory >= reference * (1 - 1e-9), (config, other)
    assert pairs > 300


def test_fewer_stages_or_other_chunks_are_another_question():
    """The kind of R4: degrees are compared by name, never by a part of one."""
    failed = {"pipeline_stage": 4, "pp_interleave_num": 2, "micro_batch_size": 2}
    for change in (
        {"pipeline_stage": 8, "pp_interleave_num": 1}, {"pipeline_stage": 2},
        {"pp_interleave_num": 1}, {"pp_interleave_num": 4, "micro_batch_size": 4},
    ):  # fmt: skip
        assert infer({**failed, **change}, [Attempt(0, failed, "oom")]) is None
    assert infer({**failed, "micro_batch_size": 4}, [Attempt(0, failed, "oom")]) is not None


def test_the_order_of_knobs_and_values_changes_no_count():
    spec = {"data_parallel": "auto", "model_parallel": "auto", "pipeline_stage": "auto",
            "offset": "auto", "recompute": ["none", [1, 1, 0], "full"]}  # fmt: skip
    counts = set()
    draw = random.Random(5)
    choices = Space.from_spec(spec, facts()).choices
    for _ in range(5):
        names = draw.sample(list(choices), len(choices))
        shuffled = {name: draw.sample(choices[name], len(choices[name])) for name in names}
        report = check(Space.from_spec(shuffled, facts()))
        counts.add(tuple(entry.count for entry in report.rejected))
        assert report.total == report.feasible + sum(entry.count for entry in report.rejected)
    assert len(counts) == 1
