"""Faults to plant in a run on purpose: the document `faults.yaml` and the key `faults:`.

Each fault acts in the optimizer steps that it names. Kinds that strike (`nan_loss`,
`nan_gradient`, `spike`, `poisoned_batch`, `hang`) act once, or with `every` again and again; those
that last act until `last_step`, or to the end.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mindtune.controller.contract.base import ContractModel, Document
from mindtune.controller.units import Duration, Size

__all__ = [
    "KINDS",
    "PLANTED_FAULTS",
    "AnyFault",
    "Burst",
    "Drift",
    "FaultPlan",
    "Hang",
    "LearningRateJump",
    "LevelShift",
    "MemoryClimb",
    "NanGradient",
    "NanLoss",
    "NumericFault",
    "OverflowStorm",
    "PlantedFault",
    "PoisonedBatch",
    "ScalingFault",
    "SlowData",
    "SlowRank",
    "Spike",
    "StuckUtilization",
]

KINDS = (
    "nan_loss", "nan_gradient", "spike", "burst", "level_shift", "drift", "poisoned_batch",
    "overflow_storm", "learning_rate_jump", "stuck_utilization", "memory_climb", "slow_data",
    "slow_rank", "hang",
)  # fmt: skip
"""What a fault's `kind` may be."""

PLANTED_FAULTS = "planted_faults"
"""Id of the advice by which decisions.jsonl says that a run has planted faults."""

_MAX_FACTOR = 1e30
"""Far below the largest float32, so that a factor alone overflows no gradient of a sane size."""


class PlantedFault(ContractModel):
    """When and where a fault acts."""

    LASTS: ClassVar[bool] = True
    """Whether the kind goes on once it has begun."""

    first_step: int = Field(ge=1)
    """Optimizer step, from 1, in which it begins."""
    last_step: int | None = Field(default=None, ge=1)
    """Last step in which it may act; null: the first alone for a kind that strikes, unless `every`
    is given; otherwise there is none."""
    every: int = Field(default=1, ge=1)
    """It acts in the first step and in each that follows by a multiple of this."""
    rank: int | None = Field(default=None, ge=0)
    """The only rank that has it; null: all."""

    @model_validator(mode="after")
    def _in_order(self) -> PlantedFault:
        if self.last_step is not None and self.last_step < self.first_step:
            raise ValueError(
                f"last_step must be at least first_step = {self.first_step}, but got "
                f"{self.last_step}"
            )
        return self

    def acts(self, step: int) -> bool:
        """Tell whether it acts in an optimizer step, whatever the rank."""
        since = step - self.first_step
        return since >= 0 and not self.is_over(step) and since % self.every == 0

    def is_over(self, step: int) -> bool:
        """Tell whether it acts neither in this step nor in a later one."""
        last = self.last_step
        if last is None and not self.LASTS and self.every == 1:
            last = self.first_step
        return last is not None and step > last


class NumericFault(PlantedFault):
    """Changes loss or gradients between the backward pass and the update."""


class NanLoss(NumericFault):
    """The loss is not finite, and so is every gradient that is made of it."""

    LASTS: ClassVar[bool] = False

    kind: Literal["nan_loss"]
    value: Literal["nan", "inf"] = "nan"
    """What the loss is multiplied by."""


class NanGradient(NumericFault):
    """The gradient of one parameter is not finite; the loss is as it was."""

    LASTS: ClassVar[bool] = False

    kind: Literal["nan_gradient"]
    parameter: int | str = 0
    """Its name, or its number in the optimizer's order, from 0."""
    value: Literal["nan", "inf"] = "nan"
    """What the gradient is multiplied by."""


class ScalingFault(NumericFault):
    """Multiplies what a step makes by a factor."""

    factor: float = Field(default=100.0, gt=0, le=_MAX_FACTOR)
    """The factor."""
    signal: Literal["loss", "gradient", "both"] = "both"
    """both: the loss and so its gradients, as a batch would; or only what is reported as the loss,
    or only the gradients."""

    def factor_at(self, step: int) -> float:
        """Return the factor in a step in which the fault acts."""
        del step
        return self.factor


class Spike(ScalingFault):
    """One step stands out, or with `every` one of so many."""

    LASTS: ClassVar[bool] = False

    kind: Literal["spike"]


class Burst(ScalingFault):
    """Several steps in a row stand out."""

    kind: Literal["burst"]
    last_step: int = Field(ge=1)
    """Its last step."""


class LevelShift(ScalingFault):
    """From now on everything is larger: legal, as after a change of the data or the batch."""

    kind: Literal["level_shift"]
    factor: float = Field(default=3.0, gt=0, le=_MAX_FACTOR)
    """The factor."""
    signal: Literal["loss", "gradient", "both"] = "gradient"
    """As for `spike`."""


