"""Every rule has a config that it rejects, with its numbers, and a neighbour that it lets pass."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindtune.search.advice import ADVICE, advice
from mindtune.search.cost_model import COST_KNOBS, CostModel
from mindtune.search.facts import Cluster, Limits, StudyFacts, Training
from mindtune.search.knobs import KNOBS
from mindtune.search.model_shape import ModelShape
from mindtune.search.rules import RULES

MODEL = ModelShape(
    num_layers=24, hidden_size=1536, num_heads=16, num_kv_heads=8, intermediate_size=4096,
    vocab_size=50304, seq_length=1024, flash_attention=True,
)  # fmt: skip
MOE = dataclasses.replace(MODEL, num_experts=8, experts_per_token=2)
CLUSTER = Cluster(
    num_devices=16, devices_per_node=8, device="Ascend910B", device_memory=32 * 2**30
)
FACTS = StudyFacts(cluster=CLUSTER, training=Training(global_batch_size=64), model=MODEL)


def facts(**changes):
    """Return facts with changed sections: cluster, training, model, limits."""
    model = changes.pop("model", MODEL)
    return StudyFacts(
        cluster=dataclasses.replace(CLUSTER, **changes.pop("cluster", {})),
        training=dataclasses.replace(FACTS.training, **changes.pop("training", {})),
        limits=Limits(**changes.pop("limits", {})),
        model=dataclasses.replace(model, **changes.pop("shape", {})) if model else None,
    )


def complete(**knobs):
    """Return a complete config of plain data parallelism over 16 devices, changed by `knobs`."""
    base = {k.name: k.default for k in KNOBS.values() if k.default is not None}
    return {**base, "data_parallel": 16, **knobs}


def reason(rule_name, config, given_facts=FACTS):
    """Return what one rule says."""
    rule = next(rule for rule in RULES if rule.name == rule_name)
    return rule.check(config, CostModel(given_facts))


# rule, knobs that it rejects, facts, part of the reason, knobs that it lets pass
CASES = [
    ("degrees_fill_cluster", {"model_parallel": 2}, {}, r"16 x 2 x 1 x 1 = 32",
     {"data_parallel": 8, "model_parallel": 2}),
    ("degrees_fill_cluster", {"data_parallel": 8}, {}, r"must be num_devices = 16, but 8 x 1",
     {"data_parallel": 4, "context_parallel": 2, "pipeline_stage": 2}),
    ("degrees_fill_cluster", {"data_parallel": 32}, {"cluster": {"allow_idle": True}},
     "at most num_devices = 16", {"data_parallel": 8}),
    ("ranks_fill_nodes", {"data_parallel": 12},
     {"cluster": {"allow_idle": True, "whole_nodes": True}},
     r"a multiple of devices_per_node = 8, but data_parallel x .* = 12", {"data_parallel": 6}),
    ("ranks_fill_nodes", {"data_parallel": 12},
     {"cluster": {"allow_idle": True, "whole_nodes": True}}, "= 12", {"data_parallel": 16}),
    ("micro_batch_identity", {"micro_batch_size": 3}, {},
     r"64 must be a multiple of data_parallel x micro_batch_size = 16 x 3 = 48",
     {"micro_batch_size": 4}),
    ("heads_divisible", {"model_parallel": 3}, {}, "num_heads = 16 must be a multiple of model_parallel = 3", {"model_parallel": 16}),
    ("kv_heads_divisible", {"model_parallel": 16}, {}, "num_kv_heads = 8 .* 16",
     {"model_parallel": 8}),
    ("hidden_divisible", {"model_parallel": 5}, {}, "hidden_size = 1536 .* 5",
     {"model_parallel": 3}),
    ("intermediate_divisible", {"model_parallel": 3}, {}, "intermediate_size = 4096 .* 3",
     {"model_parallel": 4}),
    ("intermediate_divisible", {"model_parallel": 8},
     {"model": MOE, "shape": {"moe_intermediate_size": 100}}, "^moe_intermediate_size = 100 .* 8",
     {"model_parallel": 4}),
    ("vocab_divisible", {"model_parallel": 2},
     {"shape": {"vocab_size": 50257}, "limits": {"vocab_divisible": True}},
     r"vocab_size = 50257 is no multiple of model_parallel = 2: pad it to 50432", {"model_parallel": 1}),
    ("tensor_parallel_inside_node", {"model_parallel": 16},
     {"limits": {"tensor_parallel_inside_node": True}},
     r"16 does not divide devices_per_node = 8.*\(constraints.tensor_parallel_inside_node\)",
     {"model_parallel": 8}),
    ("layers_per_stage", {"pipeline_stage": 16}, {}, "num_layers = 24 .* 16 x 1 = 16",
     {"pipeline_stage": 8}),
    ("layers_per_stage", {"pipeline_stage": 4, "pp_interleave_num": 4}, {}, "4 x 4 = 16",
     {"pipeline_stage": 4, "pp_interleave_num": 3}),
    ("layers_per_stage", {"pipeline_stage": 48}, {}, "num_layers = 24 must be at least .* 48, less 2",
     {"pipeline_stage": 24}),
    ("layers_per_stage", {"pipeline_stage": 27, "offset": "balanced"}, {}, "must be at least .* 27, less 2",
     {"pipeline_stage": 26, "offset": "balanced"}),
    ("layers_per_stage", {"pipeline_stage": 25}, {}, "must be a multiple of .* 25 with offset = even",
     {"pipeline_stage": 25, "offset": "balanced"}),
    ("layers_per_stage", {"pipeline_stage": 8, "offset": "balanced"}, {}, "the same as even",
     {"pipeline_stage": 5, "offset": "balanced"}),
    ("layers_per_stage", {"offset": "balanced"}, {}, "offset = balanced needs pipeline_stage > 1",
     {"pipeline_stage": 7, "offset": "balanced"}),
    ("layers_per_stage", {"pipeline_stage": 4, "offset": "0/1/1/0"}, {"shape": {"num_layers": 9}},
     "sum of offset = 0/1/1/0 must be .* num_layers = 9 by .* 4 x 1 = 4, which is 1, but it is 2",
     {"pipeline_stage": 4, "offset": "0/0/1/0"}),
    ("layers_per_stage", {"pipeline_stage": 5, "offset": "1/1/1/1"}, {},
     "one number per stage, pipeline_stage = 5, but holds 4",
     {"pipeline_stage": 5, "offset": "1/1/1/1/0"}),
    ("layers_per_stage", {"pipeline_stage": 4, "pp_interleave_num": 2, "offset": "0/1/0/0"},
     {"shape": {"num_layers": 9}}, "one row per chunk, pp_interleave_num = 2, but holds 1",
     {"pipeline_stage": 4, "pp_interleave_num": 2, "offset": "0/1/0/0+0/0/0/0"}),
    ("layers_per_stage", {"pipeline_stage": 4, "offset": "0/-2/2/0"}, {"shape": {"num_layers": 8}},
     r"must leave every stage and chunk a layer .* but they have \[2, 0, 4, 2\]",
     {"pipeline_stage": 4, "offset": "-2/1/1/0"}),
    ("micro_batches_fill_pipeline", {"pipeline_stage": 8}, {},
     "micro_batch_num = 4 must be at least pipeline_stage = 8",
     {"pipeline_stage": 4}),
    ("interleave_needs_pipeline", {"pp_interleave_num": 2}, {}, "needs pipeline_stage > 1",
     {"pp_interleave_num": 2, "pipeline_stage": 2}),
    ("interleave_needs_pipeline",
     {"pp_interleave_num": 2, "pipeline_stage": 3, "data_parallel": 4, "micro_batch_size": 2}, {},
     "micro_batch_num = 8 must be a multiple of pipeline_stage = 3",
     {"pp_interleave_num": 2, "pipeline_stage": 4, "data_parallel": 4, "micro_batch_size": 2}),
    ("micro_batches_per_stage", {"pipeline_stage": 2},
     {"limits": {"min_micro_batches_per_stage": 4}},
     "micro_batch_num = 4 is below 4 x pipeline_stage = 8",
     {"pipeline_stage": 2, "data_parallel": 8}),
    ("max_micro_batches_per_stage", {"pipeline_stage": 2, "data_parallel": 1},
     {"limits": {"max_micro_batches_per_stage": 8}},
     "micro_batch_num = 64 is above 8 x pipeline_stage = 16",
     {"pipeline_stage": 2, "data_parallel": 4}),
    ("max_pipeline_bubble", {"pipeline_stage": 4}, {"limits": {"max_pipeline_bubble": 0.3}},
     r"0\.429 of the step is above 0\.3", {"pipeline_stage": 4, "pp_interleave_num": 2,
                                                  "data_parallel": 8}),
    ("sequence_per_context_rank", {"context_parallel": 3}, {}, "seq_length = 1024 .* 3",
     {"context_parallel": 4}),
    ("sequence_parallel_needs_tensor_parallel", {"use_seq_parallel": True}, {},
     "needs model_parallel > 1", {"use_seq_parallel": True, "model_parallel": 2}),
    ("sequence_parallel_needs_tensor_parallel", {"use_seq_parallel": True, "model_parallel": 3},
     {}, "seq_length = 1024 .* = 3", {"use_seq_parallel": False, "model_parallel": 3}),
    ("experts_inside_data_parallel", {"expert_parallel": 2}, {}, "needs a model with experts",
     {"expert_parallel": 1}),
    ("experts_inside_data_parallel", {"expert_parallel": 8, "data_parallel": 4}, {"model": MOE},
     "must divide data_parallel = 4", {"expert_parallel": 4, "data_parallel": 4}),
    ("experts_inside_data_parallel", {"expert_parallel": 16}, {"model": MOE},
     "num_experts = 8 .* 16", {"expert_parallel": 8}),
    ("experts_inside_data_parallel", {"expert_parallel": 3, "data_parallel": 8},
     {"limits": {"framework": "mindformers"}, "model": MOE},
     "must divide data_parallel x model_parallel = 8 x 1 in MindFormers",
     {"expert_parallel": 4, "data_parallel": 1, "model_parallel": 4, "use_seq_parallel": True}),
    ("context_needs_flash_attention", {"context_parallel": 2},
     {"limits": {"framework": "mindformers"}, "shape": {"flash_attention": False}},
     "context_parallel = 2 needs flash attention", {"context_parallel": 1}),
    ("experts_need_sequence_parallel", {"model_parallel": 2},
     {"limits": {"framework": "mindformers"}, "model": MOE},
     "model_parallel = 2 with num_experts = 8 needs use_seq_parallel",
     {"model_parallel": 2, "use_seq_parallel": True}),
    ("recompute_interval", {"recompute": "interval:25"}, {}, "num_layers = 24: it would repeat none",
     {"recompute": "interval:24"}),
    ("max_recompute_share", {"recompute": "full"}, {"limits": {"max_recompute_share": 0.1}},
     r"recompute = full takes 0\.2\d\d .* more than 0\.1", {"recompute": "interval:4"}),
    ("recompute_per_stage", {"recompute": "layers:2/1/0/1"}, {},
     "one number per stage, pipeline_stage = 1, but holds 4",
     {"recompute": "layers:2/1/0/1", "pipeline_stage": 4}),
    ("recompute_per_stage", {"recompute": "layers:7/1/0/1", "pipeline_stage": 4}, {},
     "repeats 7 layers on stage 0, which has 6",
     {"recompute": "layers:6/1/0/1", "pipeline_stage": 4}),
    ("recompute_per_stage", {"recompute": "selective:6/6/6/6", "pipeline_stage": 4}, {},
     "every layer: the same as selective", {"recompute": "selective:6/6/6/5", "pipeline_stage": 4}),
    ("recompute_per_stage",
     {"recompute": "layers:1/1+4/0", "pipeline_stage": 2, "pp_interleave_num": 8}, {},
     "one row per chunk, pp_interleave_num = 8, but holds 2",
     {"recompute": "layers:4/0", "pipeline_stage": 2, "pp_interleave_num": 8}),
    ("recompute_per_stage",
     {"recompute": "layers:1/1+7/0", "pipeline_stage": 2, "pp_interleave_num": 2}, {},
     "7 layers on stage 0, chunk 1, which has 6",
     {"recompute": "layers:1/1+6/0", "pipeline_stage": 2, "pp_interleave_num": 2}),
    ("recompute_per_stage",
     {"recompute": "layers:1/6/0/0", "pipeline_stage": 4, "offset": "0/0/1/0"},
     {"shape": {"num_layers": 21}}, "repeats 6 layers on stage 1, which has 5",
     {"recompute": "layers:1/0/6/0", "pipeline_stage": 4, "offset": "0/0/1/0"}),
    ("sharding_needs_data_parallel", {"optimizer_sharding": "gradient", "data_parallel": 1}, {},
     "optimizer_sharding = gradient .* data_parallel = 1", {"optimizer_sharding": "gradient"}),
    ("sharding_needs_data_parallel", {"optimizer_sharding": "parameter", "data_parallel": 1}, {},
     "and context_parallel = 1", {"optimizer_sharding": "parameter", "data_parallel": 1,
                                  "context_parallel": 2}),
    ("compression_method", {"gradient_compression": "int8"}, {}, "int8 cannot be run: summing",
     {"gradient_compression": "topk:0.1"}),
    ("compression_method", {"gradient_compression": "powersgd:4"}, {}, "powersgd:4 cannot be run",
     {"gradient_compression": "float16"}),
    ("compression_needs_replicas", {"gradient_compression": "float16", "data_parallel": 1}, {},
     "needs gradients to exchange", {"gradient_compression": "float16"}),
    ("compression_needs_replicas", {"gradient_compression": "float16", "pipeline_stage": 2}, {},
     "needs pipeline_stage = 1, but it is 2",
     {"gradient_compression": "float16", "model_parallel": 2}),
    ("compression_needs_replicas", {"gradient_compression": "topk:0.1",
                                    "optimizer_sharding": "optimizer"}, {},
     "needs optimizer_sharding = none", {"optimizer_sharding": "optimizer"}),
    ("exchange_needs_data_parallel", {"comm_overlap": True, "data_parallel": 1}, {},
     "comm_overlap = true has no effect", {"comm_overlap": True}),
    ("exchange_needs_data_parallel", {"comm_fusion": 8, "data_parallel": 1}, {},
     "comm_fusion = 8 has no effect", {"comm_fusion": 8}),
    ("exchange_needs_data_parallel", {"comm_overlap": True, "data_parallel": 1}, {},
     "comm_overlap = true has no effect", {"comm_overlap": True, "data_parallel": 1,
                                           "context_parallel": 2}),
    ("offload_needs_device", {"optimizer_offload": True}, {"cluster": {"device": "cpu"}},
     "memory is the host's", {"optimizer_offload": False}),
    ("memory", {"micro_batch_size": 64},
     {"limits": {"memory_utilization": 0.5}}, r"GB must be at most .* = 0\.5 x 32\.0GB",
     {"micro_batch_size": 1}),
    ("memory", {"micro_batch_size": 64}, {"limits": {"memory_utilization": 0.9, "max_memory": 2**34}},
     r"must be at most constraints\.max_memory = 16\.0GB", {"micro_batch_size": 1}),
    ("memory", {"micro_batch_size": 64},
     {"limits": {"max_memory": 2**34}, "cluster": {"device_memory": None}}, "max_memory = 16.0GB",
     {"micro_batch_size": 1}),
    ("memory_used", {"micro_batch_size": 1},
     {"limits": {"min_memory_utilization": 0.7}}, r"must be at least min_memory_util.* = 0\.7 x 32\.0GB",
     {"micro_batch_size": 8}),
    ("compression_pays", {"gradient_compression": "topk:0.5"},
     {"limits": {"min_compression": 1.5}}, r"topk:0\.5 saves 1x of the bytes: less than 1\.5x",
     {"gradient_compression": "float16"}),
    ("overlap_headroom", {"comm_overlap": True, "micro_batch_size": 16},
     {"limits": {"min_overlap_headroom": 0.5}}, r"wants 50% of the memory free .* of 32\.0GB are predicted",
     {"comm_overlap": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bad", "changes", "text", "good"), CASES)
def test_rule_rejects_with_its_numbers_and_lets_the_neighbour_pass(name, bad, changes, text, good):
    import re

    given_facts = facts(**dict(changes))
    found = reason(name, complete(**bad), given_facts)
    assert found is not None
    assert re.search(text, found), found
    assert reason(name, complete(**good), given_facts) is None


def test_every_rule_has_a_case():
    assert {case[0] for case in CASES} == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_rules_of_a_framework_hold_for_its_programs_alone():
    """Other programs ran with fewer micro-batches than stages, and compress by themselves."""
    moe_without_flash = {"model": MOE, "shape": {"flash_attention": False}}
    cases = [
        ("micro_batches_fill_pipeline", {"pipeline_stage": 8}, {"mindspore", "mindformers"}),
        ("interleave_needs_pipeline", {"pp_interleave_num": 2, "pipeline_stage": 3},
         {"mindspore", "mindformers"}),
        ("interleave_needs_pipeline", {"pp_interleave_num": 2}, {"mindspore", "mindformers", "other"}),
        ("kv_heads_divisible", {"model_parallel": 16}, {"mindspore", "mindformers"}),
        ("kv_heads_divisible", {"model_parallel": 12}, {"mindspore", "mindformers", "other"}),
        ("compression_method", {"gradient_compression": "powersgd:4"}, {"mindspore", "mindformers"}),
        ("compression_needs_replicas", {"gradient_compression": "float16", "pipeline_stage": 2},
         {"mindspore", "mindformers"}),
        ("compression_needs_replicas", {"gradient_compression": "float16", "data_parallel": 1},
         {"mindspore", "mindformers", "other"}),
        ("context_needs_flash_attention", {"context_parallel": 2}, {"mindformers"}),
        ("experts_need_sequence_parallel", {"model_parallel": 2}, {"mindformers"}),
    ]  # fmt: skip
    for name, knobs, rejecting in cases:
        for framework in ("mindspore", "mindformers", "other"):
            given_facts = facts(**moe_without_flash, limits={"framework": framework})
            found = reason(name, complete(**knobs), given_facts)
            assert (found is not None) == (framework in rejecting), (name, framework)


def test_mindformers_splits_no_expert_over_tensor_ranks():
    """Each rank of a tensor group has whole experts (`FFNGroupedGEMM.shard`), of any width."""
    config = complete(model_parallel=8, use_seq_parallel=True)
    for framework, rejects in (("mindspore", True), ("other", True), ("mindformers", False)):
        given_facts = facts(model=MOE, shape={"moe_intermediate_size": 100},
                            limits={"framework": framework})  # fmt: skip
        assert (reason("intermediate_divisible", config, given_facts) is not None) is rejects
    dense = facts(shape={"intermediate_size": 4092}, limits={"framework": "mindformers"})
    assert "intermediate_size = 4092" in reason("intermediate_divisible", config, dense)


def test_unset_limits_reject_nothing():
    deep = complete(pipeline_stage=4, recompute="full", model_parallel=16)
    for soft in ADVICE:
        assert reason(soft.name, deep) is None, soft.name


def test_every_piece_of_advice_is_a_rule_too_and_speaks_once():
    """Where the user sets its limit, it rejects with that number and is no advice any more."""
    deep = complete(pipeline_stage=8, recompute="full", model_parallel=16, data_parallel=2,
                    micro_batch_size=16, comm_overlap=True, gradient_compression="topk:0.5")  # fmt: skip
    odd = {"shape": {"vocab_size": 50257, "num_layers": 96}, "cluster": {"device_memory": 2**30}}
    soft_only = CostModel(facts(**odd))
    speaking = [soft.name for soft in ADVICE if soft.advise(deep, soft_only)]
    assert len(speaking) == len(ADVICE) - 1 == len(advice(deep, soft_only))
    for soft in ADVICE:
        boolean = isinstance(getattr(Limits(), soft.limit), bool)
        set_facts = facts(**odd, limits={soft.limit: True if boolean else soft.default})
        assert (reason(soft.name, deep, set_facts) is not None) == (soft.name in speaking)
        assert soft.advise(deep, CostModel(set_facts)) is None


def test_every_check_that_is_written_is_asked():
    """A public tuner wrote a rule that it never registered."""
    import mindtune.search.pipeline_rules as pipeline
    import mindtune.search.rules as general

    asked = {rule.check for rule in RULES}
    for module in (general, pipeline):
        for name, entry in vars(module).items():
            takes = getattr(entry, "__annotations__", {})
            if takes.get("config") == "Config" and "cost" in "".join(takes):
                assert entry in asked, name


def test_without_a_model_or_device_memory_nothing_is_known_and_nothing_rejected():
    unknown = facts(model=None)
    for name in ("heads_divisible", "layers_per_stage", "recompute_interval", "memory",
                 "sequence_per_context_rank"):  # fmt: skip
        assert reason(name, complete(model_parallel=7, recompute="interval:99"), unknown) is None
    assert CostModel(unknown).memory_bytes(complete()) is None
    without = facts(cluster={"device_memory": None})
    assert reason("memory", complete(micro_batch_size=4096), without) is None


def test_an_unknown_optimizer_leaves_memory_unknown():
    odd = facts(training={"optimizer": "mystery"})
    assert reason("memory", complete(micro_batch_size=4096), odd) is None


KNOB_VALUES = st.fixed_dictionaries(
    {
        "data_parallel": st.sampled_from([1, 2, 4, 8, 16]),
        "model_parallel": st.sampled_from([1, 2, 3, 8]),
        "pipeline_stage": st.sampled_from([1, 2, 4]),
        "context_parallel": st.sampled_from([1, 2, 3]),
        "expert_parallel": st.sampled_from([1, 2]),
        "pp_interleave_num": st.sampled_from([1, 2]),
        "micro_batch_size": st.sampled_from([1, 2, 3]),
        "recompute": st.sampled_from(
            ["none", "selective", "interval:30", "full", "layers:2/1", "selective:1/0/9/2"]
        ),
        "offset": st.sampled_from(["even", "balanced", "0/1", "1/0+0/0"]),
        "optimizer_sharding": st.sampled_from(["none", "optimizer", "parameter"]),
        "gradient_compression": st.sampled_from(["none", "int8", "topk:0.1"]),
        "use_seq_parallel": st.booleans(),
        "comm_overlap": st.booleans(),
    }
)


class Recorder(dict):
    """A config that remembers what was read."""

    def __init__(self, *args):
        super().__init__(*args)
        self.read = set()

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)


@given(KNOB_VALUES, st.sampled_from([MODEL, MOE, None]))
@settings(max_examples=150, deadline=None)
def test_a_rule_reads_the_knobs_that_it_declares_and_no_other(knobs, model):
    limits = {"max_pipeline_bubble": 0.1, "max_recompute_share": 0.1, "min_compression": 3,
              "min_micro_batches_per_stage": 2, "max_micro_batches_per_stage": 4,
              "min_overlap_headroom": 0.9, "vocab_divisible": True,
              "tensor_parallel_inside_node": True}  # fmt: skip
    given_facts = facts(model=model, limits=limits)
    for rule in RULES:
        config = Recorder(complete(**knobs))
        rule.check(config, CostModel(given_facts))
        assert config.read <= set(rule.reads), rule.name


@given(KNOB_VALUES)
@settings(max_examples=100, deadline=None)
def test_the_formulas_read_the_knobs_of_their_cache_and_no_other(knobs):
    from mindtune.search.memory_model import memory_parts
    from mindtune.search.time_model import time_parts

    config = Recorder(complete(**knobs))
    memory_parts(config, FACTS)
    time_parts(config, FACTS)
    assert config.read <= set(COST_KNOBS)


SPOKEN = [
    ({"model_parallel": 16}, "16 does not divide devices_per_node = 8", {"model_parallel": 8}),
    ({"model_parallel": 16}, "vocab_size = 1032 is no multiple of model_parallel = 16: pad it to 2048",
     {"model_parallel": 8}),
    ({"pipeline_stage": 2}, "micro_batch_num = 4 is below 4 x pipeline_stage = 8",
     {"pipeline_stage": 2, "data_parallel": 8}),
    ({"pipeline_stage": 2, "data_parallel": 2}, "micro_batch_num = 32 is above 8 x pipeline_stage = 16",
     {"pipeline_stage": 2, "data_parallel": 4}),
    ({"pipeline_stage": 4}, "pipeline bubble = 0.429", {"pipeline_stage": 2, "data_parallel": 4}),
    ({"recompute": "full"}, "recompute = full takes 0.24", {"recompute": "interval:2"}),
    ({"comm_overlap": True, "micro_batch_size": 48}, "comm_overlap wants 15% of the memory free",
     {"comm_overlap": True}),
    ({"gradient_compression": "topk:0.5"}, "topk:0.5 saves 1x of the bytes",
     {"gradient_compression": "topk:0.25"}),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "text", "good"), SPOKEN)
def test_advice_speaks_and_is_silent(bad, text, good):
    large = facts(shape={"vocab_size": 1032}, cluster={"device_memory": 24 * 2**30})
    spoken = advice(complete(**bad), CostModel(large))
    assert any(text in line for line in spoken), spoken
    assert not any(text[:20] in line for line in advice(complete(**good), CostModel(large)))
