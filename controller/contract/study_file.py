"""The study file: what to search, on which machine, with which program."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from mindtune.controller.contract.base import ContractModel, Document
from mindtune.controller.contract.trial_section import TrialSection
from mindtune.controller.units import Duration, Rate, Size
from mindtune.search.errors import SearchError
from mindtune.search.knobs import KnobValue, canonical, knob
from mindtune.search.stopping import StopRule

__all__ = [
    "ClusterSection",
    "ConstraintsSection",
    "KnobOverride",
    "ModelSection",
    "PolicySection",
    "ScoreSection",
    "StopSection",
    "StudyFile",
    "StudySection",
    "TrainingSection",
]

_LARGEST = 2**53
"""Whole numbers up to here are floats without loss."""
_MAX_DEVICES = 1_000_000
_LEAST_MEMORY = 2**20
Positive = Field(gt=0, le=_LARGEST)


def _no_bare_gigabytes(value: int) -> int:
    if value < _LEAST_MEMORY:
        raise ValueError(
            f"must be at least 1MB, but got {value} bytes; a number without a unit is bytes: "
            "write 64GB"
        )
    return value


Memory = Annotated[Size, AfterValidator(_no_bare_gigabytes)]
"""Memory of a device."""


class StopSection(ContractModel):
    """When a search ends before its trials are used up."""

    min_gain: float = Field(default=StopRule().min_gain, ge=0, le=1)
    """Stop when no untried config is expected to gain more than this share: 1 - best value /
    value expected, the share of the training's time that it saves where the value is a speed."""
    min_trials: int | None = Field(default=StopRule().min_trials, ge=1, le=_LARGEST)
    """Never stop before so many trials. Null: the base config and one trial per knob that is
    searched, at least 8."""
    patience: int = Field(default=StopRule().patience, ge=1, le=_LARGEST)
    """After so many results in a row no further trial must have paid."""
    training_time: Duration | None = Field(default=None, gt=0)
    """Length of the training that is tuned, with the best config so far: stop when a trial takes
    longer than what it is expected to save of it. Null: not said."""

    def rule(self) -> StopRule:
        """Return the section in the terms of the search."""
        return StopRule(
            min_gain=self.min_gain,
            min_trials=self.min_trials,
            patience=self.patience,
            training_s=self.training_time,
        )


class StudySection(ContractModel):
    """The study itself."""

    name: str = Field(min_length=1, max_length=100, pattern=r"^[\w.\-]+$")
    """Name of the Optuna study: letters, digits, `_`, `-`, `.`."""
    trials: int = Field(default=15, ge=1, le=_LARGEST)
    """Configs to try, the base config included."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the sampler and of every trial; small enough for every library's generator."""
    time_budget: Duration | None = None
    """Start no further trial after this long; null: no limit."""
    sampler: Literal["guided", "staged", "tpe", "random"] = "guided"
    """What proposes configs: guided, the cost model corrected by the trials; staged, the same
    but one thing at a time, memory before parallelism before communication and data; tpe and
    random, Optuna's own."""
    stop: StopSection | None = None
    """When a further trial no longer pays; null: `trials` and `time_budget` alone end a study."""
    storage: str | None = None
    """Null: SQLite in the study folder; or a database URL; or env:NAME to read it from there."""


class ModelSection(ContractModel):
    """Shape of the model; without it there is no cost model and no MFU."""

    num_layers: int = Positive
    hidden_size: int = Positive
    num_heads: int = Positive
    num_kv_heads: int | None = Field(default=None, gt=0, le=_LARGEST)
    """Null: as many as heads."""
    intermediate_size: int = Positive
    gated_mlp: bool = False
    """Three matrices in the MLP instead of two."""
    vocab_size: int = Positive
    seq_length: int = Positive
    tie_embeddings: bool = False
    """The output layer shares the embedding's matrix."""
    flash_attention: bool = False
    num_experts: int | None = Field(default=None, gt=0, le=_LARGEST)
    experts_per_token: int | None = Field(default=None, gt=0, le=_LARGEST)
    moe_intermediate_size: int | None = Field(default=None, gt=0, le=_LARGEST)

    @model_validator(mode="after")
    def _whole_heads(self) -> ModelSection:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_heads, but got {self.hidden_size} and "
                f"{self.num_heads}"
            )
        kv_heads = self.num_kv_heads or self.num_heads
        if self.num_heads % kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, but got {self.num_heads} and "
                f"{kv_heads}"
            )
        if self.num_experts is not None and (self.experts_per_token or 1) > self.num_experts:
            raise ValueError(
                f"experts_per_token must be at most num_experts = {self.num_experts}, but got "
                f"{self.experts_per_token}"
            )
        return self