class Drift(ScalingFault):
    """Everything grows a little every step."""

    kind: Literal["drift"]
    factor: float = Field(default=1.05, gt=0, le=10.0)
    """Growth per step: in step n of the fault the whole is multiplied by its n-th power, up to
    1e30."""

    def factor_at(self, step: int) -> float:
        """Return the factor in a step in which the fault acts."""
        exponent = step - self.first_step + 1
        try:
            grown = self.factor**exponent
        except OverflowError:
            return _MAX_FACTOR
        return min(grown, _MAX_FACTOR)


class PoisonedBatch(NumericFault):
    """A batch of rubbish: a finite loss far too high, and huge gradients that point anywhere."""

    LASTS: ClassVar[bool] = False

    kind: Literal["poisoned_batch"]
    factor: float = Field(default=1.0e4, gt=0, le=_MAX_FACTOR)
    """On the loss, and on the norm of every gradient, whose direction is drawn at random."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of the directions; they differ from step to step."""


class OverflowStorm(NumericFault):
    """Gradients overflow at every loss scale above a limit; the loss stays finite."""

    kind: Literal["overflow_storm"]
    max_loss_scale: float = Field(default=0.0, ge=0)
    """Largest loss scale at which they do not overflow; 0: they do at any, so that no scale
    helps."""


class LearningRateJump(PlantedFault):
    """The learning rate under the policies' own scale is another, as a schedule gone wrong."""

    kind: Literal["learning_rate_jump"]
    rank: None = None
    """Every rank has it: with unequal rates the weights of the ranks would part."""
    factor: float = Field(default=30.0, gt=0, le=1e6)
    """On the learning rate of the optimizer or its schedule."""


class StuckUtilization(PlantedFault):
    """The device reports one utilization, whatever it does."""

    kind: Literal["stuck_utilization"]
    value: float = Field(default=0.05, ge=0, le=1)
    """What is read, 0..1."""


class MemoryClimb(PlantedFault):
    """A leak: every step allocates memory of the host and touches it.

    Readings show a device of `total` bytes, of which is in use what was before the fault and what
    it holds. What does not fit any more ends the run as a full device would, with an error of
    memory that ran out. The limit is checked against the memory that the machine has free.
    """

    kind: Literal["memory_climb"]
    per_step: Size = 32 * 2**20
    """Bytes per step in which it acts."""
    total: Size
    """Size of the device that is reported; what the process itself uses counts as well."""


class SlowData(PlantedFault):
    """The training waits for its data."""

    kind: Literal["slow_data"]
    seconds: Duration = 0.5
    """Wait per optimizer step."""


class SlowRank(PlantedFault):
    """The host of one rank takes longer than the others before it launches its step."""

    kind: Literal["slow_rank"]
    rank: int = Field(ge=0)
    """The slow one."""
    seconds: Duration = 0.2
    """How much longer its step takes."""


class Hang(PlantedFault):
    """A step that does not end; with `watchdog.exit_on_hang` the run ends with code 3."""

    LASTS: ClassVar[bool] = False

    kind: Literal["hang"]
    seconds: Duration = 3600.0
    """How long the training thread stands still."""


def _kind_of(value: Any) -> Any:
    """Return the kind that a fault names; the model of that kind then judges the rest."""
    return value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)


AnyFault = Annotated[
    Annotated[NanLoss, Tag("nan_loss")]
    | Annotated[NanGradient, Tag("nan_gradient")]
    | Annotated[Spike, Tag("spike")]
    | Annotated[Burst, Tag("burst")]
    | Annotated[LevelShift, Tag("level_shift")]
    | Annotated[Drift, Tag("drift")]
    | Annotated[PoisonedBatch, Tag("poisoned_batch")]
    | Annotated[OverflowStorm, Tag("overflow_storm")]
    | Annotated[LearningRateJump, Tag("learning_rate_jump")]
    | Annotated[StuckUtilization, Tag("stuck_utilization")]
    | Annotated[MemoryClimb, Tag("memory_climb")]
    | Annotated[SlowData, Tag("slow_data")]
    | Annotated[SlowRank, Tag("slow_rank")]
    | Annotated[Hang, Tag("hang")],
    Discriminator(
        _kind_of,
        custom_error_type="fault_kind",
        custom_error_message=f"must be a mapping whose kind is one of {', '.join(KINDS)}",
    ),
]
"""A fault of any kind."""


class FaultPlan(Document):
    """faults.yaml: what to plant in a run on purpose, for a drill or a test."""

    FILE: ClassVar[str] = "faults.yaml"

    faults: tuple[AnyFault, ...]

    @model_validator(mode="after")
    def _some(self) -> FaultPlan:
        if not self.faults:
            raise ValueError("must name at least one fault, but got none")
        return self
