"""Builds everything a training needs from a config: ranks, network, optimizer, step, dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindtune.controller import TrainStep
from mindtune.controller.live.loss_scale import LossScale
from mindtune.experiments.gpt.data import build_dataset
from mindtune.experiments.gpt.faults import DataFaults
from mindtune.experiments.gpt.model import Gpt, GptLoss
from mindtune.experiments.gpt.ranks import Ranks, join_ranks
from mindtune.experiments.gpt.samples import evaluation_batches
from mindtune.experiments.gpt.schedule import build_optimizer

if TYPE_CHECKING:
    from mindtune.experiments.gpt.config import GptConfig

__all__ = ["Training", "build_training"]

_SHARDED_PER_BLOCK = 6
"""Parameters of a block that tensor parallelism splits: weight and bias of QKV and of the MLP's
first matrix, weight of the attention's and of the MLP's last."""


@dataclass(frozen=True)
class Training:
    """A training, ready to run."""

    config: GptConfig
    seed: int
    num_steps: int
    ranks: Ranks
    network: GptLoss
    step: TrainStep
    dataset: Any

    def evaluate(self) -> float:
        """Return the mean validation loss in nats per byte, equal on all ranks.

        Every rank must take part, since tensor-parallel ranks exchange activations.
        """
        self.network.set_train(mode=False)
        losses = [
            float(self.network(Tensor(tokens), Tensor(weights)).asnumpy())
            for tokens, weights in evaluation_batches(self.config)
        ]
        self.network.set_train(mode=True)
        return float(np.mean(losses))


def build_training(config: GptConfig, *, seed: int, num_steps: int) -> Training:
    """Set the execution mode, join the other ranks and build the training.

    Args:
        config: The workload's config.
        seed: Seed of weights and sample order.
        num_steps: Optimizer steps at the configured batch size.

    Raises:
        ConfigError: The ranks launched do not fit the config.
    """
    training, parallel = config.training, config.parallel
    ms.set_context(mode=ms.GRAPH_MODE if training.mode == "graph" else ms.PYNATIVE_MODE)
    ms.set_seed(seed)
    ranks = join_ranks(parallel)
    backbone = Gpt(
        config.model,
        seed=seed,
        precision=training.precision,
        recompute=training.recompute,
        shards=ranks.shards,
    )
    network = GptLoss(backbone)
    # A policy may cut the batch down to one micro-batch per update.
    optimizer = build_optimizer(network, config, num_updates=num_steps * config.micro_batch_num)
    sharded = _SHARDED_PER_BLOCK * config.model.num_layers if parallel.model_parallel > 1 else 0
    step = TrainStep(
        network,
        optimizer,
        num_microbatches=config.micro_batch_num,
        loss_scale=_loss_scale(training.loss_scale, config.faults.loss_scale_start),
        clip_norm=training.clip_norm,
        compression=training.gradient_compression,
        layout=ranks.layout,
        num_sharded_parameters=sharded,
    )
    step.set_train()
    faults = DataFaults(config.faults)
    dataset = build_dataset(
        config, seed=seed, num_steps=num_steps, data_rank=ranks.data_index, faults=faults
    )
    return Training(config, seed, num_steps, ranks, network, step, dataset)


def _loss_scale(value: float | str, start: float | None) -> float | LossScale | None:
    if value == "none":
        return None
    if value != "dynamic":
        return float(value)
    return LossScale() if start is None else LossScale(initial=start)
