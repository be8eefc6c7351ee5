"""What a replay shows, as an engineer would tell a colleague.

In order: what kind of run it was and how long, the verdict and why, what happened when, the
likeliest causes with their evidence and what else it may have been, what the policies would have
done, and what cannot be judged. What is alike is told once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mindtune.controller.contract import (
    DiagnosisRecord,
    FindingRecord,
    ReplayDecision,
    ReplayOutput,
    ReplayRun,
)
from mindtune.controller.units import format_duration
from mindtune.policies.diagnosis import Symptom, spelled_vocabulary

__all__ = ["Chapter", "Line", "tell"]

Style = Literal["", "critical", "warning", "good", "quiet"]

_TOLD_SEGMENTS = 6
_TOLD_PER_KIND = 4
_TOLD_FINDINGS = 16
_TOLD_CASES = 4
_TOLD_EVIDENCE = 4
_TOLD_VALUES = 6
_SEVERITIES = ("critical", "warning", "info")
_SYMPTOMS = {
    Symptom.LOSS_NOT_FALLING: "the loss does not fall",
    Symptom.LOSS_SPIKES: "spikes",
    Symptom.DIVERGENCE: "the loss goes up",
    Symptom.NON_FINITE: "NaN or infinity",
    Symptom.OVERFLOWS: "overflows",
    Symptom.MEMORY: "memory is short",
    Symptom.SLOW_STEPS: "slow steps",
    Symptom.HANG: "the run stands still",
    Symptom.LOW_MFU: "the devices are little used",
    Symptom.ODD_GRADIENT: "an odd gradient",
    Symptom.HIDDEN_STEPS: "steps are hidden",
    Symptom.WRONG_FIGURE: "a figure that cannot be true",
    Symptom.ATTENTION_MISSING: "no attention weights",
    Symptom.UNRULY_KNOB: "a knob that does not obey",
}
_LIKELY = ("nearly certain", "likely", "possible")


@dataclass(frozen=True)
class Line:
    """One paragraph of a chapter."""

    text: str
    style: Style = ""
    depth: int = 0
    """How far it is set in, in steps of two columns."""
    label: str = ""
    """What stands before it in a column of its own, such as the steps."""


@dataclass
class Chapter:
    """A heading and what stands below it."""

    heading: str
    lines: list[Line] = field(default_factory=list)


def tell(output: ReplayOutput, name: str) -> list[Chapter]:
    """Return the story of a replay.

    Args:
        output: What was found.
        name: What was replayed, for the heading.
    """
    chapters = [
        Chapter(name, list(_what_it_was(output))),
        Chapter(f"verdict: {output.verdict}", list(_why(output))),
    ]
    several = len(output.runs) > 1
    if output.findings:
        chapters.append(Chapter("what happened", list(_events(output, several=several))))
    causes = list(_causes(output, several=several))
    if causes:
        chapters.append(Chapter("why, most likely", causes))
    chapters.append(Chapter("what the policies would have done", list(_actions(output))))
    notes = [Line(f"{note[:1].upper()}{note[1:]}") for note in output.notes]
    if notes:
        chapters.append(Chapter("to keep in mind", notes))
    return chapters


def _what_it_was(output: ReplayOutput) -> Iterator[Line]:
    runs = output.runs
    where = f"in {len(runs)} segments"
    if len(runs) == 1:
        where = f"from step {runs[0].first_step} to {runs[0].last_step}"
    interval = "" if runs[0].interval == 1 else f", one in {runs[0].interval}"
    yield Line(
        f"{output.format}: {output.records} data lines, {output.steps} steps{interval}, {where}; "
        f"it tells of {', '.join(output.signals)}"
    )
    for run in runs[:_TOLD_SEGMENTS]:
        label = f"segment {run.run}" if len(runs) > 1 else ""
        for text in _facts(run, several=len(runs) > 1):
            yield Line(text, label=label)
            label = " " * len(label)
    if len(runs) > _TOLD_SEGMENTS:
        yield Line(f"and {len(runs) - _TOLD_SEGMENTS} segments more", style="quiet")


def _facts(run: ReplayRun, *, several: bool) -> Iterator[str]:
    if several:
        how = "resumed" if run.resumed else "a training of its own"
        steps = f"steps {run.first_step} to {run.last_step}"
        yield f"{f'step {run.first_step}' if run.steps == 1 else steps}, {how}"
    loss = run.signals.get("loss")
    if loss is not None:
        yield _course_of_loss(run)
    rate, norm = run.signals.get("learning_rate"), run.signals.get("grad_norm")
    parts = []
    if rate is not None:
        parts.append(_course_of_rate(run))
    if norm is not None:
        parts.append(
            f"gradient norm usually {norm.median:.3g}, at most {norm.high:.3g} in step "
            f"{norm.high_step}"
        )
    if run.skipped:
        parts.append(f"{run.skipped} updates skipped")
    if parts:
        yield "; ".join(parts)
    pace = _pace(run)
    if pace:
        yield pace


def _course_of_loss(run: ReplayRun) -> str:
    loss = run.signals["loss"]
    text = f"loss {loss.first:.4g} to {loss.last:.4g}"
    if loss.low < min(loss.first, loss.last):
        text += f", lowest {loss.low:.4g} in step {loss.low_step}"
    if loss.non_finite:
        text += f", and {loss.non_finite} that are NaN or infinite"
    guess = spelled_vocabulary(loss.first, None, near=0.25)
    if loss.low < 0 < loss.high or (loss.median == 0 and loss.high > 0):
        text += ": it scatters around zero, as a policy's or an adversary's does"
    elif loss.count >= 16 and loss.scatter > 0.25 * abs(loss.median):
        text += f"; it moves by {loss.scatter / abs(loss.median):.0%} of itself from step to step"
    elif run.first_step <= 10 and guess is not None and loss.last < 0.9 * loss.first:
        text += f": a language model from scratch, by its begin near {guess}"
    return text


def _course_of_rate(run: ReplayRun) -> str:
    rate = run.signals["learning_rate"]
    if rate.low == rate.high:
        return f"learning rate {rate.high:.4g} throughout"
    if rate.high_step >= run.last_step:
        return f"learning rate still rising, {rate.first:.3g} to {rate.last:.3g}"
    if rate.high_step <= run.first_step:
        return f"learning rate falling, {rate.first:.4g} to {rate.last:.3g}"
    text = f"learning rate at most {rate.high:.4g} in step {rate.high_step}"
    return f"{text}, {rate.last:.3g} at the end"


def _pace(run: ReplayRun) -> str:
    wall, step = run.signals.get("wall_time_s"), run.signals.get("step_time_s")
    wait, mfu = run.signals.get("data_time_s"), run.signals.get("mfu")
    parts = []
    if step is not None:
        parts.append(f"a step usually takes {_time(step.median)}")
    if wait is not None and step is not None and step.median > 0:
        parts.append(f"{wait.median / step.median:.0%} of it waiting for data")
    if mfu is not None:
        parts.append(f"MFU {mfu.median:.0%}")
    if wall is not None and wall.last > wall.first:
        parts.append(f"{format_duration(wall.last - wall.first)} in all")
    elif step is not None:
        steps = run.last_step - run.first_step + 1
        parts.append(f"about {format_duration(step.median * steps)} of training")
    return "; ".join(parts)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if 1 <= seconds < 60 else format_duration(seconds)


def _why(output: ReplayOutput) -> Iterator[Line]:
    critical = [finding for finding in output.findings if finding.severity == "critical"]
    warnings = sum(finding.severity == "warning" for finding in output.findings)
    if critical:
        first = min(critical, key=lambda finding: (finding.run, finding.step))
        count = "one critical fault" if len(critical) == 1 else f"{len(critical)} critical faults"
        where = f"step {first.step}"
        if len(output.runs) > 1:
            where += f" of segment {first.run}"
        begins = "in" if len(critical) == 1 else "the first in"
        yield Line(f"{count}, {begins} {where}: {first.message}", style="critical")
        return
    if warnings:
        yield Line(f"nothing critical; {warnings} warning{'s' * (warnings > 1)}", style="warning")
    elif output.findings:
        yield Line("nothing but notes: what is usual in a healthy run", style="good")
    else:
        yield Line("nothing was found", style="good")


def _events(output: ReplayOutput, *, several: bool) -> Iterator[Line]:
    """Yield warnings and worse in their order, the first few of a kind; notes by kind."""
    groups: dict[tuple[str, str], list[FindingRecord]] = defaultdict(list)
    for finding in output.findings:
        groups[finding.severity, finding.kind].append(finding)
    told: list[tuple[FindingRecord, str]] = []
    for severity in _SEVERITIES[:2]:
        for (grade, _), group in groups.items():
            if grade != severity:
                continue
            shown = group[: max(1, min(_TOLD_PER_KIND, _TOLD_FINDINGS - len(told)))]
            told += [(finding, "") for finding in shown[:-1]]
            told.append((shown[-1], _more(group[len(shown) :])))
    for finding, more in sorted(told, key=lambda entry: (entry[0].run, entry[0].step)):
        yield Line(
            f"{finding.kind}: {finding.message}{more}",
            style=finding.severity if finding.severity != "info" else "",
            label=_place(finding, several=several),
        )
    for (grade, kind), group in groups.items():
        if grade == "info":
            text = f"note: {kind}: {group[0].message}{_more(group[1:])}"
            yield Line(text, style="quiet", label=_place(group[0], several=several))


def _more(rest: Sequence[FindingRecord]) -> str:
    if not rest:
        return ""
    return f" (and {len(rest)} more, up to step {rest[-1].last_step})"


def _place(entry: FindingRecord | DiagnosisRecord, *, several: bool) -> str:
    steps = str(entry.step) if entry.step == entry.last_step else f"{entry.step}-{entry.last_step}"
    return f"{entry.run}: {steps}" if several else steps


def _causes(output: ReplayOutput, *, several: bool) -> Iterator[Line]:
    cases: dict[tuple[int, int, str], list[DiagnosisRecord]] = defaultdict(list)
    for entry in output.diagnoses:
        cases[entry.run, entry.step, entry.symptom].append(entry)
    critical = (finding for finding in output.findings if finding.severity == "critical")
    grave = {(finding.run, finding.step) for finding in critical}
    # What is critical first, and each in the order of the log.
    ordered = sorted(cases.items(), key=lambda entry: entry[0][:2] not in grave)
    for number, (_, causes) in enumerate(ordered):
        if number >= _TOLD_CASES:
            left = len(cases) - number
            yield Line(f"and {left} more; --json has them all", style="quiet")
            return
        yield from _case(causes, several=several)


def _case(causes: Sequence[DiagnosisRecord], *, several: bool) -> Iterator[Line]:
    best = causes[0]
    symptom = _SYMPTOMS[Symptom(best.symptom)]
    label = _place(best, several=several)
    if best.confidence not in _LIKELY:
        yield Line(f"{symptom}: no cause can be told from this log", label=label)
    else:
        yield Line(f"{symptom}: {best.statement} ({best.confidence})", label=label)
        for text in best.evidence_for[:_TOLD_EVIDENCE]:
            yield Line(f"for: {text}", depth=1)
        for text in best.evidence_against[:_TOLD_EVIDENCE]:
            yield Line(f"against: {text}", depth=1)
        for text in best.next_steps:
            yield Line(f"do: {text}", depth=1)
    others = [entry for entry in causes[1:] if entry.confidence in _LIKELY]
    for entry in others:
        text = f"or: {entry.statement} ({entry.confidence}): {entry.evidence_for[0]}"
        yield Line(text, depth=1, style="quiet")
    out = [
        f"{entry.cause.replace('_', ' ')} ({entry.evidence_against[0]})"
        for entry in causes
        if entry.confidence == "unlikely" and entry.evidence_against
    ]
    if out:
        yield Line(f"hardly: {'; '.join(out)}", depth=1, style="quiet")
    if best.confidence == "nearly certain":
        return
    missing = dict.fromkeys(text for entry in causes for text in entry.missing)
    for text in list(missing)[:_TOLD_EVIDENCE]:
        yield Line(f"to know, measure {text}", depth=1, style="quiet")


def _actions(output: ReplayOutput) -> Iterator[Line]:
    asked = [entry for entry in output.decisions if entry.action != "Advise"]
    if not asked:
        yield Line("nothing: the policies would have left this run alone", style="good")
    groups: dict[tuple[int, str, str], list[ReplayDecision]] = defaultdict(list)
    for entry in asked:
        groups[entry.run, entry.policy, entry.action].append(entry)
    several = len(output.runs) > 1
    for (run, policy, action), group in groups.items():
        values = [_move(entry) for entry in group[:_TOLD_VALUES]]
        more = f" and {len(group) - _TOLD_VALUES} times more" * (len(group) > _TOLD_VALUES)
        where = f"segment {run}, " if several else ""
        yield Line(f"{where}{policy}: {action} {', '.join(values)}{more}: {group[0].reason}")
    advice = [entry for entry in output.decisions if entry.action == "Advise"]
    for entry in advice[:_TOLD_VALUES]:
        yield Line(f"step {entry.step}: {entry.policy} advises: {entry.reason}")
    if len(advice) > _TOLD_VALUES:
        yield Line(f"and {len(advice) - _TOLD_VALUES} pieces of advice more", style="quiet")


def _move(entry: ReplayDecision) -> str:
    if isinstance(entry.value, float) and math.isfinite(entry.value):
        return f"to {entry.value:.4g} in step {entry.step}"
    return f"in step {entry.step}"
