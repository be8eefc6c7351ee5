"""Trains several configs one after another in one process (of one or more ranks) and dumps what each rank saw.

usage: train_variants.py VARIANTS.json OUT_FOLDER, variants being name -> {config, steps}
"""

import hashlib
import json
import sys
from pathlib import Path

import mindspore as ms
import numpy as np

from mindtune.controller.live.layout import is_tp_sharded
from mindtune.experiments.gpt.config import parse_config
from mindtune.experiments.gpt.effective import effective_knobs
from mindtune.experiments.gpt.training import build_training


def train(tree: dict, steps: int) -> dict:
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
        name: train(variant["config"], variant["steps"]) for name, variant in variants.items()
    }
    rank = next(iter(results.values()))["rank"]
    (Path(sys.argv[2]) / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