class ClusterSection(ContractModel):
    """The machine."""

    num_devices: int = Field(gt=0, le=_MAX_DEVICES)
    devices_per_node: int | None = Field(default=None, gt=0, le=_MAX_DEVICES)
    """Null: all devices are in one node."""
    device: str = "cpu"
    """Device name, as in the table of peaks; `cpu` for the host."""
    device_memory: Memory | None = None
    """Memory of one device; null: unknown, then memory is not judged."""
    peak_flops: Literal["measure"] | float | None = None
    """Dense peak of one device at `training.precision`, in FLOP/s; `measure`: by a calibration on
    this machine; null: looked up by device name, unknown if not found."""
    intra_node_bandwidth: Rate | None = None
    inter_node_bandwidth: Rate | None = None
    allow_idle: bool = False
    """Configs may use fewer devices than there are; idle devices count in MFU."""

    @field_validator("peak_flops", mode="before")
    @classmethod
    def _read_peak(cls, value: object) -> object:
        if isinstance(value, (str, int, float)) and value != "measure":
            try:
                number = float(value)  # YAML reads 313e12 as text
            except (ValueError, OverflowError):  # no number, or a whole one beyond all floats
                number = math.nan
            if not isinstance(value, bool) and math.isfinite(number) and number > 0:
                return number
            raise ValueError("must be a positive number of FLOP/s such as 313e12, or `measure`")
        return value

    @model_validator(mode="after")
    def _whole_nodes(self) -> ClusterSection:
        per_node = self.devices_per_node
        if per_node and self.num_devices > per_node and self.num_devices % per_node:
            raise ValueError(
                f"num_devices must be a multiple of devices_per_node = {per_node}, but got "
                f"{self.num_devices}"
            )
        return self


class TrainingSection(ContractModel):
    """What stays the same in every config."""

    global_batch_size: int = Positive
    """Samples per optimizer step over all ranks."""
    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """Names the peak that MFU is taken of, for the whole study."""
    optimizer: str = "adamw"


class ConstraintsSection(ContractModel):
    """Limits that reject a config; what is null or false here is advice at most."""

    memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Largest share of the device memory that a config may use."""
    max_memory: Memory | None = None
    """Most memory that a config may use, whatever the device has."""
    min_memory_utilization: float | None = Field(default=None, ge=0, le=1)
    """Least share of the device memory that a config must use; for spaces full of timid ones."""
    max_pipeline_bubble: float | None = Field(default=None, ge=0, le=1)
    """Largest share of a step that pipeline stages may wait."""
    max_recompute_share: float | None = Field(default=None, ge=0, le=1)
    """Largest share of a step that recomputation may take."""
    min_micro_batches_per_stage: int | None = Field(default=None, ge=1)
    """Smallest micro_batch_num / pipeline_stage where there is a pipeline."""
    max_micro_batches_per_stage: int | None = Field(default=None, ge=1)
    """Largest micro_batch_num / pipeline_stage where there is a pipeline."""
    min_compression: float | None = Field(default=None, ge=0, le=_LARGEST)
    """Least factor by which a gradient compression shrinks float32 gradients."""
    min_overlap_headroom: float | None = Field(default=None, ge=0, le=1)
    """Least share of the device memory that is free where comm_overlap is on."""
    tensor_parallel_inside_node: bool = False
    """Reject tensor parallel groups that span nodes."""
    vocab_divisible: bool = False
    """Reject a tensor parallel degree that the vocabulary has to be padded for."""
    framework: Literal["mindspore", "mindformers", "other"] = "mindspore"
    """Whose own rules hold besides; other: neither MindSpore's nor those of our reducer."""


class ScoreSection(ContractModel):
    """Exponents of the value mfu^a x stability^b."""

    mfu: float = Field(default=1.0, ge=0, le=100)
    stability: float = Field(default=1.0, ge=0, le=100)
    pareto: bool = False
    """Search for the front of MFU and stability instead of the best value: an Optuna study with
    two objectives. No trial is stopped early then. The winner is still chosen by value."""


