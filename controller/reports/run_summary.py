"""The first screen of a run's report: verdict, what happened, what was done, what it cost."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mindtune.controller.contract import FindingRecord
from mindtune.controller.reports.fates import acted, fate_of, is_action
from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Card, Tone, number, time_text
from mindtune.controller.reports.recorded import retold
from mindtune.controller.reports.run_records import RunRecords
from mindtune.controller.units import format_duration, format_size

__all__ = ["Opening", "opening"]

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
    match run.ending.outcome:
        case "ok":
            return ("attention", "survived") if faulty else ("good", "finished")
        case "stopped":
            return "bad", "stopped"
        case "pruned" | "interrupted":
            return "attention", "ended"
    return "bad", "failed"


def _lead(run: RunRecords, words: Words, key: str) -> str:
    outcome = "" if run.ending is None else words.known("outcome", run.ending.outcome)
    parts = [words(f"lead.{key}", outcome=outcome)]
    if run.planted:
        parts.append(words("lead.planted"))
    step, loss = number(run.steps.last_step), run.steps.last_loss
    parts.append(
        words("lead.last_step", step=step)
        if loss is None
        else words("lead.last", step=step, loss=number(loss))
    )
    return words("lead.joint").join(parts)


def _result(run: RunRecords, words: Words) -> Card:
    told = run.steps
    notes = []
    if told.last_losses:
        notes.append(words(
            "card.loss", first=number(told.first_loss),
            last=number(statistics.median(told.last_losses)), count=len(told.last_losses),
        ))  # fmt: skip
    elif told.broken_losses:
        notes.append(words("card.no_loss"))
    evaluated = told.eval_loss
    if run.ending is not None and run.ending.eval_loss is not None:
        evaluated = float(run.ending.eval_loss)
    if evaluated is not None:
        notes.append(words("card.eval_loss", last=number(evaluated)))
    wall_s = told.wall_time_s if run.ending is None else run.ending.wall_s
    if wall_s is not None:
        notes.append(words("card.wall", time=format_duration(wall_s)))
    steps = words("card.steps", steps=number(told.last_step))
    return Card(words("card.result"), steps, notes)


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
    count = sum(
        record.action == "Advise" and record.policy != "sensors" for record in run.decisions
    )
    advice = [words("card.advice", count=count)] if count else []
    if run.is_log:
        requests = words("card.requests", count=fates["observed"])
        return Card(words("card.would_do"), requests, advice)
    notes = [
        words("card.fate", count=count, fate=words(f"fate.{fate}"))
        for fate, count in sorted(fates.items())
    ]
    done = words("card.actions", count=sum(map(acted, run.decisions)))
    return Card(words("card.done"), done, [*notes, *advice] or [words("card.no_action")])


def _cost(run: RunRecords, words: Words) -> Card:
    told = run.steps
    returns = [
        record for record in run.decisions
        if record.action == "Rewind" and record.verdict == "granted" and record.acted is not None
    ]  # fmt: skip
    lost = sum(max(0, record.step - int(record.acted or 0)) for record in returns)
    notes = []
    if returns:
        notes.append(words("card.rewound", count=len(returns), steps=number(lost)))
    if told.broken_losses:
        notes.append(words("card.broken", count=number(told.broken_losses)))
    notes += [
        words(f"card.{phase}", time=format_duration(spent_s))
        for phase, spent_s in told.spent_s.items()
        if spent_s >= 1
    ]
    if any(map(acted, run.decisions)):
        notes.append(words("card.since", count=number(told.losses_since_action)))
    value = words("card.skips_unknown")
    if "update_skipped" in told.signals:
        share = f"{told.skipped / told.count:.1%}"
        value = words("card.skipped", count=number(told.skipped), share=share)
    return Card(words("card.cost"), value, notes)


def _speed(run: RunRecords, words: Words) -> Card:
    times, rates, utilization = (
        run.steps.distributions[name] for name in ("step_time_s", "tokens_per_s", "mfu")
    )
    value = "-"
    notes = []
    if times:
        value = words("card.step_time", time=time_text(statistics.median(times)))
    if rates:
        notes.append(words("card.rate", rate=f"{statistics.median(rates):,.0f}"))
    if utilization:
        notes.append(words("card.mfu", mfu=f"{statistics.median(utilization):.1%}"))
    if run.steps.waits:
        share = f"{statistics.median(run.steps.waits):.1%}"
        notes.append(words("card.waits", share=share))
    peak = _peak_memory(run)
    if peak is not None:
        notes.append(words("card.memory", size=format_size(peak)))
    return Card(words("card.speed"), value, notes)


def _peak_memory(run: RunRecords) -> float | None:
    """Return the largest memory that was told of, in bytes: the result's, or of the steps."""
    if run.ending is not None and run.ending.peak_memory_bytes is not None:
        return run.ending.peak_memory_bytes
    peaks = run.steps.peak_bytes
    return peaks.get("memory_allocated_bytes", peaks.get("device_memory_used_bytes"))
