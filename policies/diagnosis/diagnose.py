"""From a run's incidents to their causes, each with the evidence for and against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mindtune.policies.diagnosis.case import Case, RunContext
from mindtune.policies.diagnosis.cause import Cause, judge
from mindtune.policies.diagnosis.history import History
from mindtune.policies.diagnosis.learning import LEARNING
from mindtune.policies.diagnosis.memory import MEMORY
from mindtune.policies.diagnosis.model import Confidence, Diagnosis, Symptom
from mindtune.policies.diagnosis.pace import HANG, SLOW_STEPS
from mindtune.policies.diagnosis.precision import NON_FINITE, OVERFLOWS
from mindtune.policies.diagnosis.signals_amiss import (
    ATTENTION_MISSING,
    HIDDEN_STEPS,
    ODD_GRADIENT,
    UNRULY_KNOB,
    WRONG_FIGURE,
)
from mindtune.policies.diagnosis.spikes import DIVERGENCE, SPIKES
from mindtune.policies.diagnosis.utilization import LOW_MFU
from mindtune.policies.findings import Finding, FindingKind, Severity

__all__ = ["CAUSES", "diagnose"]

CAUSES: Final[dict[Symptom, tuple[Cause, ...]]] = {
    Symptom.NON_FINITE: NON_FINITE,
    Symptom.DIVERGENCE: DIVERGENCE,
    Symptom.OVERFLOWS: OVERFLOWS,
    Symptom.LOSS_SPIKES: SPIKES,
    Symptom.LOSS_NOT_FALLING: LEARNING,
    Symptom.ODD_GRADIENT: ODD_GRADIENT,
    Symptom.MEMORY: MEMORY,
    Symptom.HANG: HANG,
    Symptom.SLOW_STEPS: SLOW_STEPS,
    Symptom.LOW_MFU: LOW_MFU,
    Symptom.WRONG_FIGURE: WRONG_FIGURE,
    Symptom.HIDDEN_STEPS: HIDDEN_STEPS,
    Symptom.ATTENTION_MISSING: ATTENTION_MISSING,
    Symptom.UNRULY_KNOB: UNRULY_KNOB,
}
"""Symptom -> its causes in the order in which to look; the symptoms in the order in which they
take a run down."""

_SYMPTOM_OF: Final[dict[FindingKind, Symptom]] = {
    FindingKind.NON_FINITE_LOSS: Symptom.NON_FINITE,
    FindingKind.NON_FINITE_GRAD: Symptom.NON_FINITE,
    FindingKind.LOSS_SPIKE: Symptom.LOSS_SPIKES,
    FindingKind.GRAD_NORM_SPIKE: Symptom.LOSS_SPIKES,
    FindingKind.PERIODIC_SPIKES: Symptom.LOSS_SPIKES,
    FindingKind.DIVERGENCE: Symptom.DIVERGENCE,
    FindingKind.FROZEN_LOSS: Symptom.LOSS_NOT_FALLING,
    FindingKind.NO_TRAINABLE_PARAMETERS: Symptom.LOSS_NOT_FALLING,
    FindingKind.GRAD_NORM_VANISHING: Symptom.ODD_GRADIENT,
    FindingKind.CLIP_SATURATION: Symptom.ODD_GRADIENT,
    FindingKind.OVERFLOW_STORM: Symptom.OVERFLOWS,
    FindingKind.OVERFLOW_WITHOUT_EFFECT: Symptom.OVERFLOWS,
    FindingKind.LOSS_SCALE_FLOOR: Symptom.OVERFLOWS,
    FindingKind.LOSS_SCALE_RUNAWAY: Symptom.OVERFLOWS,
    FindingKind.DATA_STALL: Symptom.SLOW_STEPS,
    FindingKind.STEP_TIME_SPIKE: Symptom.SLOW_STEPS,
    FindingKind.STRAGGLER: Symptom.SLOW_STEPS,
    FindingKind.LOW_UTILIZATION: Symptom.LOW_MFU,
    FindingKind.MEMORY_PRESSURE: Symptom.MEMORY,
    FindingKind.HANG: Symptom.HANG,
    FindingKind.MFU_INVALID: Symptom.WRONG_FIGURE,
    FindingKind.HIDDEN_STEPS: Symptom.HIDDEN_STEPS,
    FindingKind.KNOB_INEFFECTIVE: Symptom.UNRULY_KNOB,
}
_TOGETHER = 64
"""Records between incidents of one symptom that still make one case."""
_MOST_CASES = 8
"""Cases of one symptom that are diagnosed, the first ones: what comes later has their causes."""
_LOW_MFU = 0.3
_JUDGED_LOSSES = 128
"""Losses from which a whole run may be said not to learn."""
_FALL = 0.01
"""Fall of the loss over a run, by its level, below which it is none."""
_ORDER = {confidence: rank for rank, confidence in enumerate(Confidence)}


def diagnose(
    history: History, incidents: Sequence[Finding], context: RunContext | None = None
) -> tuple[Diagnosis, ...]:
    """Return the causes of what was found in one segment of a run.

    Args:
        history: Its signals.
        incidents: What was found in it, merged (`incidents.merge`). Notes (severity info) are no
            symptoms by themselves, but count as evidence.
        context: What other records of the run tell.

    Returns:
        All causes that anything can be said of, case by case in the order of their steps; within
        a case the surest cause first, equally sure ones in the order in which to look.
    """
    context = RunContext() if context is None else context
    ordered = tuple(sorted(incidents, key=lambda finding: finding.step))
    cases = _cases(history, ordered, context)
    return tuple(diagnosis for case in cases for diagnosis in _causes(case))


def _causes(case: Case) -> list[Diagnosis]:
    judged = (judge(case, cause) for cause in CAUSES[case.symptom])
    found = [diagnosis for diagnosis in judged if diagnosis is not None]
    return sorted(found, key=lambda diagnosis: _ORDER[diagnosis.confidence])


def _cases(history: History, incidents: tuple[Finding, ...], context: RunContext) -> list[Case]:
    apart = _TOGETHER * history.interval
    groups: dict[Symptom, list[list[Finding]]] = {}
    for finding in incidents:
        symptom = _SYMPTOM_OF.get(finding.kind)
        if symptom is None or not _counts(finding, context):
            continue
        groups_of = groups.setdefault(symptom, [])
        if groups_of and finding.step <= max(f.last_step for f in groups_of[-1]) + apart:
            groups_of[-1].append(finding)
        else:
            groups_of.append([finding])
    _part_of_worse(groups, history.interval)
    cases = [
        Case(symptom, tuple(group), history, incidents, context)
        for symptom, found in groups.items()
        for group in found[:_MOST_CASES]
    ]
    cases += [
        Case(symptom, (), history, incidents, context)
        for symptom in _of_the_whole(history, context)
        if symptom not in groups
    ]
    rank = {symptom: place for place, symptom in enumerate(CAUSES)}
    return sorted(cases, key=lambda case: (not case.incidents, case.first, rank[case.symptom]))


def _part_of_worse(groups: dict[Symptom, list[list[Finding]]], interval: int) -> None:
    """Leave out spikes that lead to a divergence or to NaN: they are evidence there."""
    worse = [
        (min(f.step for f in group), max(f.last_step for f in group))
        for symptom in (Symptom.DIVERGENCE, Symptom.NON_FINITE)
        for group in groups.get(symptom, [])
    ]
    apart = _TOGETHER * interval
    alone = [
        group
        for group in groups.get(Symptom.LOSS_SPIKES, [])
        if not any(
            group[0].step <= last + apart and max(f.last_step for f in group) >= first - apart
            for first, last in worse
        )
    ]
    if Symptom.LOSS_SPIKES in groups:
        groups[Symptom.LOSS_SPIKES] = alone


def _counts(finding: Finding, context: RunContext) -> bool:
    """Return whether a finding is a symptom: more than a note, or steps that ought to be there."""
    if finding.kind is FindingKind.HIDDEN_STEPS:
        return context.every_step is True
    return finding.severity is not Severity.INFO


def _of_the_whole(history: History, context: RunContext) -> list[Symptom]:
    """Return the symptoms that no single step shows."""
    symptoms = []
    loss, mfu = history.course("loss"), history.course("mfu")
    if loss is not None and loss.count >= _JUDGED_LOSSES:
        begin, end = loss.part(0.0, 0.1), loss.part(0.8, 1.0)
        if begin - end < _FALL * abs(begin):
            symptoms.append(Symptom.LOSS_NOT_FALLING)
    if mfu is not None and mfu.count >= 8 and 0 < mfu.median < _LOW_MFU:
        symptoms.append(Symptom.LOW_MFU)
    if context.outcome == "oom":
        symptoms.append(Symptom.MEMORY)
    if context.has_attention is False:
        symptoms.append(Symptom.ATTENTION_MISSING)
    return symptoms
