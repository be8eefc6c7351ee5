"""How a run is doing, in five dimensions: what report, compare and gate speak of.

Every field of a dimension is a metric; its name is unique over all of them and stands in
`METRICS` with unit and direction. `None` always means that it is not known, and `reasons` says
why where that is not obvious.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from mindtune.controller.contract.base import (
    ContractModel,
    Count,
    Document,
    Number,
    PositiveCount,
)
from mindtune.controller.contract.conditions import RunConditions
from mindtune.controller.contract.outputs import FindingRecord

__all__ = ["METRICS", "Communication", "Convergence", "Metric", "ResourceUse", "RunMetrics",
           "Stability", "StepCounts", "Throughput"]  # fmt: skip


class Metric(NamedTuple):
    """What is to know of a metric besides its value."""

    unit: str
    """Empty: a plain number."""
    better: Literal["higher", "lower"] | None
    """None: neither is better by itself."""
    depends_on: Literal["course", "hardware", "events"]
    """course: where in which training it was taken; hardware: what it ran on; events: neither."""


class StepCounts(ContractModel):
    """What the figures are made of."""

    first_step: Count
    last_step: Count
    recorded: Count
    """Optimizer steps with a record; fewer than were made where a log has an interval."""
    timed: Count
    """Of them, those whose time counts."""
    excluded: dict[str, Count] = Field(default_factory=dict)
    """What the time of the others went into besides training (compile, eval, save; first: the
    first, and the first with a time, of a segment that tells no phase, which compiles) -> how
    many."""
    segments: Count = 1
    """1, and one more after each resume."""
    interval: PositiveCount | None = None
    """Steps that a record stands for; null: written before this was told."""


class Convergence(ContractModel):
    """How far the training has come; where a log holds several, the newest one."""

    first_loss: Number | None = None
    loss: Number | None = None
    """Mean of the last losses: a fifth of all, at most 100; nats."""
    best_loss: Number | None = None
    loss_drop_per_1000_steps: Number | None = None
    """Fall of the least-squares line through the newer half of the losses; above 0: it falls."""
    eval_loss: Number | None = None
    """Newest one."""
    best_eval_loss: Number | None = None
    grad_norm_median: Number | None = None
    grad_norm_p95: Number | None = None
    grad_norm_p99: Number | None = None
    grad_norm_max: Number | None = None


class Throughput(ContractModel):
    """How fast it runs; compile, evaluation and saving left out."""

    step_time_s: Number | None = None
    """Median."""
    step_time_mean_s: Number | None = None
    step_time_p95_s: Number | None = None
    tokens_per_s: Number | None = None
    """Median over steps, all ranks together."""
    samples_per_s: Number | None = None
    mfu: Number | None = None
    """By the exact count per layer; as the run has recorded it, where the model is not known.
    Above 1 it is wrong, and a finding says so."""
    mfu_6n: Number | None = None
    """By the rule of 6 N FLOPs per token."""
    hfu: Number | None = None
    """As `mfu`, with what recomputation adds."""
    training_share: Number | None = None
    """Share of the wall time that went into steps and nothing else."""


class ResourceUse(ContractModel):
    """What it needs."""

    peak_memory_bytes: Number | None = None
    """Worst rank."""
    device_memory_bytes: Number | None = None
    memory_share: Number | None = None
    """Peak over the device's memory."""
    memory_fragmentation: Number | None = None
    """Share of what the allocator has reserved at its peak that it never handed out."""
    data_share: Number | None = None
    """Share of the step time spent waiting for data."""
    compute_share: Number | None = None
    """Share of a profiled step in which kernels ran."""
    host_share: Number | None = None
    """Share of a profiled step that was the host's alone."""
    device_utilization: Number | None = None
    """Mean of the driver's figure: any kernel ran. No measure of work done."""
    device_temperature_c: Number | None = None
    """Highest."""
    device_power_w: Number | None = None
    """Mean."""


class Communication(ContractModel):
    """What the ranks cost each other."""

    communication_share: Number | None = None
    """Share of a profiled step in which ranks exchanged, overlapped or not."""
    communication_overlap: Number | None = None
    """Share of that time in which kernels ran as well."""
    communication_bytes_per_s: Number | None = None
    """Achieved by one rank while it sent, as the profiler tells on Ascend."""
    straggler_ratio: Number | None = None
    """Median of the slowest rank's own time over the median rank's."""


class Stability(ContractModel):
    """How often something goes wrong."""

    stability: Number | None = None
    """As in the score of trials: share of good steps x min(1, median / mean step time)."""
    non_finite_rate: Number | None = None
    """Share of steps with a non-finite loss or gradient norm."""
    loss_spikes_per_1000_steps: Number | None = None
    grad_norm_spikes_per_1000_steps: Number | None = None
    overflow_rate: Number | None = None
    skipped_rate: Number | None = None
    """Share of steps whose update was skipped."""
    interruptions: Number | None = None
    """Resumes, and an end before its time."""
    timeouts: Number | None = None
    """Silences longer than a step may last."""
    repeated_steps_share: Number | None = None
    """Share of steps made once more after a resume: work that an interruption cost."""
    step_time_jitter: Number | None = None
    """Interquartile range of step times over their median."""
    spike_period_steps: Number | None = None
    """Steps from spike to spike, where they come in a rhythm."""
    critical_findings: Number | None = None


