"""What the commands print with `--json`: exactly one document on standard output."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, RootModel

from mindtune.controller.contract.base import ContractModel, Document, Number
from mindtune.search.knobs import KnobValue

__all__ = [
    "AdviceCount",
    "CompareOutput",
    "CompareRow",
    "DiagnosisRecord",
    "DoctorOutput",
    "ExplainOutput",
    "FindingRecord",
    "GateCheck",
    "GateOutput",
    "Predicted",
    "RejectedRule",
    "ReplayDecision",
    "ReplayOutput",
    "ReplayRun",
    "SignalFigures",
    "SpaceConfig",
    "SpaceOutput",
    "Unjudged",
    "UsableFeature",
]


class Predicted(ContractModel):
    """What the cost model expects; null: unknown."""

    memory_bytes: float | None = None
    step_time_s: float | None = None
    mfu: float | None = None


class SpaceConfig(ContractModel):
    """One feasible config."""

    config: dict[str, KnobValue]
    predicted: Predicted = Predicted()


class RejectedRule(ContractModel):
    """How many configs a rule rejected, with one of them; rules that never fired have 0."""

    rule: str
    count: int = Field(ge=0)
    reason: str
    example: dict[str, KnobValue] | None = None


class AdviceCount(ContractModel):
    """How many feasible configs a piece of advice speaks against, with one of them."""

    rule: str
    count: int = Field(ge=0)
    reason: str
    example: dict[str, KnobValue] | None = None


class SpaceOutput(Document):
    """`space --json`: total = feasible + sum of the rules' counts."""

    FILE: ClassVar[str] = "space --json"

    total: int = Field(ge=0)
    feasible: int = Field(ge=0)
    rejected: list[RejectedRule]
    configs: list[SpaceConfig]
    advice: list[AdviceCount] = Field(default_factory=list)
    """Every piece of advice; 0 for one that a constraint has made a rule."""
    emptied_by: str | None = None
    """The smallest set of rules that rejects everything, and why; null where something is left."""
    notes: list[str] = Field(default_factory=list)
    """Limits that judge nothing, and for want of what."""


class ExplainOutput(Document):
    """`space --explain k=v,... --json`: one config under every rule."""

    FILE: ClassVar[str] = "space --explain --json"

    config: dict[str, KnobValue]
    feasible: bool
    rejected: list[RejectedRule]
    """Every hard rule that rejects this config, in order."""
    advice: list[str] = Field(default_factory=list)
    predicted: Predicted = Predicted()


class FindingRecord(ContractModel):
    """One finding of a replay."""

    step: int
    last_step: int
    kind: str
    severity: Literal["info", "warning", "critical"]
    message: str
    evidence: dict[str, Number | str | None] = Field(default_factory=dict)
    run: int = 0
    """Segment of the log, where it holds several."""


class ReplayDecision(ContractModel):
    """One decision of a replay."""

    step: int
    policy: str
    action: str
    value: Number | str | None = None
    reason: str
    run: int = 0
    """Segment of the log, where it holds several."""


class SignalFigures(ContractModel):
    """One signal over a segment; finite values alone."""

    count: int = Field(ge=1)
    first: Number
    last: Number
    median: Number
    low: Number
    low_step: int
    high: Number
    high_step: int
    scatter: Number
    """Mean distance from value to value."""
    non_finite: int = 0
    """NaN and infinite values besides."""


class ReplayRun(ContractModel):
    """One segment of a log: it begins where the steps go back, or a process starts anew."""

    run: int
    first_step: int
    last_step: int
    steps: int = Field(ge=1)
    interval: int = Field(default=1, ge=1)
    """Usual distance from record to record, in steps."""
    resumed: bool = False
    """Whether it goes on from the segment before; otherwise it is a training of its own."""
    skipped: int | None = None
    """Updates that were skipped; null: the log does not say."""
    signals: dict[str, SignalFigures] = Field(default_factory=dict)


class DiagnosisRecord(ContractModel):
    """One cause that a symptom of a run may have."""

    symptom: str
    """What a person would complain of, such as loss_spikes."""
    cause: str
    """Key of the cause, such as bad_batch."""
    statement: str
    """The cause in words."""
    confidence: Literal["nearly certain", "likely", "possible", "cannot be told", "unlikely"]
    evidence_for: list[str] = Field(default_factory=list)
    """Facts with numbers and steps that speak for it."""
    evidence_against: list[str] = Field(default_factory=list)
    missing: list[str] = Field(default_factory=list)
    """What to measure to know, and what it would tell."""
    next_steps: list[str] = Field(default_factory=list)
    """What to do if it is this cause, in order."""
    step: int
    last_step: int
    run: int = 0
    """Segment of the log, where it holds several."""


class Unjudged(ContractModel):
    """What a log says nothing of, for want of a signal."""

    signals: list[str]
    """Any of these would do."""
    judgement: str
    """What could be judged with it."""


class ReplayOutput(Document):
    """`replay --json`."""

    FILE: ClassVar[str] = "replay --json"

    format: str
    records: int = Field(ge=0)
    """Data lines understood."""
    steps: int = Field(ge=0)
    """After merging ranks and repeated lines."""
    signals: list[str]
    findings: list[FindingRecord]
    decisions: list[ReplayDecision]
    verdict: Literal["healthy", "faulty"]
    runs: list[ReplayRun] = Field(default_factory=list)
    """Segments, in the order of the log."""
    notes: list[str] = Field(default_factory=list)
    """Where steps go back, and what cannot be judged for want of a signal."""
    diagnoses: list[DiagnosisRecord] = Field(default_factory=list)
    """Causes of what was found; of each symptom (same symptom, run and step) the surest first."""
    unjudged: list[Unjudged] = Field(default_factory=list)


class UsableFeature(ContractModel):
    """Whether a feature works on this machine, and why or why not."""

    feature: str
    ok: bool
    why: str


class DoctorOutput(Document):
    """`doctor --json`."""

    FILE: ClassVar[str] = "doctor --json"

    versions: dict[str, str | None]
    devices: list[dict[str, Any]]
    usable: list[UsableFeature]
    peaks: list[dict[str, Any]] = Field(default_factory=list)
    """Measured peaks, with `--measure`."""


class CompareRow(ContractModel):
    """One metric of a comparison."""

    metric: str
    unit: str
    baseline: Number | None
    goal: Number | None = None
    achieved: Number | None
    interval: tuple[Number, Number] | None = None
    """Confidence interval (95 %) of achieved / baseline."""
    different: bool | None
    """Null: cannot be told."""
    met: bool | None = None
    """Whether the goal is reached; null: there is none, or nothing to judge by."""
    note: str = ""
    """Why it cannot be told, or what is missing."""


class CompareOutput(RootModel[list[CompareRow]]):
    """`compare --json`."""


class GateCheck(ContractModel):
    """One rule of the gate."""

    rule: str
    ok: bool | None
    """Null: there is nothing to judge by, and the rule does not require it."""
    value: Number | None
    """Null: not measured, or the rule is over how the run ended."""
    limit: Number | None
    message: str


class GateOutput(Document):
    """`gate --json`."""

    FILE: ClassVar[str] = "gate --json"

    passed: bool
    checks: list[GateCheck]
