"""The first screen of a run's report: verdict, what happened, what was done, what it cost."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mindtune.controller.contract import FindingRecord
from mindtune.controller.reports.fates import acted, fate_of, is_action
from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Card, Tone, number
from mindtune.controller.reports.recorded import retold
from mindtune.controller.reports.run_records import RunRecords
from mindtune.controller.units import format_duration, format_size
from mindtune.policies.signals import Observation

__all__ = ["Opening", "data_shares", "opening", "values"]

_LAST = 20
"""Losses whose median is called the loss at the end: one alone is mostly noise."""
_SURE = frozenset({"nearly certain", "likely"})
_ORDER = ("critical", "warning", "info")


@dataclass(frozen=True)
class Opening:
    """What the first screen says."""

    tone: Tone
    verdict: str
    lead: str
    quotes: Sequence[str]
    cards: Sequence[Card]


def opening(run: RunRecords, words: Words) -> Opening:
    """Return the first screen."""
    tone, key = _verdict(run)
    quotes = [retold(run.planted, words)] if run.planted else []
    if run.ending is not None and run.ending.message:
        quotes.append(retold(run.ending.message, words))
    return Opening(
        tone=tone,
        verdict=words(f"verdict.{key}"),
        lead=_lead(run, words, key),
        quotes=quotes,
        cards=[
            _result(run, words),
            _happened(run, words),
            _done(run, words),
            _cost(run, words),
            _speed(run, words),
        ],
    )


def _verdict(run: RunRecords) -> tuple[Tone, str]:
    faulty = run.story.verdict == "faulty"
    if run.is_log:
        return ("bad", "log_faulty") if faulty else ("good", "log_healthy")
    if run.ending is None:
        return ("bad", "hung") if run.has_hung else ("plain", "open")
    if run.ending.outcome == "ok":
        return ("attention", "survived") if faulty else ("good", "finished")
    return ("bad", "stopped") if run.ending.outcome == "stopped" else ("bad", "failed")


def _lead(run: RunRecords, words: Words, key: str) -> str:
    last = run.observations[-1]
    outcome = "" if run.ending is None else words.known("outcome", run.ending.outcome)
    parts = [words(f"lead.{key}", outcome=outcome)]
    if run.planted:
        parts.append(words("lead.planted"))
    parts.append(words("lead.last", step=number(last.step), loss=number(last.loss)))
    return words("lead.joint").join(parts)


def _result(run: RunRecords, words: Words) -> Card:
    losses = values(run.observations, "loss")
    steps = number(run.observations[-1].step)
    notes = []
    if losses:
        last = losses[-_LAST:]
        notes.append(words(
            "card.loss", first=number(losses[0]), last=number(statistics.median(last)),
            count=len(last),
        ))  # fmt: skip
    evaluated = values(run.observations, "eval_loss")
    if run.ending is not None and run.ending.eval_loss is not None:
        evaluated = [*evaluated, float(run.ending.eval_loss)]
    if evaluated:
        notes.append(words("card.eval_loss", last=number(evaluated[-1])))
    wall_s = _wall_time(run)
    if wall_s is not None:
        notes.append(words("card.wall", time=format_duration(wall_s)))
    return Card(words("card.result"), words("card.steps", steps=steps), notes)


def _wall_time(run: RunRecords) -> float | None:
    if run.ending is not None:
        return run.ending.wall_s
    times = values(run.observations, "wall_time_s")
    return times[-1] if times else None


def _happened(run: RunRecords, words: Words) -> Card:
    findings = run.story.findings
    counts = Counter(entry.severity for entry in findings)
    notes = [
        words("card.severities", critical=counts["critical"], warning=counts["warning"],
              info=counts["info"])
    ] if findings else []  # fmt: skip
    notes += [
        words("card.worst", what=words.known("finding", entry.kind), step=number(entry.step))
        for entry in _worst(findings)[:2]
    ]
    notes += [
        words(
            "card.cause", sure=words.known("confidence", entry.confidence),
            cause=retold(entry.statement, words),
        )
        for entry in run.story.diagnoses[:1]
        if entry.confidence in _SURE
    ]  # fmt: skip
    return Card(words("card.happened"), words("card.incidents", count=len(findings)), notes)


def _worst(findings: Sequence[FindingRecord]) -> list[FindingRecord]:
    """Return what is no mere remark, the gravest and earliest first."""
    graver = [entry for entry in findings if entry.severity != "info"]
    return sorted(graver, key=lambda entry: (_ORDER.index(entry.severity), entry.step))


def _done(run: RunRecords, words: Words) -> Card:
    fates = Counter(fate_of(record) for record in run.decisions if is_action(record))
    advice = sum(
        record.action == "Advise" and record.policy != "sensors" for record in run.decisions
    )
    done = sum(map(acted, run.decisions))
    notes = [
        words("card.fate", count=count, fate=words(f"fate.{fate}"))
        for fate, count in sorted(fates.items())
    ]
    if advice:
        notes.append(words("card.advice", count=advice))
    if run.is_log:
        return Card(
            words("card.would_do"), words("card.requests", count=fates["observed"]), notes[1:]
        )
    if not fates and not advice:
        notes = [words("card.no_action")]
    return Card(words("card.done"), words("card.actions", count=done), notes)


def _cost(run: RunRecords, words: Words) -> Card:
    steps = len(run.observations)
    skipped = sum(bool(step.update_skipped) for step in run.observations)
    broken = sum(
        step.loss is not None and not math.isfinite(step.loss) for step in run.observations
    )
    returns = [
        record for record in run.decisions
        if record.action == "Rewind" and record.verdict == "granted" and record.acted is not None
    ]  # fmt: skip
    lost = sum(max(0, record.step - int(record.acted or 0)) for record in returns)
    notes = []
    if returns:
        notes.append(words("card.rewound", count=len(returns), steps=number(lost)))
    if broken:
        notes.append(words("card.broken", count=number(broken)))
    for phase in ("compile", "eval", "save"):
        spent = sum(
            step.step_time_s for step in run.observations
            if step.phase == phase and step.step_time_s and math.isfinite(step.step_time_s)
        )  # fmt: skip
        if spent >= 1:
            notes.append(words(f"card.{phase}", time=format_duration(spent)))
    last_action = max((record.step for record in run.decisions if acted(record)), default=None)
    if last_action is not None:
        after = [step for step in run.observations if step.step > last_action]
        good = sum(step.loss is not None and math.isfinite(step.loss) for step in after)
        notes.append(words("card.since", count=number(good)))
    value = words("card.skipped", count=number(skipped), share=f"{skipped / steps:.1%}")
    if all(step.update_skipped is None for step in run.observations):
        value = words("card.skips_unknown")
    return Card(words("card.cost"), value, notes)


def _speed(run: RunRecords, words: Words) -> Card:
    trained = run.trained
    times = values(trained, "step_time_s")
    rates = values(trained, "tokens_per_s")
    value = "-"
    notes = []
    if times:
        value = words("card.step_time", time=format_duration(statistics.median(times)))
    if rates:
        notes.append(words("card.rate", rate=f"{statistics.median(rates):,.0f}"))
    utilization = values(trained, "mfu")
    if utilization:
        notes.append(words("card.mfu", mfu=f"{statistics.median(utilization):.1%}"))
    waits = data_shares(trained)
    if waits:
        notes.append(words("card.waits", share=f"{statistics.median(waits):.1%}"))
    peak = _peak_memory(run)
    if peak is not None:
        notes.append(words("card.memory", size=format_size(peak)))
    return Card(words("card.speed"), value, notes)


def _peak_memory(run: RunRecords) -> float | None:
    """Return the largest memory that was told of, in bytes: the result's, or of the steps."""
    if run.ending is not None and run.ending.peak_memory_bytes is not None:
        return run.ending.peak_memory_bytes
    for name in ("memory_allocated_bytes", "device_memory_used_bytes"):
        measured = values(run.observations, name)
        if measured:
            return max(measured)
    return None


def data_shares(steps: Sequence[Observation]) -> list[float]:
    """Return the share of each step's time that was spent waiting for data."""
    shares = [
        step.data_time_s / step.step_time_s
        for step in steps
        if step.data_time_s is not None and step.step_time_s
    ]
    return [share for share in shares if math.isfinite(share)]


def values(steps: Sequence[Observation], name: str) -> list[float]:
    """Return the finite values of a signal."""
    measured = (getattr(step, name) for step in steps)
    return [value for value in measured if value is not None and math.isfinite(value)]
