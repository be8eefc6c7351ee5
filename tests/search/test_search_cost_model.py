"""Memory and time formulas against counts by hand, their directions, and calibration."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindtune.search.cost_model import CostModel, Measurement, calibrate
from mindtune.search.facts import Cluster, Limits, StudyFacts, Training
from mindtune.search.knobs import KNOBS
from mindtune.search.memory_model import MemoryRates, memory_parts, stage_memory
from mindtune.search.model_shape import ModelShape
from mindtune.search.program import Program
from mindtune.search.space import Space
from mindtune.search.time_model import TimeRates, time_parts

MODEL = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, intermediate_size=14336,
    gated_mlp=True, vocab_size=128256, seq_length=4096, flash_attention=True,
)  # fmt: skip
CLUSTER = Cluster(
    num_devices=64, devices_per_node=8, device="npu", device_memory=64 * 2**30, peak_flops=3e14,
    intra_node_bandwidth=2e11, inter_node_bandwidth=2.5e10,
)  # fmt: skip
FACTS = StudyFacts(
    cluster=CLUSTER, training=Training(global_batch_size=64, precision="bfloat16"), model=MODEL
)
P = 8_030_261_248


def complete(**knobs):
    base = {k.name: k.default for k in KNOBS.values() if k.default is not None}
    return {**base, **knobs}


def test_states_of_half_precision_adam_are_18_bytes_a_parameter_and_16_in_float32():
    half = memory_parts(complete(), FACTS)
    assert (half.weights, half.gradients, half.optimizer) == (2 * P, 4 * P, 12 * P)
    assert half.static == 18 * P
    full = memory_parts(complete(precision="float32"), FACTS)
    assert (full.weights, full.gradients, full.optimizer) == (4 * P, 4 * P, 8 * P)
    momentum = dataclasses.replace(
        FACTS, training=Training(global_batch_size=64, optimizer="Momentum")
    )
    assert memory_parts(complete(), momentum).optimizer == 4 * P


@pytest.mark.parametrize(
    ("optimizer", "framework", "held"),
    [("SGD", "mindspore", 8), ("sgd", "mindformers", 8), ("SGD", "other", 0),
     ("Momentum", "mindspore", 4), ("adamw", "other", 8)],
)  # fmt: skip
def test_mindspores_sgd_keeps_two_tensors_per_parameter_whatever_its_momentum(
    optimizer, framework, held
):
    training = Training(global_batch_size=64, optimizer=optimizer)
    facts = dataclasses.replace(FACTS, training=training, limits=Limits(framework=framework))
    assert memory_parts(complete(), facts).optimizer == held * P


@pytest.mark.parametrize(
    ("sharding", "bytes_per_parameter"),
    [("none", 18), ("optimizer", 6 + 12 / 8), ("gradient", 2 + 16 / 8), ("parameter", 18 / 8)],
)
def test_sharding_spreads_states_over_the_data_parallel_ranks(sharding, bytes_per_parameter):
    parts = memory_parts(complete(data_parallel=8, optimizer_sharding=sharding), FACTS)
    assert parts.static == pytest.approx(bytes_per_parameter * P)


def test_offload_leaves_no_optimizer_state_and_topk_adds_a_residual():
    assert memory_parts(complete(optimizer_offload=True), FACTS).optimizer == 0
    topk = memory_parts(complete(data_parallel=2, gradient_compression="topk:0.1"), FACTS)
    assert topk.residual == 4 * P


def test_activations_of_a_gpt_layer_are_the_published_34_sbh():
    # Korthikanti et al.: 34 sbh without attention scores at tp = 1, of which dropout masks
    # (2 sbh) and this count's shared 10 sbh are a part.
    gpt = ModelShape(num_layers=1, hidden_size=1024, num_heads=16, intermediate_size=4096,
                     vocab_size=32, seq_length=2048, flash_attention=True)  # fmt: skip
    facts = dataclasses.replace(FACTS, model=gpt)
    parts = memory_parts(complete(micro_batch_size=3), facts)
    assert parts.activations == 34 * 2048 * 3 * 1024
    with_scores = dataclasses.replace(facts, model=dataclasses.replace(gpt, flash_attention=False))
    more = memory_parts(complete(micro_batch_size=3), with_scores).activations
    assert more - parts.activations == 5 * 16 * 2048 * 2048 * 3
    spread = memory_parts(complete(model_parallel=4, use_seq_parallel=True), facts)
    assert spread.activations == 34 * 2048 * 1024 / 4


def test_the_first_stage_of_1f1b_holds_as_many_micro_batches_as_there_are_stages():
    one = dataclasses.replace(
        FACTS,
        model=dataclasses.replace(MODEL, vocab_size=64),
    )
    single = memory_parts(complete(), one).activations
    piped = memory_parts(complete(pipeline_stage=4), one).activations
    assert piped == pytest.approx(single)  # a quarter of the layers, four micro-batches
    chunks = memory_parts(complete(pipeline_stage=4, pp_interleave_num=2), one).activations
    assert chunks == pytest.approx(single * (1 + 3 / 8))


def test_selective_recompute_saves_nothing_where_attention_is_fused():
    none, selective, full = (
        memory_parts(complete(recompute=r), FACTS).activations
        for r in ("none", "selective", "full")
    )
    assert selective == none
    assert full < none / 5


@given(
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "optimizer", "gradient", "parameter"]),
)  # fmt: skip
@settings(deadline=None)
def test_states_never_fall_below_the_whole_over_all_ranks(replicas, tensor, stages, sharding):
    parts = memory_parts(
        complete(data_parallel=replicas, model_parallel=tensor, pipeline_stage=stages,
                 optimizer_sharding=sharding),
        FACTS,
    )  # fmt: skip
    assert parts.static >= 18 * (P - 2 * 128256 * 4096) / (replicas * tensor * stages) * 0.999


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from(["none", "full"]))
@settings(deadline=None)
def test_memory_is_linear_in_the_micro_batch(tensor, stages, recompute):
    def total(size):
        # A batch with more micro-batches than stages at every size.
        parts = memory_parts(
            complete(micro_batch_size=size, model_parallel=tensor, pipeline_stage=stages,
                     recompute=recompute),
            FACTS,
        )  # fmt: skip
        return parts.total(MemoryRates())

    assert total(4) - total(2) == pytest.approx(2 * (total(2) - total(1)))


def test_gated_mlps_keep_four_tensors_and_context_parallel_ranks_a_share_each():
    layer = dataclasses.replace(
        FACTS, model=dataclasses.replace(MODEL, num_layers=1, vocab_size=64)
    )
    # Norms and inputs 10 h, queries and output 4 h, keys and values of 8 of 32 heads h, 8 m.
    expected = 4096 * (10 * 4096 + 4 * 4096 + 4 * 1024 + 8 * 14336)
    assert memory_parts(complete(), layer).activations == expected
    split = memory_parts(complete(context_parallel=4), layer)
    assert (split.activations, split.logits) == (expected / 4, 1024 * 64 * (2 + 4))
    # ZeRO spreads over context parallel ranks too: they hold the same weights.
    sharded = memory_parts(
        complete(data_parallel=2, context_parallel=4, optimizer_sharding="optimizer"), FACTS
    )
    assert sharded.optimizer == pytest.approx(12 * P / 8)


def test_interleaved_stages_hold_the_chunks_that_are_warmed_up():
    facts = dataclasses.replace(FACTS, model=dataclasses.replace(MODEL, vocab_size=64))

    def held(**knobs):
        stages = stage_memory(complete(pipeline_stage=4, **knobs), facts)
        one = memory_parts(complete(), facts).activations
        return [stage.activations / (one / 4) for stage in stages]

    assert held() == pytest.approx([4, 1])  # first and last
    # 2 (p - i - 1) + (v - 1) p + 1 chunks of a half each: 11 and 5.
    assert held(pp_interleave_num=2) == pytest.approx([5.5, 2.5])
    # No more than there are.
    assert held(micro_batch_size=32) == pytest.approx([2 * 32, 32])


def test_lists_per_stage_decide_which_stage_is_the_worst():
    facts = dataclasses.replace(FACTS, model=dataclasses.replace(MODEL, vocab_size=64))
    stages = stage_memory(complete(pipeline_stage=4, recompute="layers:8/0/0/0"), facts)
    assert len(stages) == 4
    inputs = 8 * 2 * 4096 * 4096
    one = memory_parts(complete(), facts).activations / 32
    # The repeated stage keeps its layers' inputs, and the layer at work.
    assert stages[0].activations == pytest.approx(4 * inputs + one)
    assert stages[1].activations == pytest.approx(3 * 8 * one)
    config = complete(pipeline_stage=4, recompute="layers:8/0/0/0")
    assert memory_parts(config, facts) == stages[1]
    moved = stage_memory(complete(pipeline_stage=4, offset="-1/0/0/1"), facts)
    assert [round(stage.activations / one) for stage in moved] == [28, 24, 16, 9]
    assert stage_memory(complete(pipeline_stage=4, offset="0/1"), facts) is None
    assert time_parts(complete(pipeline_stage=4, offset="0/1"), facts) is None


def test_selective_recompute_makes_scores_again_where_they_are_stored():
    gpt = ModelShape(num_layers=4, hidden_size=1024, num_heads=16, intermediate_size=4096,
                     vocab_size=32, seq_length=2048)  # fmt: skip
    facts = dataclasses.replace(FACTS, model=gpt)
    plain, scores = 34 * 2048 * 1024, 5 * 16 * 2048 * 2048
    assert memory_parts(complete(), facts).activations == 4 * (plain + scores)
    selective = memory_parts(complete(recompute="selective"), facts)
    assert selective.activations == 4 * plain + scores


def test_buffers_fixed_memory_and_what_sequence_parallelism_gathers():
    assert memory_parts(complete(), FACTS).buffers == 0
    assert memory_parts(complete(data_parallel=2), FACTS).buffers == 0.5 * P
    sharded = memory_parts(complete(data_parallel=2, optimizer_sharding="parameter"), FACTS)
    # Two layers whole, the embedding being the largest: weights and gradients.
    assert sharded.buffers == 2 * (2 + 2) * 128256 * 4096
    assert memory_parts(complete(), FACTS).fixed == pytest.approx(0.0025 * 64 * 2**30)
    unknown = dataclasses.replace(FACTS, cluster=Cluster(num_devices=64))
    assert memory_parts(complete(), unknown).fixed == 0
    split = memory_parts(complete(model_parallel=2, use_seq_parallel=True), FACTS)
    assert split.gathered == 32 * 2 * 2 * 4096 * 4096
    assert memory_parts(complete(model_parallel=2), FACTS).gathered == 0


def test_a_program_may_keep_other_gradients():
    kept = dataclasses.replace(FACTS, program=Program(gradient_bytes=6.0))
    assert memory_parts(complete(), kept).gradients == 6 * P
    assert memory_parts(complete(precision="float32"), kept).gradients == 4 * P


@given(
    st.sampled_from(["data_parallel", "model_parallel", "pipeline_stage", "context_parallel"]),
    st.sampled_from(["none", "optimizer", "gradient", "parameter"]),
)
@settings(deadline=None)
def test_more_ranks_never_hold_more_states(degree, sharding):
    held = [
        memory_parts(complete(**{degree: ranks}, optimizer_sharding=sharding), FACTS).static
        for ranks in (1, 2, 4, 8)
    ]
    assert held == sorted(held, reverse=True)


LAYOUTS = st.fixed_dictionaries(
    {
        "data_parallel": st.sampled_from([1, 2, 4]),
        "model_parallel": st.sampled_from([1, 2, 4]),
        "pipeline_stage": st.sampled_from([1, 2, 4]),
        "micro_batch_size": st.sampled_from([1, 2, 4]),
    }
)


@given(LAYOUTS, st.booleans())
@settings(deadline=None)
def test_recomputation_never_holds_more_and_never_computes_less(knobs, fused):
    facts = dataclasses.replace(FACTS, model=dataclasses.replace(MODEL, flash_attention=fused))
    for less, more in (("full", "interval:2"), ("interval:2", "none"), ("selective", "none")):
        saving, plain = (complete(**knobs, recompute=kind) for kind in (less, more))
        held = [memory_parts(config, facts).total(MemoryRates()) for config in (saving, plain)]
        # The layer at work comes on top of what is saved, so a stage needs a few of them.
        assert held[0] <= held[1]
        times = [time_parts(config, facts).total(TimeRates()) for config in (saving, plain)]
        assert times[0] >= times[1]


@given(LAYOUTS)
@settings(deadline=None)
def test_better_links_and_peaks_never_slow_a_step_down(knobs):
    config = complete(**knobs)
    slow = time_parts(config, FACTS).total(TimeRates())
    for name in ("peak_flops", "intra_node_bandwidth", "inter_node_bandwidth"):
        cluster = dataclasses.replace(CLUSTER, **{name: 2 * getattr(CLUSTER, name)})
        faster = time_parts(config, dataclasses.replace(FACTS, cluster=cluster))
        assert 0 < faster.total(TimeRates()) <= slow


def test_experts_shard_by_their_own_degree():
    moe = dataclasses.replace(MODEL, num_experts=8, experts_per_token=2)
    facts = dataclasses.replace(FACTS, model=moe)
    whole = memory_parts(complete(data_parallel=8), facts)
    split = memory_parts(complete(data_parallel=8, expert_parallel=8), facts)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert whole.weights - split.weights == pytest.approx(2 * experts * 7 / 8)
    # ZeRO cannot spread an expert over ranks that hold another expert.
    sharded = memory_parts(
        complete(data_parallel=8, expert_parallel=8, optimizer_sharding="optimizer"), facts
    )
    assert sharded.optimizer == pytest.approx(
        12 * ((moe.num_parameters - experts) / 8 + experts / 8)
    )


def test_mindformers_experts_are_whole_and_lie_in_tensor_groups_too():
    model = dataclasses.replace(MODEL, num_experts=8, experts_per_token=2)
    experts = model.num_layers * model.expert_layer_parameters
    dense = model.num_parameters - experts
    held = {}
    for framework in ("mindspore", "mindformers"):
        facts = dataclasses.replace(FACTS, model=model, limits=Limits(framework=framework))
        config = complete(model_parallel=4, expert_parallel=4)
        held[framework] = memory_parts(config, facts).weights / 2
        # Two groups of ranks that hold the same experts share their states.
        shared = complete(data_parallel=2, model_parallel=4, expert_parallel=4,
                          optimizer_sharding="optimizer")  # fmt: skip
        states = memory_parts(shared, facts).optimizer / 12
        own = experts / 8 if framework == "mindformers" else experts / 4 / 4
        assert states == pytest.approx(dense / 4 / 2 + own, rel=1e-6), framework
    assert held["mindspore"] == pytest.approx((dense + experts / 4) / 4, rel=1e-6)
    assert held["mindformers"] == pytest.approx(dense / 4 + experts / 4, rel=1e-6)
    # A layer that parameter sharding holds whole has them whole, too.
    gathered = complete(data_parallel=2, model_parallel=4, expert_parallel=4,
                        optimizer_sharding="parameter")  # fmt: skip
    facts = dataclasses.replace(FACTS, model=model, limits=Limits(framework="mindformers"))
    layer = model.dense_layer_parameters / 4 + model.expert_layer_parameters / 4
    assert memory_parts(gathered, facts).buffers == pytest.approx(2 * (2 + 2) * layer)


def test_step_time_by_hand_on_one_device():
    one = dataclasses.replace(FACTS, cluster=dataclasses.replace(CLUSTER, num_devices=1))
    parts = time_parts(complete(), one)
    core = 3 * 32 * 4 * 4096 * 4096
    tokens = 64 * 4096
    # Fused attention computes the causal half of what MFU counts.
    assert parts.attention == pytest.approx(core / 2 * tokens / 3e14)
    assert parts.compute == pytest.approx((MODEL.step_flops(tokens) - core * tokens) / 3e14)
    assert parts.launch == pytest.approx(1e-3 * 32 * 64)
    # 10 h, 4 h, 4 kv and 6 m bytes per token and layer, at 1.5e12 bytes/s.
    moved = 2 * (10 * 4096 + 4 * 4096 + 4 * 1024 + 6 * 14336)
    assert parts.traffic == pytest.approx(32 * tokens * moved / 1.5e12)
    assert parts.optimizer == pytest.approx(32 * P / 1.5e12)
    exchanges = (
        parts.near_exchange, parts.far_exchange, parts.context, parts.pipeline, parts.expert,
        parts.message, parts.stall, parts.sharded_stall, parts.near_gradients,
        parts.far_gradients, parts.synchronization, parts.pipelined_synchronization,
    )  # fmt: skip
    assert exchanges == (0,) * 12
    rates = TimeRates(compute=2, attention=3, traffic=1, launch=1, optimizer=5, step=10)
    device = 2 * parts.compute + 3 * parts.attention + parts.traffic
    total = (device**4 + parts.launch**4) ** 0.25 + 5 * parts.optimizer + 0.2
    assert parts.total(rates) == pytest.approx(total)
    cost = CostModel(one, time_rates=rates)
    mfu = MODEL.step_flops(tokens) / (total * 3e14)
    assert cost.predict(complete()).mfu == pytest.approx(mfu)


def test_stored_scores_are_products_in_full_and_repeated_by_recompute():
    plain = dataclasses.replace(FACTS, model=dataclasses.replace(MODEL, flash_attention=False))
    fused = time_parts(complete(), FACTS)
    full = time_parts(complete(), plain)
    assert full.attention == 0
    assert full.compute == pytest.approx(fused.compute + 2 * fused.attention)
    again = time_parts(complete(recompute="selective"), plain)
    assert again.compute == pytest.approx(full.compute + 2 / 3 * fused.attention)
    repeated = time_parts(complete(recompute="full"), plain)
    head = MODEL.head_flops * 3 * 64 * 4096 / 3e14
    assert repeated.compute - head == pytest.approx(4 / 3 * (full.compute - head))
    assert repeated.launch == pytest.approx(4 / 3 * full.launch)


def test_small_micro_batches_pay_for_every_launch_and_tensor_parallel_ones_for_each_other():
    def parts(**knobs):
        return time_parts(complete(**knobs), FACTS)

    assert parts(micro_batch_size=4).launch == pytest.approx(parts().launch / 4)
    assert parts(model_parallel=2).synchronization == pytest.approx(5e-4 * 2 * 32 * 64)
    assert parts(model_parallel=8).synchronization == pytest.approx(5e-4 * 8 * 32 * 64)
    both = parts(model_parallel=2, pipeline_stage=2)
    assert both.synchronization == 0
    assert both.pipelined_synchronization == pytest.approx(5e-4 * 2 * 16 * 65)
    assert parts(pipeline_stage=2).launch == pytest.approx(parts().launch / 2 * 65 / 64)


def test_host_and_device_work_side_by_side():
    parts = time_parts(complete(), FACTS)
    rest = TimeRates().optimizer * parts.optimizer + TimeRates().step * parts.step
    idle = parts._replace(launch=0.0)
    busy = parts._replace(launch=100 * parts.total(TimeRates()))
    rates = TimeRates(launch=1.0)
    assert busy.total(rates) == pytest.approx(busy.launch + rest, rel=1e-3)
    assert idle.total(rates) < parts.total(rates) < 1.2 * idle.total(rates) + parts.launch


def test_a_pipeline_waits_by_the_published_bubble():
    small = dataclasses.replace(FACTS, model=dataclasses.replace(MODEL, vocab_size=64))

    def compute(**knobs):
        return time_parts(complete(micro_batch_size=4, **knobs), small).compute

    head = 3 * 2 * 4096 * 64 * 64 * 4096 / 3e14 / 16
    whole = compute() - 16 * head
    # 16 + (p - 1) / v rounds of a quarter of the layers; the output layer is one stage's.
    assert compute(pipeline_stage=4) == pytest.approx(19 * (whole / 64 + head))
    assert compute(pipeline_stage=4, pp_interleave_num=2) == pytest.approx(
        17.5 * (whole / 64 + head)
    )
    # The stage with most to do sets the pace.
    moved = compute(pipeline_stage=4, offset="2/0/0/-2")
    assert moved == pytest.approx(19 * whole / 16 * 10 / 32)


def test_exchanges_by_hand():
    def parts(**knobs):
        return time_parts(complete(**knobs), FACTS)

    near = parts(data_parallel=8).near_gradients
    assert near == pytest.approx(2 * 7 / 8 * 4 * P / 2e11)
    half = parts(data_parallel=8, gradient_compression="float16")
    assert half.near_gradients == pytest.approx(near / 2)
    assert half.optimizer == pytest.approx((32 + 12) * P / 1.5e12)
    eighth = parts(data_parallel=8, gradient_compression="int8")
    assert eighth.near_gradients == pytest.approx(near / 4)
    assert eighth.optimizer == pytest.approx((32 + 14) * P / 1.5e12)
    kept = parts(data_parallel=8, gradient_compression="topk:0.1")
    assert kept.near_gradients == pytest.approx(7 * 8 * 0.1 * P / 2e11)
    # Eight ranks of a node share its eight links to the others.
    across = parts(data_parallel=16)
    assert across.far_gradients == pytest.approx(2 * 15 / 16 * 4 * P / 8 / 2.5e10)
    assert across.near_gradients == 0
    hidden = parts(data_parallel=8, comm_overlap=True).near_gradients
    assert hidden == pytest.approx(0.3 * near)
    # Parameter sharding gathers half-precision weights twice in each of 8 micro-batches.
    gathered = parts(data_parallel=8, optimizer_sharding="parameter")
    assert gathered.near_gradients == pytest.approx(7 / 8 * P * (2 * 2 * 8 + 4) / 2e11)
    assert gathered.optimizer == pytest.approx(32 * P / 8 / 1.5e12)

    tensor = parts(model_parallel=4).near_exchange
    assert tensor == pytest.approx(4 * 32 * 2 * 3 / 4 * 64 * 4096 * 4096 * 2 / 2e11)
    assert parts(model_parallel=4, recompute="full").near_exchange == pytest.approx(1.5 * tensor)
    far = parts(model_parallel=16)
    assert far.near_exchange == 0
    assert far.far_exchange == pytest.approx(
        4 * 32 * 2 * 15 / 16 * 64 * 4096 * 4096 * 2 / 8 / 2.5e10
    )

    ring = parts(context_parallel=4, data_parallel=2).context
    assert ring == pytest.approx(3 * 2 * 3 * 1024 * 1024 * 2 * 32 * 32 / 2e11)
    stages = parts(pipeline_stage=4)
    assert stages.pipeline == pytest.approx(2 * 67 * 4096 * 4096 * 2 / 2e11)
    assert stages.message == pytest.approx(1e-3 * 67)
    assert stages.stall == 0
    shared = parts(pipeline_stage=4, data_parallel=2)
    assert shared.stall == pytest.approx(0.1 * 35 * 3 / 4)
    assert shared.sharded_stall == 0


def test_experts_are_reached_by_four_exchanges_a_layer():
    moe = dataclasses.replace(MODEL, num_experts=8, experts_per_token=2)
    facts = dataclasses.replace(FACTS, model=moe)
    parts = time_parts(complete(data_parallel=8, expert_parallel=8), facts)
    assert parts.expert == pytest.approx(4 * 32 * 7 / 8 * 8 * 2 * 4096 * 4096 * 2 / 2e11)
    assert time_parts(complete(data_parallel=8), facts).expert == 0
    # Of 32 ranks in four nodes each keeps 7 parts in its node and sends 24 over its own link.
    wide = time_parts(complete(data_parallel=32, expert_parallel=32), dataclasses.replace(
        facts, model=dataclasses.replace(moe, num_experts=32)
    ))  # fmt: skip
    part = 4 * 32 * 2 * 2 * 4096 * 4096 * 2 / 32
    assert wide.expert == pytest.approx(part * (7 / 2e11 + 24 / 2.5e10))


def test_ranks_that_share_experts_are_a_context_group_apart():
    moe = dataclasses.replace(MODEL, num_experts=8, experts_per_token=2)
    facts = dataclasses.replace(FACTS, model=moe)
    parts = time_parts(complete(data_parallel=8, context_parallel=2, expert_parallel=8), facts)
    # Every second device of two nodes of eight: 3 of the other ranks are near, 4 are far.
    part = 4 * 32 * 8 * 2 * 2048 * 4096 * 2 / 8
    assert parts.expert == pytest.approx(part * (3 / 2e11 + 4 / 2.5e10))


def test_mindformers_shares_experts_between_neighbours_so_that_one_node_needs_no_other():
    moe = dataclasses.replace(MODEL, num_experts=8, experts_per_token=2)
    facts = dataclasses.replace(
        FACTS, model=moe, limits=Limits(framework="mindformers"),
        cluster=dataclasses.replace(CLUSTER, num_devices=8, inter_node_bandwidth=None),
    )  # fmt: skip
    config = complete(model_parallel=8, expert_parallel=8, use_seq_parallel=True)
    part = 4 * 32 * 64 * 2 * (4096 / 8) * 4096 * 2 / 8
    assert time_parts(config, facts).expert == pytest.approx(part * 7 / 2e11)
    assert facts.cluster.is_timed
    assert CostModel(facts).step_time_s(config) is not None


def test_what_is_unknown_stays_unknown_and_orders_still_exist():
    no_peak = dataclasses.replace(FACTS, cluster=Cluster(num_devices=8))
    cost = CostModel(no_peak)
    prediction = cost.predict(complete(data_parallel=8))
    assert (prediction.step_time_s, prediction.mfu) == (None, None)
    assert cost.relative_cost(complete(recompute="full")) > cost.relative_cost(complete())
    no_links = dataclasses.replace(
        FACTS, cluster=dataclasses.replace(CLUSTER, intra_node_bandwidth=None)
    )
    assert CostModel(no_links).step_time_s(complete(data_parallel=8)) is None
    assert CostModel(no_links).step_time_s(complete()) is not None
    assert (
        CostModel(dataclasses.replace(FACTS, model=None)).predict(complete()).memory_bytes is None
    )


def test_relative_cost_never_mixes_seconds_and_flops():
    facts = dataclasses.replace(
        FACTS, cluster=dataclasses.replace(CLUSTER, intra_node_bandwidth=None)
    )
    cost = CostModel(facts)
    alone, pair = complete(), complete(data_parallel=2)
    assert cost.relative_cost(alone) == pytest.approx(2 * cost.relative_cost(pair))


def test_what_was_not_measured_is_no_evidence():
    cost = CostModel(FACTS)
    nothing = [Measurement(complete(), None, None), Measurement(complete(), math.nan, math.inf)]
    assert calibrate(cost, nothing) == cost


CONFIGS = [
    complete(data_parallel=8, micro_batch_size=size, recompute=recompute, optimizer_sharding=kind)
    for size in (1, 2, 4)
    for recompute in ("none", "full")
    for kind in ("none", "optimizer")
]


def measured(time_rates, memory_rates, configs):
    true = CostModel(FACTS, memory_rates=memory_rates, time_rates=time_rates)
    return [Measurement(c, true.memory_bytes(c), true.step_time_s(c)) for c in configs]


def test_calibration_recovers_planted_constants():
    time_rates = dataclasses.replace(TimeRates(), compute=2.4, launch=6.0)
    memory_rates = dataclasses.replace(MemoryRates(), activations=1.5)
    seen = measured(time_rates, memory_rates, CONFIGS)
    found = calibrate(CostModel(FACTS), seen)
    assert found.calibrated_by == 12
    for plain in CONFIGS:
        other = {**plain, "micro_batch_size": 8}
        expected = measured(time_rates, memory_rates, [other])[0]
        assert found.memory_bytes(other) == pytest.approx(expected.memory_bytes, rel=0.02)
        assert found.step_time_s(other) == pytest.approx(expected.step_time_s, rel=0.02)
    assert found.memory_rates.activations == pytest.approx(1.5, rel=0.03)
    # What does not occur is not learnt: one data-parallel node, no pipeline.
    assert found.time_rates.message == pytest.approx(TimeRates().message, rel=0.1)
    # Calibrating a calibrated model starts from the formulas again.
    assert calibrate(found, seen) == found


def test_three_measurements_are_enough_and_one_outlier_does_not_lead_astray():
    time_rates = dataclasses.replace(TimeRates(), compute=2.4)
    seen = measured(time_rates, MemoryRates(), CONFIGS[:3])
    found = calibrate(CostModel(FACTS), seen)
    expected = measured(time_rates, MemoryRates(), CONFIGS)
    errors = [abs(found.step_time_s(m.config) / m.step_time_s - 1) for m in expected]
    assert max(errors) < 0.15
    stalled = dataclasses.replace(expected[5], step_time_s=10 * expected[5].step_time_s)
    robust = calibrate(CostModel(FACTS), [*expected[:5], stalled, *expected[6:]])
    errors = [abs(robust.step_time_s(m.config) / m.step_time_s - 1) for m in expected]
    assert max(errors) < 0.1


@pytest.mark.parametrize("factor", [0.02, 0.3, 5.0, 100.0])
def test_a_machine_or_counting_that_the_formulas_do_not_know_is_followed(factor):
    cost = CostModel(FACTS)
    seen = [
        Measurement(c, factor * cost.memory_bytes(c), factor * cost.step_time_s(c))
        for c in CONFIGS[:1]
    ]
    found = calibrate(cost, seen)
    assert found.memory_bytes(CONFIGS[0]) == pytest.approx(seen[0].memory_bytes, rel=0.1)
    assert found.step_time_s(CONFIGS[0]) == pytest.approx(seen[0].step_time_s, rel=0.1)


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6))
@settings(deadline=None, max_examples=30)
def test_whatever_was_measured_predictions_stay_positive_and_finite(times):
    seen = [Measurement(c, 1e9 * t, t) for c, t in zip(CONFIGS, times, strict=False)]
    found = calibrate(CostModel(FACTS), seen)
    for config in CONFIGS:
        assert 0 < found.memory_bytes(config) < math.inf
        assert 0 < found.step_time_s(config) < math.inf


def test_without_a_known_speed_memory_alone_is_calibrated():
    no_peak = dataclasses.replace(FACTS, cluster=Cluster(num_devices=8))
    cost = CostModel(no_peak)
    found = calibrate(cost, [Measurement(c, 3.0 * cost.memory_bytes(c), 1.0) for c in CONFIGS])
    assert found.time_rates == TimeRates()
    assert found.memory_bytes(CONFIGS[0]) == pytest.approx(
        3 * cost.memory_bytes(CONFIGS[0]), rel=0.1
    )


def test_models_of_one_study_share_the_parts_and_not_the_rates():
    cost = CostModel(FACTS)
    first = cost.step_time_s(CONFIGS[0])
    found = calibrate(cost, [Measurement(CONFIGS[0], None, 5 * first)])
    assert found.time_parts(CONFIGS[0]) is cost.time_parts(CONFIGS[0])
    assert found.step_time_s(CONFIGS[0]) == pytest.approx(5 * first, rel=0.05)
    assert cost.step_time_s(CONFIGS[0]) == first


def test_parts_that_are_remembered_are_those_of_the_config_asked():
    """Memory is remembered without comm_overlap, time without optimizer_offload."""
    spec = {
        "data_parallel": [2, 4], "model_parallel": [1, 2], "micro_batch_size": [1, 2],
        "recompute": ["none", "selective", "full"], "optimizer_sharding": ["none", "optimizer"],
        "comm_overlap": [False, True], "optimizer_offload": [False, True],
        "precision": ["float32", "bfloat16"], "gradient_compression": ["none", "topk:0.1"],
    }  # fmt: skip
    facts = StudyFacts(
        cluster=Cluster(num_devices=8, devices_per_node=4, device_memory=2.0**35, peak_flops=3e14,
                        intra_node_bandwidth=1e11, inter_node_bandwidth=1e10, allow_idle=True),
        training=Training(global_batch_size=64), model=MODEL,
    )  # fmt: skip
    space = Space.from_spec(spec, facts)
    shared = CostModel(facts)
    for config in map(space.complete, space.configs()):
        assert shared.stage_parts(config) == stage_memory(config, facts)
        assert shared.time_parts(config) == time_parts(config, facts)


def host_and_devices(**changes):
    """Return the facts of four ranks' worth of a host, and of four devices of the same speed."""
    host = Cluster(
        num_devices=4, device="cpu", peak_flops=1e11, intra_node_bandwidth=1e9, allow_idle=True,
        **changes,
    )  # fmt: skip
    devices = dataclasses.replace(host, device="npu")
    return [dataclasses.replace(FACTS, cluster=one) for one in (host, devices)]


