"""The model's shape, as a study file and the MFU know it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindtune.experiments.gpt.config import ModelConfig

__all__ = ["VOCAB_SIZE", "model_shape"]

VOCAB_SIZE = 256
"""The byte values."""


def model_shape(model: ModelConfig) -> dict[str, Any]:
    """Return the model's shape under the keys of a study file's `model:` block."""
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_heads,
        "intermediate_size": model.mlp_size,
        "gated_mlp": False,
        "vocab_size": VOCAB_SIZE,
        "seq_length": model.seq_length,
        "tie_embeddings": False,
        "flash_attention": False,
    }
