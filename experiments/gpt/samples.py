"""Samples and micro-batches: the same bytes per step for any split over ranks and micro-batches.

Sample `s` of a run is defined by seed and `s` alone. Micro-batch `i` of data-parallel rank `r`
holds the samples `i * data_parallel * micro_batch_size + r * micro_batch_size + (0 ..
micro_batch_size - 1)`, so optimizer step `t` (from 0) consumes exactly the samples `t *
global_batch_size ..` whatever the degrees are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mindtune.experiments.gpt.corpus import Corpus

if TYPE_CHECKING:
    from mindtune.experiments.gpt.config import GptConfig
    from mindtune.experiments.gpt.faults import DataFaults

__all__ = ["COLUMNS", "MicroBatches", "SampleOrder", "evaluation_batches"]

COLUMNS = ("tokens", "weights")
"""int32 `[micro_batch_size, seq_length + 1]` and float32 `[micro_batch_size]`."""

Tokens = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]
_EVALUATION_BATCH = 8


class SampleOrder:
    """Maps a sample's index to a window of the text, by a new permutation per pass."""

    def __init__(self, num_windows: int, seed: int) -> None:
        if num_windows < 1:
            raise ValueError(f"num_windows must be at least 1, but got {num_windows}.")
        self._num_windows = num_windows
        self._seed = seed
        self._permutations: dict[int, npt.NDArray[np.int64]] = {}

    def __getitem__(self, sample: int) -> int:
        epoch, offset = divmod(sample, self._num_windows)
        if epoch not in self._permutations:
            generator = np.random.default_rng([self._seed, epoch])
            self._permutations[epoch] = generator.permutation(self._num_windows)
        return int(self._permutations[epoch][offset])


@dataclass(frozen=True)
class MicroBatches:
    """Random-access source of one rank's micro-batches."""

    corpus: Corpus
    order: SampleOrder
    config: GptConfig
    num_steps: int
    data_rank: int = 0
    faults: DataFaults | None = None

    def __len__(self) -> int:
        return self.num_steps * self.config.micro_batch_num

    def __getitem__(self, index: int) -> tuple[Tokens, Weights]:
        step = int(index) // self.config.micro_batch_num
        samples = self.sample_indices(int(index))
        tokens = np.stack([self.sample(sample) for sample in samples])
        weights = np.ones(len(tokens), dtype=np.float32)
        if self.faults is None:
            return tokens, weights
        self.faults.wait(step + 1)
        return self.faults.spoil(step + 1, samples, tokens, weights)

    def sample_indices(self, index: int) -> range:
        """Return the run-wide indices of the samples in this rank's micro-batch `index`."""
        size = self.config.training.micro_batch_size
        first = (index * self.config.parallel.data_parallel + self.data_rank) * size
        return range(first, first + size)

    def sample(self, sample: int) -> Tokens:
        """Return one sample: `seq_length + 1` bytes, of which all but one are predicted."""
        seq_length = self.config.model.seq_length
        return self.corpus.window(self.order[sample] * seq_length, seq_length + 1).astype(np.int32)


def evaluation_batches(config: GptConfig) -> list[tuple[Tokens, Weights]]:
    """Return the validation batches, spread evenly over the held-out files."""
    corpus = Corpus.load("validation", cache=True)
    seq_length, num_samples = config.model.seq_length, config.training.eval_samples
    # Independent of micro_batch_size, so that two configs are judged by the same sum in the same
    # order.
    size = math.gcd(num_samples, _EVALUATION_BATCH)
    starts = np.linspace(0, len(corpus) - seq_length - 1, num_samples).astype(int)
    windows = [corpus.window(int(start), seq_length + 1) for start in starts]
    samples = np.stack(windows).astype(np.int32).reshape(-1, size, seq_length + 1)
    weights = np.ones(size, dtype=np.float32)
    return [(batch, weights) for batch in samples]
