"""One training in MindFormers' trainer, as documents: what it is told, and what it left."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from mindtune.controller.contract import ContractModel, Document, Number

__all__ = ["WAYS", "PeerCase", "PeerRun", "Scale", "Step", "Turns"]

WAYS = ("off", "loss_monitor", "observe", "act", "weight_state", "optimizer_state")
"""What takes turns around one compiled step when costs are compared; see `turns`."""


class Scale(ContractModel):
    """MindSpore's dynamic loss scale (`DynamicLossScaleUpdateCell`)."""

    initial: float = 65536.0
    factor: float = 2.0
    window: int = 1000


class Turns(ContractModel):
    """Ways of watching that take turns within one training."""

    rounds: int = Field(ge=1)
    block: int = Field(ge=1)
    """Measured steps of a turn; one more comes before them."""

    @property
    def steps(self) -> int:
        """Steps of the whole alternation."""
        return self.rounds * len(WAYS) * (self.block + 1)

    def turn(self, index: int) -> tuple[str, int]:
        """Return who has the turn in a step, counted from 0, and the step's place in it.

        Each round begins with another way; the step at place 0 is not measured.
        """
        turn, place = divmod(index, self.block + 1)
        number, seat = divmod(turn, len(WAYS))
        return WAYS[(seat + number) % len(WAYS)], place


class PeerCase(Document):
    """A tiny Llama in MindFormers' trainer; most fields are keys of its YAML."""

    FILE: ClassVar[str] = "case.json"

    steps: int = Field(ge=1)
    batch: int = 8
    learning_rate: float = 3e-3
    lr_end: float | None = None
    """None: a tenth of the learning rate."""
    warmup_ratio: float = 0.1
    constant_rate: bool = False
    """Give the optimizer a plain float instead of a schedule."""
    dtype: Literal["float32", "float16"] = "float32"
    scale: float | Scale = 1.0
    max_grad_norm: float = 1.0
    seed: int = 7
    pynative: bool = False
    sink_mode: bool = False
    interleave: int = 1
    """`micro_batch_interleave_num`."""
    local_norm: bool = False
    check_for_nan: bool = False
    """`check_for_nan_in_loss_and_grad`."""
    saves: bool = False
    """Save a checkpoint at the end, with MindFormers' `CheckpointMonitor`."""
    resume_from: Path | None = None
    """Folder of a run that saved."""
    plugged: Literal["no", "instance", "registry", "yaml"] = "no"
    """How our callback comes in."""
    mindtune: dict[str, Any] = Field(default_factory=dict)
    """The `mindtune:` block of the YAML."""
    turns: Turns | None = None


class Step(ContractModel):
    """What MindFormers' step returned, read without mindtune."""

    number: int
    """`cb_params.cur_step_num`."""
    loss: Number
    overflow: bool
    loss_scale: Number | None
    learning_rate: Number | None
    grad_norm: Number | None
    moved: Number | None = None
    """L2 distance that the embedding table moved in this step."""


class PeerRun(Document):
    """What a training left."""

    FILE: ClassVar[str] = "seen.json"

    steps: list[Step]
    failure: str | None
    """Type and message of what ended the training before its time."""
    stop_reason: str | None
    callbacks: list[str]
    """Types of the callbacks in MindFormers' order."""
    weights_finite: bool
    epochs: int
    """Epochs that MindFormers asked its model for."""
    times_s: dict[str, list[list[float]]] = Field(default_factory=dict)
    """By way, per round, seconds of each measured step, callbacks included."""
    hooks_s: dict[str, list[float]] = Field(default_factory=dict)
    """By way, seconds that its own step hooks took, per measured step."""
    actions: int = 0
    """Granted by the callbacks that took turns."""
    parameters: int = 0
