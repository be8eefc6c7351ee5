"""Faults in the samples and in the threads that read them.

They are here, and not among the faults that mindtune plants in any run, since the overflow of a
poisoned batch must come about in the forward and backward pass itself, and a slow pipeline must
get faster with more workers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mindtune.experiments.gpt.config import FaultsConfig

__all__ = ["DataFaults"]


@dataclass(frozen=True)
class DataFaults:
    """What is wrong with the data of a run.

    Steps are those of the configured batch size: when a policy resizes the batch, a fault stays
    with its samples.
    """

    config: FaultsConfig

    def delay_s(self, step: int) -> float:
        """Return how long the pipeline sleeps before each micro-batch of `step`."""
        slow = self.config.slow_data
        begun = slow.first_step <= step
        return (
            slow.seconds if begun and (slow.last_step is None or step <= slow.last_step) else 0.0
        )

    def wait(self, step: int) -> None:
        """Sleep as a starved pipeline would."""
        delay = self.delay_s(step)
        if delay:
            time.sleep(delay)

    def spoil(
        self,
        step: int,
        samples: Sequence[int],
        tokens: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return a micro-batch as it arrives: spoilt on the poisoned steps only.

        Args:
            step: Optimizer step the samples belong to, from 1.
            samples: Run-wide indices of the samples, which seed the noise.
            tokens: Bytes, `[samples, seq_length + 1]`.
            weights: Weight of each sample in the loss, `[samples]`.
        """
        poison = self.config.poison
        if step not in poison.steps:
            return tokens, weights
        if poison.kind == "noise":
            # Per sample: tensor-parallel ranks and any split must see the same noise.
            noise = [
                np.random.default_rng(sample).integers(0, 256, tokens.shape[1], dtype=np.int32)
                for sample in samples
            ]
            return np.stack(noise), weights
        return tokens, weights * np.float32(poison.factor)
