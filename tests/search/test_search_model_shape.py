"""Parameters and FLOPs against counts by hand and published numbers."""

import pytest

from mindtune.search.errors import SearchError
from mindtune.search.model_shape import ModelShape, recomputed_layers

TINY = ModelShape(
    num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, intermediate_size=16,
    gated_mlp=True, vocab_size=10, seq_length=4,
)  # fmt: skip
GPT3 = ModelShape(
    num_layers=96, hidden_size=12288, num_heads=96, intermediate_size=49152, vocab_size=50257,
    seq_length=2048, tie_embeddings=True,
)  # fmt: skip
LLAMA3_8B = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, intermediate_size=14336,
    gated_mlp=True, vocab_size=128256, seq_length=8192,
)  # fmt: skip
MIXTRAL = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, intermediate_size=14336,
    gated_mlp=True, vocab_size=32000, seq_length=4096, num_experts=8, experts_per_token=2,
)  # fmt: skip


def test_tiny_shape_counted_by_hand():
    # Attention 64 + 2 * 32 + 64, MLP 3 * 8 * 16, two norms of 8; tables 2 * 80, last norm 8.
    assert TINY.attention_parameters == 192
    assert TINY.mlp_parameters == 384
    assert TINY.num_parameters == 2 * (192 + 384 + 16) + 160 + 8 == 1352
    flops = TINY.layer_flops
    assert flops.query_key_value == 2 * 8 * (8 + 2 * 4) == 256
    assert flops.attention_scores == flops.attention_values == 2 * 4 * 8 == 64
    assert flops.output_projection == 128
    assert flops.mlp == 768
    assert flops.total == 1280
    assert TINY.head_flops == 160
    assert TINY.forward_flops == 2 * 1280 + 160 == 2720
    assert TINY.model_flops == 8160
    assert TINY.step_flops(12) == 97920


@pytest.mark.parametrize(
    ("recompute", "extra"),
    [("none", 0), ("selective", 2 * 128), ("interval:2", 1280), ("full", 2560), ("interval:3", 0)],
)
def test_recompute_adds_to_hardware_flops_only(recompute, extra):
    assert TINY.recompute_flops(recompute) == extra


def test_interval_repeats_every_kth_layer_of_the_workload():
    assert [recomputed_layers(f"interval:{k}", 10) for k in (2, 3, 4, 10, 11)] == [5, 3, 2, 1, 0]


def test_llama3_8b_and_mixtral_have_their_published_parameter_counts():
    assert LLAMA3_8B.num_parameters == 8_030_261_248
    assert MIXTRAL.num_parameters == 46_702_792_704


def test_gpt3_has_its_published_size_and_the_vendor_formula_of_dense_models():
    assert GPT3.num_parameters == pytest.approx(175e9, rel=0.01)
    assert GPT3.model_flops == 6 * (96 * 12 * 12288**2 + 50257 * 12288) + 12 * 96 * 2048 * 12288
    # (24 B s h^2 + 4 B s^2 h) * 3 L + 6 B s h V, as NeMo counts a step.
    batch, s, h = 4, 2048, 12288
    nemo = (24 * batch * s * h**2 + 4 * batch * s**2 * h) * 3 * 96 + 6 * batch * s * h * 50257
    assert GPT3.step_flops(batch * s) == pytest.approx(nemo, rel=1e-12)


def test_the_vendor_formula_is_8_percent_low_for_a_llama_layer():
    layer = LLAMA3_8B.layer_flops
    assert (layer.total - layer.attention_core) / 4096**2 / 2 == 13.0  # 26 h^2, not 24 h^2


def test_experts_count_active_ones_in_flops_and_all_in_parameters():
    expert = 3 * 4096 * 14336
    assert MIXTRAL.layer_flops.mlp == 2 * 2 * expert
    assert MIXTRAL.expert_layer_parameters == 8 * expert
    assert MIXTRAL.layer_flops.router == 2 * 4096 * 8


def test_uneven_heads_are_refused():
    with pytest.raises(SearchError, match="multiple of num_heads, but got 10 and 3"):
        ModelShape(num_layers=1, hidden_size=10, num_heads=3, intermediate_size=4, vocab_size=4,
                   seq_length=4)  # fmt: skip
    with pytest.raises(SearchError, match="multiple of num_kv_heads, but got 4 and 3"):
        ModelShape(num_layers=1, hidden_size=8, num_heads=4, num_kv_heads=3, intermediate_size=4,
                   vocab_size=4, seq_length=4)  # fmt: skip
