"""Every rule has a config that it rejects, with its numbers, and a neighbour that it lets pass."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindtune.search.advice import advice
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
     {"model": MOE, "shape": {"moe_intermediate_size": 100}}, "intermediate_size = 100 .* 8",
     {"model_parallel": 4}),
    ("vocab_divisible", {"model_parallel": 2}, {"shape": {"vocab_size": 50257}},
     "vocab_size = 50257 .* 2", {"model_parallel": 1}),
    ("tensor_parallel_inside_node", {"model_parallel": 16},
     {"limits": {"tensor_parallel_inside_node": True}}, "16 must divide devices_per_node = 8",
     {"model_parallel": 8}),
    ("layers_per_stage", {"pipeline_stage": 16}, {}, "num_layers = 24 .* 16 x 1 = 16",
     {"pipeline_stage": 8}),
    ("layers_per_stage", {"pipeline_stage": 4, "pp_interleave_num": 4}, {}, "4 x 4 = 16",
     {"pipeline_stage": 4, "pp_interleave_num": 3}),
    ("layers_per_stage", {"pipeline_stage": 48}, {}, "num_layers = 24 .* 48",
     {"pipeline_stage": 24}),
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
     {"limits": {"min_micro_batches_per_stage": 4}}, "micro_batch_num = 4 .* 4 x 2 = 8",
     {"pipeline_stage": 2, "data_parallel": 8}),
    ("max_pipeline_bubble", {"pipeline_stage": 4}, {"limits": {"max_pipeline_bubble": 0.3}},
     r"0\.429 of the step must be at most 0\.3", {"pipeline_stage": 4, "pp_interleave_num": 2,
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
    ("recompute_interval", {"recompute": "interval:25"}, {}, "num_layers = 24: it would repeat none",
     {"recompute": "interval:24"}),
    ("max_recompute_share", {"recompute": "full"}, {"limits": {"max_recompute_share": 0.1}},
     r"recompute share = 0\.2\d\d .* at most 0\.1", {"recompute": "interval:4"}),
    ("sharding_needs_data_parallel", {"optimizer_sharding": "gradient", "data_parallel": 1}, {},
     "optimizer_sharding = gradient .* data_parallel = 1", {"optimizer_sharding": "gradient"}),
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
    ("offload_needs_device", {"optimizer_offload": True}, {"cluster": {"device": "cpu"}},
     "memory is the host's", {"optimizer_offload": False}),
    ("memory", {"micro_batch_size": 64},
     {"limits": {"memory_utilization": 0.5}}, r"GB must be at most .* = 0\.5 x 32\.0GB",
     {"micro_batch_size": 1}),
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


def test_unset_limits_reject_nothing():
    deep = complete(pipeline_stage=4, recompute="full", model_parallel=16)
    for name in ("max_pipeline_bubble", "max_recompute_share", "micro_batches_per_stage",
                 "tensor_parallel_inside_node"):  # fmt: skip
        assert reason(name, deep) is None


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
        "recompute": st.sampled_from(["none", "selective", "interval:30", "full"]),
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
    limits = {"max_pipeline_bubble": 0.1, "max_recompute_share": 0.1,
              "min_micro_batches_per_stage": 2, "tensor_parallel_inside_node": True}  # fmt: skip
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


ADVICE = [
    ({"model_parallel": 16}, "spans nodes of 8 devices", {"model_parallel": 8}),
    ({"pipeline_stage": 2}, "micro_batch_num = 4 is below 4 x pipeline_stage = 8",
     {"pipeline_stage": 2, "data_parallel": 8}),
    ({"pipeline_stage": 4}, "pipeline bubble = 0.43", {"pipeline_stage": 2, "data_parallel": 4}),
    ({"recompute": "full"}, "recompute = full adds 0.3", {"recompute": "interval:2"}),
    ({"comm_overlap": True, "micro_batch_size": 48}, "comm_overlap wants 15% of the memory free",
     {"comm_overlap": True}),
    ({"gradient_compression": "topk:0.5"}, "topk:0.5 sends 1 of the bytes",
     {"gradient_compression": "topk:0.25"}),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "text", "good"), ADVICE)
def test_advice_speaks_and_is_silent(bad, text, good):
    large = facts(shape={"vocab_size": 1024}, cluster={"device_memory": 24 * 2**30})
    assert any(text in line for line in advice(complete(**bad), CostModel(large)))
    assert not any(text[:20] in line for line in advice(complete(**good), CostModel(large)))
