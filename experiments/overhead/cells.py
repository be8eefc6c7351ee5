"""The training steps that are compared: MindSpore's own ones, and what stands around ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindtune.controller import TrainStep
from mindtune.controller.live.batch import batch_facts
from mindtune.controller.live.opening import open_session
from mindtune.controller.live.session import LiveSession
from mindtune.controller.live.settings import load_settings
from mindtune.controller.live.state import ControllerState
from mindtune.controller.live.workload import Workload
from mindtune.controller.records import RunFolder
from mindtune.experiments.gpt.config import GptConfig
from mindtune.experiments.gpt.model import Gpt, GptLoss
from mindtune.experiments.gpt.schedule import build_optimizer
from mindtune.experiments.gpt.shape import model_shape

__all__ = [
    "Batch",
    "CheckedStep",
    "ControlledStep",
    "Network",
    "Runner",
    "build_network",
    "build_runners",
]

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], float]
"""Trains on one batch and returns its loss on the host."""


@dataclass(frozen=True)
class Network:
    """Weights of their own, equal to those of every other one at the start."""

    loss: GptLoss
    optimizer: Any


class CheckedStep(nn.Cell):
    """MindSpore's own parts in one cell: clip by global norm, update if all gradients are finite.

    What a careful user writes without mindtune; MindSpore's `TrainOneStepWithLossScaleCell` has
    the same branch but no kernel for its overflow check on CPU.

    Args:
        network: Returns the loss.
        optimizer: Holds the weights.
        clip_norm: Bound of the global gradient norm.
    """

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, clip_norm: float) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.value_and_grad = ops.value_and_grad(network, None, optimizer.parameters)

    def construct(self, *batch: Any) -> Any:
        """Return the loss of a batch, its update made unless a gradient is not finite."""
        loss, gradients = self.value_and_grad(*batch)
        gradients = ops.clip_by_global_norm(gradients, self.clip_norm)
        if ms.amp.all_finite(gradients):
            self.optimizer(gradients)
        return loss


class Runner:
    """One way of training, called in blocks of steps.

    Args:
        step: Trains on one batch.
    """

    def __init__(self, step: Step) -> None:
        self._step = step

    def open(self) -> None:
        """Begin a block; its time is not measured."""

    def __call__(self, batch: Batch) -> float:
        """Train on one batch; return its loss on the host."""
        return self._step(batch)

    def close(self) -> None:
        """End a block; its time is not measured."""


class ControlledStep(Runner):
    """Our step with everything that `TuneCallback` puts around it: sensors, engine, records.

    The session, its probe and its watchdog live during this runner's blocks alone, so that their
    threads burden no other; the state goes on from block to block.

    Args:
        step: The training step, compiled.
        mode: Of the policies.
        config: Of the workload.
        folder: For the records.
        sample_every: Steps from one sample of model signals to the next; 0: none.
        model_signals: The model's own function for them.
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        mode: Literal["observe", "act"],
        config: GptConfig,
        folder: Path,
        sample_every: int = 0,
        model_signals: Callable[..., Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(lambda batch: float(step(*batch).asnumpy()))
        self.folder = RunFolder(folder)
        self.num_actions = 0
        """Granted so far: above 0 the compared steps no longer do the same."""
        self.train_step = step
        self._settings = load_settings(
            {"mode": mode, "out_dir": str(folder), "model_signals": {"every": sample_every}}, {}
        )
        self._workload = Workload(
            tokens_per_sample=config.model.seq_length,
            model=model_shape(config.model),
            peak_flops=1e12,
            model_signals=model_signals,
        )
        self._session: LiveSession | None = None
        self._state: ControllerState | None = None

    @property
    def num_parameters(self) -> int:
        """Weights that the step trains."""
        return sum(int(weight.size) for weight in self.train_step.optimizer.parameters)

    def open(self) -> None:
        """Open a session that goes on where the last block ended."""
        self._session, _ = open_session(
            self._settings,
            self._workload,
            self.train_step,
            folder=self.folder,
            resumed=self._state,
        )

    def __call__(self, batch: Batch) -> float:
        """Train on one batch, observed, decided on and recorded."""
        session = self._opened()
        facts = batch_facts(batch)
        session.begin_call(
            shapes=facts.shapes, samples=facts.samples, tokens=facts.tokens, batch=batch
        )
        outputs = self.train_step(*batch)
        session.end_call(outputs)
        return float(outputs.asnumpy())

    def close(self) -> None:
        """End the session and keep its state."""
        session = self._opened()
        session.end()
        self.num_actions += session.controller.num_actions
        self._state = session.state()
        self._session = None

    def _opened(self) -> LiveSession:
        assert self._session is not None, "open comes first"  # noqa: S101 - the order of Runner
        return self._session


def build_runners(config: GptConfig, *, clip_norm: float, records: Path) -> Mapping[str, Runner]:
    """Return the compared ways by name, in the order of the table.

    Ours share one compiled step, so that they differ by the controller alone.

    Args:
        config: Model and optimizer.
        clip_norm: Bound of the global gradient norm, for all but the bare step.
        records: Folder for the records of the controlled ones.
    """
    bare, checked, own = (build_network(config) for _ in range(3))
    bare_step = nn.TrainOneStepCell(bare.loss, bare.optimizer)
    checked_step = CheckedStep(checked.loss, checked.optimizer, clip_norm)
    own_step = TrainStep(own.loss, own.optimizer, clip_norm=clip_norm)
    for cell in (bare_step, checked_step, own_step):
        cell.set_train()
    runners = {
        "bare": Runner(lambda batch: float(bare_step(*batch).asnumpy())),
        "checked": Runner(lambda batch: float(checked_step(*batch).asnumpy())),
        "own": Runner(lambda batch: float(own_step(*batch).asnumpy())),
        "observe": ControlledStep(
            own_step, mode="observe", config=config, folder=records / "observe"
        ),
        "act": ControlledStep(own_step, mode="act", config=config, folder=records / "act"),
    }
    return MappingProxyType(runners)


def build_network(config: GptConfig) -> Network:
    """Return the workload with weights of its own."""
    loss = GptLoss(Gpt(config.model, seed=config.training.seed))
    # A constant rate, so that no way comes into another part of a schedule.
    return Network(loss, build_optimizer(loss, config, num_updates=1))