def test_fewer_ranks_of_a_host_have_more_of_its_cores():
    host, devices = host_and_devices()
    for degrees, cores in (({}, 4), ({"data_parallel": 2}, 2), ({"model_parallel": 4}, 1)):
        config = complete(precision="float32", **degrees)
        own, theirs = time_parts(config, host), time_parts(config, devices)
        assert own.compute == pytest.approx(theirs.compute / cores)
        assert own.attention == pytest.approx(theirs.attention / cores)
        assert own.work == pytest.approx(theirs.work / cores)
        # The order of configs must not need a peak.
        no_peak = dataclasses.replace(host, cluster=Cluster(num_devices=4, device="cpu"))
        assert time_parts(config, no_peak).work == own.work
    # Two nodes of two: the ranks of a node share it.
    nodes, _ = host_and_devices(devices_per_node=2)
    assert time_parts(complete(precision="float32"), nodes).compute == pytest.approx(
        time_parts(complete(precision="float32"), devices).compute / 2
    )


def test_half_precision_is_slower_on_a_host_and_no_reason_to_choose_it():
    host, devices = host_and_devices()
    for knobs in ({}, {"data_parallel": 4}, {"recompute": "full", "micro_batch_size": 4}):
        whole = complete(precision="float32", **knobs)
        half = complete(precision="float16", **knobs)
        cost = CostModel(host)
        assert cost.step_time_s(half) > cost.step_time_s(whole)
        assert cost.time_parts(half).work == pytest.approx(1.6 * cost.time_parts(whole).work)
        cost = CostModel(devices)
        assert cost.step_time_s(half) < cost.step_time_s(whole)
        assert cost.time_parts(half).work == cost.time_parts(whole).work


def test_memory_is_no_bottleneck_of_a_host():
    host, devices = host_and_devices()
    config = complete(precision="float32", data_parallel=4)
    own, theirs = time_parts(config, host), time_parts(config, devices)
    assert own.traffic == pytest.approx(theirs.traffic * 7 / 200)
    assert own.optimizer == pytest.approx(theirs.optimizer * 7 / 200)
    assert (own.near_gradients, own.launch) == (theirs.near_gradients, theirs.launch)
