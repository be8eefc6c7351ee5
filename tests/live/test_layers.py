"""Grouping of weights into layers by their names."""

from __future__ import annotations

import pytest

from mindtune.controller.live.layers import broken_gradient, group_by_layer, layer_of


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("backbone.blocks.3.attention.qkv_weight", "backbone.blocks.3"),
        ("model.layers.11.feed_forward.experts.7.w1", "model.layers.11"),
        ("0.weight", "0"),
        ("model.tok_embeddings.embedding_weight", "model.tok_embeddings.embedding_weight"),
        ("backbone.byte_embedding", "backbone.byte_embedding"),
        ("backbone.final_norm.norm.gamma", "backbone.final_norm.norm"),
        ("lm_head.weight", "lm_head"),
        ("weight", "weight"),
        ("blocks4.weight", "blocks4"),
    ],
)
def test_a_weight_belongs_to_its_block_else_to_its_cell(name, layer):
    assert layer_of(name) == layer


def test_layers_stand_in_the_order_of_their_first_weight():
    names = ["embedding", "blocks.0.a", "blocks.1.a", "blocks.0.b", "head.weight", "head.bias"]
    assert list(group_by_layer(names).items()) == [
        ("embedding", (0,)),
        ("blocks.0", (1, 3)),
        ("blocks.1", (2,)),
        ("head", (4, 5)),
    ]


@pytest.mark.parametrize(
    ("counts", "layer", "words"),
    [
        ((0, 0, 0, 0), None, ""),
        ((0, 0, 0, 1), "blocks.1", "1 of 4 layers"),
        ((9, 0, 7, 0), "blocks.0", "2 of 4 layers"),
        # The head stands before the blocks, so which layer is the last is not known.
        ((9, 9, 7, 8), "all", "all 4 layers"),
    ],
)
def test_the_layer_where_the_backward_pass_broke_is_told(counts, layer, words):
    told = broken_gradient(["embedding", "head", "blocks.0", "blocks.1"], counts)
    if layer is None:
        assert told is None
    else:
        assert told[0] == layer
        assert words in told[1]
