"""From a run's records to its row."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindtune.controller.contract import DecisionRecord, RunResult, read_document
from mindtune.controller.errors import ConfigError
from mindtune.controller.records import RunFolder, read_decisions, read_signals
from mindtune.experiments.fault_injection.rows import FaultRow
from mindtune.experiments.fault_injection.seen import (
    SKIP_THRESHOLD,
    false_actions,
    findings_of,
    seen_fault,
    steps_rewound,
)
from mindtune.experiments.provenance import Provenance
from mindtune.policies.findings import FindingKind
from mindtune.policies.signals import Observation

__all__ = ["RowFacts", "measure_run", "steps_above"]

_FINAL_SHARE = 0.1
_ABOVE = 1.15
"""The explosion that the detectors know in the cold start; healthy runs of the workload rise by
1.07 at most."""
_LEAST_STEPS, _LEAST_TOKENS = 3, 6144
"""Text over which a level of the loss is taken: three batches of the reference workload."""
_ADVISE = "Advise"
_SENSORS = "sensors"
"""Name under which the controller's own advice stands, such as that faults are planted."""


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """What a row holds beside the run's own records."""

    fault: str
    guard: str
    seed: int
    config_hash: str
    fault_step: int | None
    wall_s: float
    load_1m: float | None
    others_busy: float | None
    measured: Provenance
    expected: frozenset[FindingKind] = frozenset()
    """Findings that name the fault."""
    justified: frozenset[str] = frozenset()
    """Actions that are an answer to it."""


def measure_run(folder: Path, facts: RowFacts) -> FaultRow:
    """Return the row of a run that has ended.

    Raises:
        ConfigError: Its records are missing or cannot be read.
    """
    records = RunFolder(folder)
    result = read_document(RunResult, records.result)
    steps = [row.observation for row in read_signals(records.signals)]
    if not steps:
        raise ConfigError(f"{records.signals} must hold the steps of a run, but it holds none.")
    decisions = read_decisions(records.decisions)
    above = steps_above([step.loss for step in steps], window=_window(steps))
    skipped = [bool(step.update_skipped) for step in steps]
    seen = seen_fault(
        findings_of(steps),
        fault_step=facts.fault_step,
        expected=facts.expected,
        hung=FindingKind.HANG.value in result.findings,
    )
    lost = [step for step, a, s in zip(steps, above, skipped, strict=True) if a or s]
    return FaultRow(
        fault=facts.fault,
        guard=facts.guard,
        seed=facts.seed,
        config_hash=facts.config_hash,
        outcome=result.outcome,
        message=result.message,
        steps=result.steps,
        samples=sum(_samples(step) for step in steps),
        final_loss=_final_loss(steps),
        validation_loss=result.eval_loss,
        updates_skipped=sum(skipped),
        steps_above=sum(a and not s for a, s in zip(above, skipped, strict=True)),
        samples_lost=sum(_samples(step) for step in lost),
        actions=_kinds(decisions, "granted"),
        undone=sum(record.verdict == "undone" for record in decisions),
        proposed=_kinds(decisions, "observed"),
        advice=tuple(
            str(record.requested)
            for record in decisions
            if record.action == _ADVISE and record.policy != _SENSORS
        ),
        fault_step=facts.fault_step,
        first_action_step=min(
            (record.step for record in decisions if _is_answer(record)), default=None
        ),
        findings=dict(sorted(result.findings.items())),
        detected_step=seen.detected_step,
        other_findings=seen.other_findings,
        false_actions=false_actions(
            decisions, steps, fault_step=facts.fault_step, justified=facts.justified
        ),
        steps_rewound=steps_rewound(decisions),
        final_batch_size=steps[-1].global_batch_size,
        tokens_per_s=_tokens_per_s(steps),
        wall_s=facts.wall_s,
        load_1m=facts.load_1m,
        others_busy=facts.others_busy,
        measured=facts.measured,
    )


def _is_answer(record: DecisionRecord) -> bool:
    """Tell whether a policy did or would have done something that changes the run by itself."""
    return (
        record.verdict in ("granted", "observed")
        and record.policy != _SENSORS
        and record.action != SKIP_THRESHOLD
    )


def steps_above(losses: Sequence[float | None], *, window: int = 3) -> list[bool]:
    """Return per step whether training stood clearly above a loss that it had reached before.

    The median of the newest losses is compared with its own minimum so far; a non-finite loss is
    above anything.

    Args:
        losses: Loss of each step; None: not measured.
        window: Losses that a median is taken of.
    """
    above: list[bool] = []
    newest: list[float] = []
    lowest = math.inf
    for loss in losses:
        if loss is None or not math.isfinite(loss):
            above.append(loss is not None)
            continue
        newest = [*newest, loss][-window:]
        level = statistics.median(newest)
        above.append(level >= _ABOVE * lowest)
        if len(newest) == window:
            lowest = min(lowest, level)
    return above


def _window(steps: Sequence[Observation]) -> int:
    """Return how many steps it takes to see enough text: the loss of one line means little."""
    tokens = steps[0].tokens or _LEAST_TOKENS
    return max(_LEAST_STEPS, math.ceil(_LEAST_TOKENS / tokens))


def _samples(step: Observation) -> int:
    return step.global_batch_size or 0


def _final_loss(steps: Sequence[Observation]) -> float | None:
    count = max(1, round(_FINAL_SHARE * len(steps)))
    losses = [step.loss for step in steps[-count:] if step.loss is not None]
    return statistics.fmean(losses) if losses else None


def _tokens_per_s(steps: Sequence[Observation]) -> float | None:
    timed: list[tuple[int, float]] = [
        (step.tokens, step.step_time_s)
        for step in steps
        if step.phase == "train" and step.tokens is not None and step.step_time_s is not None
    ]
    total_s = math.fsum(time_s for _, time_s in timed)
    return sum(tokens for tokens, _ in timed) / total_s if total_s > 0 else None


def _kinds(decisions: Sequence[DecisionRecord], verdict: Any) -> dict[str, int]:
    return dict(
        sorted(
            Counter(
                record.action
                for record in decisions
                if record.verdict == verdict and record.policy != _SENSORS
            ).items()
        )
    )