def _metric(unit: str, better: Literal["higher", "lower"] | None = None) -> Metric:
    return Metric(unit, better, "hardware")


METRICS: dict[str, Metric] = {
    "first_loss": Metric("nats", None, "course"),
    "loss": Metric("nats", "lower", "course"),
    "best_loss": Metric("nats", "lower", "course"),
    "loss_drop_per_1000_steps": Metric("nats/1000 steps", "higher", "course"),
    "eval_loss": Metric("nats", "lower", "course"),
    "best_eval_loss": Metric("nats", "lower", "course"),
    "grad_norm_median": Metric("", None, "course"),
    "grad_norm_p95": Metric("", "lower", "course"),
    "grad_norm_p99": Metric("", "lower", "course"),
    "grad_norm_max": Metric("", "lower", "course"),
    "step_time_s": _metric("s", "lower"),
    "step_time_mean_s": _metric("s", "lower"),
    "step_time_p95_s": _metric("s", "lower"),
    "tokens_per_s": _metric("tokens/s", "higher"),
    "samples_per_s": _metric("samples/s", "higher"),
    "mfu": _metric("ratio", "higher"),
    "mfu_6n": _metric("ratio", "higher"),
    "hfu": _metric("ratio", "higher"),
    "training_share": _metric("ratio", "higher"),
    "peak_memory_bytes": _metric("bytes", "lower"),
    "device_memory_bytes": _metric("bytes"),
    "memory_share": _metric("ratio", "lower"),
    "memory_fragmentation": _metric("ratio", "lower"),
    "data_share": _metric("ratio", "lower"),
    "compute_share": _metric("ratio", "higher"),
    "host_share": _metric("ratio", "lower"),
    "device_utilization": _metric("ratio", "higher"),
    "device_temperature_c": _metric("degC", "lower"),
    "device_power_w": _metric("W"),
    "communication_share": _metric("ratio", "lower"),
    "communication_overlap": _metric("ratio", "higher"),
    "communication_bytes_per_s": _metric("bytes/s", "higher"),
    "straggler_ratio": _metric("ratio", "lower"),
    "stability": _metric("ratio", "higher"),
    "non_finite_rate": Metric("ratio", "lower", "events"),
    "loss_spikes_per_1000_steps": Metric("1/1000 steps", "lower", "events"),
    "grad_norm_spikes_per_1000_steps": Metric("1/1000 steps", "lower", "events"),
    "overflow_rate": Metric("ratio", "lower", "events"),
    "skipped_rate": Metric("ratio", "lower", "events"),
    "interruptions": Metric("", "lower", "events"),
    "timeouts": Metric("", "lower", "events"),
    "repeated_steps_share": Metric("ratio", "lower", "events"),
    "step_time_jitter": _metric("ratio", "lower"),
    "spike_period_steps": Metric("steps", None, "events"),
    "critical_findings": Metric("", "lower", "events"),
}
"""Every metric, in the order of the sections."""


class RunMetrics(Document):
    """The picture of one run, and what a baseline file holds."""

    FILE: ClassVar[str] = "metrics"

    source: str
    """Name of the folder or log."""
    format: str
    """`run`, `trial`, or the name of a log's reader."""
    outcome: str | None = None
    """How the run ended; null: it goes on, was killed, or a log does not tell."""
    conditions: RunConditions = RunConditions()
    steps: StepCounts
    convergence: Convergence = Convergence()
    throughput: Throughput = Throughput()
    resources: ResourceUse = ResourceUse()
    communication: Communication = Communication()
    stability: Stability = Stability()
    intervals: dict[str, tuple[Number, Number]] = Field(default_factory=dict)
    """Metric -> 95 % interval over the steps of this run (moving-block bootstrap, `metrics.
    bootstrap`); what differs from run to run, such as the seed, is not in it."""
    findings: list[FindingRecord] = Field(default_factory=list)
    """Metrics beyond what is healthy: low MFU, MFU above 1, much waiting for data, full memory."""
    reasons: dict[str, str] = Field(default_factory=dict)
    """Metric -> why it is not known, or what to keep in mind about it."""

    def sections(self) -> Iterator[tuple[str, ContractModel]]:
        """Yield the five dimensions by name."""
        for name in ("convergence", "throughput", "resources", "communication", "stability"):
            yield name, getattr(self, name)

    def values(self) -> dict[str, float | None]:
        """Return every metric by its name."""
        return {name: value for _, section in self.sections() for name, value in section}
