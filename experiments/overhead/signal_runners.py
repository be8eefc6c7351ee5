"""MindSpore's own step with one signal more, for each signal that a run can be watched by."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mindspore import nn, ops

from mindtune.controller.device import DeferredProbe, SamplingThread
from mindtune.controller.live.layout import ParallelLayout
from mindtune.controller.records import SignalWriter
from mindtune.experiments.gpt.config import GptConfig
from mindtune.experiments.gpt.model_signals import GptSignals
from mindtune.experiments.gpt.ranks import Ranks
from mindtune.experiments.gpt.tensor_parallel import ONE_SHARD
from mindtune.experiments.overhead.cells import Batch, Runner, build_network
from mindtune.policies.signals import Observation

__all__ = ["AddedSignal", "NormStep", "build_signal_runners"]


class NormStep(nn.Cell):
    """MindSpore's step that also returns the global gradient norm, in one packed tensor.

    Args:
        network: Returns the loss.
        optimizer: Holds the weights.
    """

    def __init__(self, network: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.value_and_grad = ops.value_and_grad(network, None, optimizer.parameters)

    def construct(self, *batch: Any) -> Any:
        """Return loss and norm of a batch, its update made."""
        loss, gradients = self.value_and_grad(*batch)
        squares = [ops.square(gradient).sum() for gradient in gradients]
        norm = ops.sqrt(ops.addn(squares))
        return ops.depend(ops.stack((loss, norm)), self.optimizer(gradients))


class AddedSignal(Runner):
    """A step, then what the signal needs of the host, timed by itself as well.

    Args:
        step: The training step; its result goes to `take`.
        record: Table for loss, norm and reading, which are fetched for it; None: they are not.
        samples_device: Whether a thread reads the device meanwhile.
        inside: Looks inside the model after the step; None: nothing does.
    """

    def __init__(
        self,
        step: nn.Cell,
        *,
        record: Path | None = None,
        samples_device: bool = False,
        inside: GptSignals | None = None,
    ) -> None:
        super().__init__(self._train)
        self._cell = step
        self._record = record
        self._samples_device = samples_device
        self._inside = inside
        self._writer: SignalWriter | None = None
        self._sampler: SamplingThread | None = None
        self._number = 0
        self.added_s: list[float] = []
        """Seconds of the host's part in each step."""

    def open(self) -> None:
        """Open the table and start the sampling thread; not measured."""
        if self._record is not None:
            self._writer = SignalWriter(self._record)
        if self._samples_device:
            self._sampler = SamplingThread(DeferredProbe("CPU")).start()

    def close(self) -> None:
        """Close both; not measured."""
        if self._writer is not None:
            self._writer.close()
        if self._sampler is not None:
            self._sampler.stop()

    def _train(self, batch: Batch) -> float:
        outputs = self._cell(*batch)
        begin_s = time.perf_counter()
        self._number += 1
        device: dict[str, Any] = {}
        if self._sampler is not None:
            reading = self._sampler.reading()
            device = {
                "device_utilization": reading.device_utilization,
                "device_memory_used_bytes": reading.device_memory_used_bytes,
            }
        if self._inside is not None:
            self._inside(*batch)
        if self._writer is not None:
            values = outputs.asnumpy().reshape(-1)
            norm = float(values[1]) if len(values) > 1 else None
            observation = Observation(
                step=self._number, loss=float(values[0]), grad_norm=norm, **device
            )
            self._writer.write(observation)
        self.added_s.append(time.perf_counter() - begin_s)
        return 0.0


def build_signal_runners(config: GptConfig, records: Path) -> Mapping[str, AddedSignal]:
    """Return the ways by name; `bare` first, of which the others' differences are taken.

    Args:
        config: Model and optimizer.
        records: Folder for what they write.
    """
    bare, normed = build_network(config), build_network(config)
    bare_step = nn.TrainOneStepCell(bare.loss, bare.optimizer)
    norm_step = NormStep(normed.loss, normed.optimizer)
    for cell in (bare_step, norm_step):
        cell.set_train()
    inside = GptSignals(bare.loss, Ranks(ParallelLayout(), 0, ONE_SHARD))
    records.mkdir(parents=True, exist_ok=True)
    runners = {
        "bare": AddedSignal(bare_step),
        "loss": AddedSignal(bare_step, record=records / "loss.csv"),
        "norm": AddedSignal(norm_step, record=records / "norm.csv"),
        "device": AddedSignal(bare_step, samples_device=True),
        "together": AddedSignal(norm_step, record=records / "together.csv", samples_device=True),
        "entropy": AddedSignal(bare_step, inside=inside),
    }
    return MappingProxyType(runners)
