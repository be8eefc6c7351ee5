"""Faults planted in the input pipeline: graph and step stay those of a healthy run."""

from __future__ import annotations

import math
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
    """The faults of one rank's pipeline.

    Steps are those of the configured batch size: when a policy resizes the batch, a fault stays
    with its samples.
    """

    config: FaultsConfig
    rank: int = 0

    def delay_s(self, step: int, *, first_of_step: bool) -> float:
        """Return how long the pipeline sleeps before a micro-batch of `step`."""
        slow, hang = self.config.slow_data, self.config.hang
        delay = 0.0
        if slow.first_step <= step and (slow.last_step is None or step <= slow.last_step):
            delay += slow.seconds
        if step == hang.step and first_of_step and hang.rank in (None, self.rank):
            delay += hang.seconds
        return delay

    def wait(self, step: int, *, first_of_step: bool) -> None:
        """Sleep as a starved or hanging pipeline would."""
        delay = self.delay_s(step, first_of_step=first_of_step)
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
        factor = {"scale": poison.factor, "nan": math.nan, "inf": math.inf}[poison.kind]
        return tokens, weights * np.float32(factor)
