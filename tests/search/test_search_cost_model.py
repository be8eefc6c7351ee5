"""Memory and time formulas against counts by hand, their directions, and calibration."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindtune.search.cost_model import CostModel, Measurement, calibrate
from mindtune.search.facts import Cluster, StudyFacts, Training
from mindtune.search.knobs import KNOBS
from mindtune.search.memory_model import memory_parts
from mindtune.search.model_shape import ModelShape
from mindtune.search.time_model import time_parts

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
        return memory_parts(
            complete(micro_batch_size=size, model_parallel=tensor, pipeline_stage=stages,
                     recompute=recompute),
            FACTS,
        ).total  # fmt: skip

    assert total(4) - total(2) == pytest.approx(2 * (total(2) - total(1)))


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


def test_step_time_by_hand_on_one_device():
    one = dataclasses.replace(FACTS, cluster=dataclasses.replace(CLUSTER, num_devices=1))
    parts = time_parts(complete(), one)
    assert parts.compute == pytest.approx(MODEL.step_flops(64 * 4096) / (3e14 * 0.5))
    assert parts.launch == pytest.approx(1e-3 * 32 * 64)
    assert parts.total == parts.compute + parts.launch
    mfu = MODEL.step_flops(64 * 4096) / (parts.total * 3e14)
    assert CostModel(one).predict(complete()).mfu == pytest.approx(mfu)


def test_small_micro_batches_pay_for_every_launch_and_tensor_parallel_ones_more():
    def launch(**knobs):
        return time_parts(complete(**knobs), FACTS).launch

    assert launch(micro_batch_size=4) == pytest.approx(launch() / 4)
    assert launch(model_parallel=2) == pytest.approx(3 * launch())
    assert launch(pipeline_stage=2) == pytest.approx(launch() / 2 * 65 / 64)


def test_a_pipeline_waits_by_the_published_bubble():
    parts = time_parts(complete(pipeline_stage=4, micro_batch_size=4), FACTS)
    assert parts.bubble / parts.compute == pytest.approx(3 / 16)
    chunks = time_parts(complete(pipeline_stage=4, micro_batch_size=4, pp_interleave_num=2), FACTS)
    assert chunks.bubble / chunks.compute == pytest.approx(3 / 32)


def test_exchanges_by_hand():
    data = time_parts(complete(data_parallel=8), FACTS).data
    assert data == pytest.approx(2 * 7 / 8 * 4 * P / 2e11)
    half = time_parts(complete(data_parallel=8, gradient_compression="float16"), FACTS).data
    assert half == pytest.approx(data / 2)
    across = time_parts(complete(data_parallel=16), FACTS).data
    assert across == pytest.approx(2 * 15 / 16 * 4 * P / 2.5e10)
    tensor = time_parts(complete(model_parallel=4), FACTS).tensor
    assert tensor == pytest.approx(4 * 32 * 2 * 3 / 4 * 64 * 4096 * 4096 * 2 / 2e11)
    repeated = time_parts(complete(model_parallel=4, recompute="full"), FACTS).tensor
    assert repeated == pytest.approx(1.5 * tensor)
    overlapped = time_parts(complete(data_parallel=8, comm_overlap=True), FACTS).data
    assert overlapped < data / 2


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


def test_calibration_takes_one_factor_for_time_and_a_line_for_memory():
    cost = CostModel(FACTS)
    seen = [
        Measurement(c, 3e9 + 1.25 * cost.memory_bytes(c), 2.0 * cost.step_time_s(c))
        for c in (complete(micro_batch_size=n) for n in (1, 2, 4))
    ]
    fitted = calibrate(cost, seen)
    other = complete(micro_batch_size=8, recompute="full")
    assert fitted.memory_bytes(other) == pytest.approx(3e9 + 1.25 * cost.memory_bytes(other))
    assert fitted.step_time_s(other) == pytest.approx(2.0 * cost.step_time_s(other))
    assert fitted.calibrated_by == 3
    # Calibrating a calibrated model starts from the formulas again.
    assert calibrate(fitted, seen) == fitted


def test_a_falling_or_negative_line_is_noise_and_the_ratio_is_taken():
    cost = CostModel(FACTS)
    configs = [complete(micro_batch_size=n) for n in (1, 2, 4)]
    falling = [
        Measurement(c, 2e11 - n * 1e9) for n, c in enumerate(configs)
    ]  # fmt: skip
    fitted = calibrate(cost, falling)
    assert (fitted.memory_offset, fitted.memory_scale > 0) == (0.0, True)
    steep = [Measurement(c, 2 * cost.memory_bytes(c) - 1e11) for c in configs]
    assert calibrate(cost, steep).memory_offset == 0.0


def test_what_was_not_measured_is_no_evidence():
    cost = CostModel(FACTS)
    nothing = [Measurement(complete(), None, None), Measurement(complete(), math.nan, math.inf)]
    assert calibrate(cost, nothing) == cost
