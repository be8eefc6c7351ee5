"""The input pipeline of one rank as a `mindspore.dataset`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore.dataset as ds

from mindtune.experiments.gpt.corpus import Corpus
from mindtune.experiments.gpt.samples import COLUMNS, MicroBatches, SampleOrder

if TYPE_CHECKING:
    from mindtune.experiments.gpt.config import GptConfig
    from mindtune.experiments.gpt.faults import DataFaults

__all__ = ["build_dataset"]


def build_dataset(
    config: GptConfig, *, seed: int, num_steps: int, data_rank: int, faults: DataFaults
) -> Any:
    """Build the training dataset of one rank.

    Args:
        config: The workload's config.
        seed: Seed of the sample order.
        num_steps: Optimizer steps at the configured batch size that the samples suffice for.
        data_rank: Index of the rank among the data-parallel ones.
        faults: Faults to plant.

    Returns:
        A `mindspore.dataset` with the columns of `COLUMNS`: int32 `[micro_batch_size, seq_length +
        1]` and float32 `[micro_batch_size]`.
    """
    corpus = Corpus.load("train", cache=config.data.cache)
    order = SampleOrder((len(corpus) - 1) // config.model.seq_length, seed)
    source = MicroBatches(corpus, order, config, num_steps, data_rank, faults)
    # The queue's length is read when the dataset is built.
    ds.config.set_prefetch_size(config.data.prefetch)
    return ds.GeneratorDataset(
        source,
        list(COLUMNS),
        shuffle=False,
        num_parallel_workers=config.data.workers,
        python_multiprocessing=False,
    )