class PolicySection(ContractModel):
    """Settings of one policy."""

    enabled: bool = True
    mode: Literal["observe", "act"] | None = None
    """Null: the mode of the run."""
    limits: dict[str, float] = Field(default_factory=dict)
    thresholds: dict[str, float] = Field(default_factory=dict)


class KnobOverride(ContractModel):
    """A knob whose values are spelled differently in the user's config."""

    knob: str
    values: dict[str, Any] = Field(default_factory=dict)
    """Canonical value (as text) -> value in the user's config; empty: both spell it alike. A key
    `layers:*` stands for every value that begins so, and the value `{list}` for its numbers."""
    create: bool = False
    """Add the key where the base config lacks it; otherwise that is an error."""

    @field_validator("values", mode="before")
    @classmethod
    def _text_keys(cls, value: object) -> object:
        if isinstance(value, dict):
            return {_as_text(key): entry for key, entry in value.items()}
        return value


def _as_text(key: object) -> str:
    if isinstance(key, bool):
        return "true" if key else "false"
    return "none" if key is None else str(key)


SpaceValue = KnobValue | list[KnobValue]


class StudyFile(Document):
    """The whole study file."""

    FILE: ClassVar[str] = "study file"

    study: StudySection
    trial: TrialSection
    model: ModelSection | None = None
    cluster: ClusterSection
    training: TrainingSection
    space: dict[str, Any]
    """Knob -> value (fixed), list (searched) or `auto`; or {candidates: FILE}."""
    constraints: ConstraintsSection = ConstraintsSection()
    score: ScoreSection = ScoreSection()
    policies: dict[str, PolicySection] = Field(default_factory=dict)
    overrides: dict[str, str | KnobOverride] = Field(default_factory=dict)
    """Dotted key of the user's config -> knob."""

    @model_validator(mode="after")
    def _room_on_hosts(self) -> StudyFile:
        hosts, cluster = self.trial.hosts, self.cluster
        if hosts is None:
            return self
        if self.trial.launcher != "msrun":
            raise ValueError(
                f"trial.hosts needs trial.launcher msrun, but got {self.trial.launcher}; Slurm "
                "chooses its nodes itself"
            )
        if len(set(hosts)) < len(hosts):
            raise ValueError(f"trial.hosts must name each host once, but got {', '.join(hosts)}")
        if cluster.devices_per_node is None:
            raise ValueError("trial.hosts needs cluster.devices_per_node, the ranks of each host")
        if cluster.num_devices > cluster.devices_per_node * len(hosts):
            raise ValueError(
                f"trial.hosts must have room for num_devices = {cluster.num_devices}, but "
                f"{len(hosts)} hosts of devices_per_node = {cluster.devices_per_node} have not"
            )
        return self

    @field_validator("space")
    @classmethod
    def _canonical_space(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "candidates" in value:
            if set(value) != {"candidates"} or not isinstance(value["candidates"], str):
                raise ValueError(
                    "must hold `candidates: FILE` alone or knobs alone, but got "
                    f"{', '.join(map(str, value))}"
                )
            return value
        if not value:
            raise ValueError("must name at least one knob")
        return {str(name): _canonical_values(str(name), entry) for name, entry in value.items()}

    @field_validator("overrides")
    @classmethod
    def _known_knobs(cls, value: dict[str, str | KnobOverride]) -> dict[str, str | KnobOverride]:
        for target in value.values():
            name = target if isinstance(target, str) else target.knob
            if name in ("micro_batch_num", "global_batch_size"):
                continue
            try:
                knob(name)
            except SearchError as error:
                raise ValueError(str(error)) from None
        return value


def _canonical_values(name: str, entry: object) -> SpaceValue:
    try:
        if entry == "auto":
            knob(name)
            return "auto"
        if isinstance(entry, list):
            if not entry:
                raise ValueError(f"{name} must list at least one value, but got []")
            # Lists per stage, `[[2, 1], [1, 1]]`, are values of their own.
            values = [canonical(name, value) for value in entry]
            if len(set(map(repr, values))) != len(values):
                raise ValueError(f"{name} must list each value once, but got {entry!r}")
            return values
        return canonical(name, entry)
    except SearchError as error:
        raise ValueError(str(error)) from None
