"""The files of a run: decisions.jsonl, result.json and the best_config.yaml it starts from."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from mindtune.controller.contract.base import ContractModel, Count, Document, Number, PositiveCount
from mindtune.controller.contract.fault_plan import AnyFault
from mindtune.controller.contract.live_sections import AlertsSection, WatchdogSection
from mindtune.controller.contract.study_file import PolicySection
from mindtune.controller.contract.trial_section import Command, Host
from mindtune.search.knobs import KnobValue

__all__ = ["MINDFORMERS_KEY", "BestConfig", "DecisionRecord", "GradNormPrior", "Learned",
           "Provenance", "RunResult"]  # fmt: skip

MINDFORMERS_KEY = "mindtune"
"""Top-level key under which a MindFormers YAML carries the content of a best_config.yaml."""


class DecisionRecord(ContractModel):
    """One line of decisions.jsonl."""

    FILE: ClassVar[str] = "decisions.jsonl"

    step: Count
    policy: str
    action: str
    """Class name of the action, such as SetLearningRateScale."""
    requested: Number | str | None = None
    """Value of the set-point, or id of the event."""
    before: Number | None = None
    """Value that acted before."""
    acted: Number | None = None
    """Value that the step reported after; null until known or if nothing was applied."""
    verdict: Literal["granted", "refused", "observed", "undone"]
    reason: str = Field(min_length=1)
    evidence: dict[str, Number | str | None] = Field(default_factory=dict)
    outcome: str | None = None
    """Result of the check after M steps; null until it is known."""
    budget_left: Count | None = None


class GradNormPrior(ContractModel):
    """Gradient-norm statistics of the trials: a prior that expires once a run has its own."""

    median: float = Field(ge=0)
    mad: float = Field(ge=0)
    """Median absolute deviation."""
    samples: PositiveCount
    expires_after_steps: PositiveCount


class Learned(ContractModel):
    """What the trials taught about a healthy run of this config.

    What a run takes from it only ever spares it a mistake, and gives way to what the run itself
    has seen. Times, shares and memory are of the hardware of the trials; none of them raises a
    finding in a run, which has its own after a few steps and may be on another machine.
    """

    step_time_s: float | None = Field(default=None, gt=0)
    """Median; lengthens the watchdog's limit until the run has step times of its own."""
    data_share: float | None = Field(default=None, ge=0)
    """Share of the step time spent waiting for data; to compare with, no threshold follows it: a
    pipeline that starved the trials is a fault in a run, too."""
    peak_memory_bytes: Count | None = None
    """Worst rank; to compare with: where memory runs out is known from the device's own size."""
    loss_scale_min: float | None = Field(default=None, gt=0)
    """Smallest scale of a step that did not overflow; to compare with."""
    loss_scale_max: float | None = Field(default=None, gt=0)
    """Largest one: where a run goes straight to when its scale is far above, unless one of its own
    steps was clean higher up. Short trials may not have reached the largest that fits."""
    grad_norm: GradNormPrior | None = None
    """Stands in until the run has its own; judges sharply only norms that are like these."""


class Provenance(ContractModel):
    """Where a best config comes from; further keys are kept."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    study: str
    trial: Count
    value: Number | None = None
    baseline_value: Number | None = None
    created: str | None = None
    """UTC, ISO 8601."""
    versions: dict[str, str] = Field(default_factory=dict)


class BestConfig(Document):
    """best_config.yaml: the hand-over from a study to a production run."""

    FILE: ClassVar[str] = "best_config.yaml"

    command: Command
    launcher: Literal["none", "msrun", "slurm"] = "none"
    devices_per_node: int | None = Field(default=None, gt=0)
    """Ranks that Slurm, or msrun on `hosts`, starts on each node; null: all on one."""
    hosts: list[Host] | None = None
    """Machines of msrun, the one that starts the run first; null: that one alone."""
    remote_shell: Command | None = None
    """What runs a command line on another host; null: ssh."""
    launch: list[str] = Field(default_factory=list)
    """Without `mindtune run`: msrun's command line on each node, in a shell's spelling. `{config}`
    stands for the program's config: base_config with `overrides`."""
    callback: Literal["mindformers"] | None = None
    """mindformers: `mindtune run` puts our callback into the MindFormers YAML of the run."""
    base_config: str | None = None
    """Relative to this file."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Dotted key of the base config -> value."""
    knobs: dict[str, KnobValue] = Field(default_factory=dict)
    policies: dict[str, PolicySection] = Field(default_factory=dict)
    learned: Learned = Learned()
    alerts: AlertsSection | None = None
    """Null: nobody is told."""
    watchdog: WatchdogSection | None = None
    """Null: the default limits."""
    provenance: Provenance | None = None


class RunResult(Document):
    """result.json of a production run: how it ended."""

    FILE: ClassVar[str] = "result.json"

    outcome: Literal["ok", "stopped", "oom", "bad_config", "non_finite", "crash", "interrupted"]
    """stopped: ended by a policy, with its diagnosis in `message`."""
    steps: Count
    wall_s: float = Field(ge=0)
    final_loss: Number | None = None
    eval_loss: Number | None = None
    peak_memory_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    """Most that the framework's allocator had taken from the device; null: it does not count."""
    mfu: Number | None = None
    actions: Count = 0
    """Actions that were granted and carried out; advice is not counted."""
    findings: dict[str, Count] = Field(default_factory=dict)
    """Finding kind -> how often."""
    effective: dict[str, Any] = Field(default_factory=dict)
    message: str = ""
    planted_faults: tuple[AnyFault, ...] = ()
    """Faults that were planted on purpose: with any, nothing here speaks of a real run."""
