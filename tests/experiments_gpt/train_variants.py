"""Trains several configs one after another in one process (of one or more ranks) and dumps what each rank saw.

usage: train_variants.py VARIANTS.json OUT_FOLDER, variants being name -> {config, steps}
"""

import hashlib
import json
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindtune.controller.live.layout import is_tp_sharded
from mindtune.experiments.gpt.config import parse_config
from mindtune.experiments.gpt.effective import effective_knobs
from mindtune.experiments.gpt.model_signals import GptSignals
from mindtune.experiments.gpt.samples import evaluation_batches
from mindtune.experiments.gpt.training import build_training

LOOKED_INTO = ("interval", "pynative", "tensor", "data")


def entropy_of_block_0(training, tokens):
    """Attention entropy per head in NumPy, from the weights of one rank that holds all heads."""
    backbone = training.network.backbone
    attention, norm = backbone.blocks[0].attention, backbone.blocks[0].attention_norm.norm
    value = lambda parameter: parameter.asnumpy().astype(np.float64)  # noqa: E731
    x = value(backbone.byte_embedding)[tokens] + value(backbone.position_embedding)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x * value(norm.gamma) + value(norm.beta)
    query, key, _ = np.einsum("bts,khds->kbhtd", x, value(attention.qkv_weight)) + value(
        attention.qkv_bias
    ).reshape(3, 1, attention.heads, 1, attention.head_size)
    scores = np.einsum("bhtd,bhsd->bhts", query, key) / np.sqrt(attention.head_size)
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    logs = np.log(np.where(weights > 0, weights, 1.0))
    return (-(weights * logs).sum(-1)).mean((0, 2)).tolist()


def signals(training) -> dict:
    """What the model tells of itself on the first validation batch."""
    tokens, weights = evaluation_batches(training.config)[0]
    look = GptSignals(training.network, training.ranks)
    found = look(Tensor(tokens), Tensor(weights))
    seen = {name: np.asarray(array).tolist() for name, array in found.items()}
    seen["loss"] = float(training.network(Tensor(tokens), Tensor(weights)).asnumpy())
    if training.ranks.shards.count == 1:
        seen["block_0"] = entropy_of_block_0(training, tokens[:, :-1])
    return seen


def train(tree: dict, steps: int, *, looks: bool = False) -> dict:
    training = build_training(parse_config(tree), seed=3, num_steps=steps)
    reports = []
    for batch in training.dataset.create_tuple_iterator(num_epochs=1):
        training.step(*batch)
        if training.step.last_report is not None:
            reports.append(training.step.last_report)
    weights = list(training.network.trainable_params())
    digest = hashlib.sha256()
    for weight in weights:
        if not is_tp_sharded(weight):
            digest.update(np.ascontiguousarray(weight.asnumpy()).tobytes())
    return {
        "loss": [report.loss for report in reports],
        "grad_norm": [report.grad_norm for report in reports],
        "overflow": [report.overflow for report in reports],
        "learning_rate": [report.learning_rate for report in reports],
        "loss_scale": [report.loss_scale for report in reports],
        "eval_loss": training.evaluate(),
        "signals": signals(training) if looks else None,
        "num_sharded": sum(is_tp_sharded(weight) for weight in weights),
        "replicated_digest": digest.hexdigest(),
        "weights_finite": all(np.isfinite(weight.asnumpy()).all() for weight in weights),
        "effective": effective_knobs(
            step=training.step,
            backbone=training.network.backbone,
            dataset=training.dataset,
        ),
        "mode": "graph" if ms.get_context("mode") == ms.GRAPH_MODE else "pynative",
        "rank": training.ranks.layout.rank,
    }


def main() -> None:
    variants = json.loads(Path(sys.argv[1]).read_text())
    results = {
        name: train(variant["config"], variant["steps"], looks=name in LOOKED_INTO)
        for name, variant in variants.items()
    }
    rank = next(iter(results.values()))["rank"]
    (Path(sys.argv[2]) / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
