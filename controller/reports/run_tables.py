"""The tables of a run's report: incidents, decisions, and where everything comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindtune.controller.contract import DecisionRecord, DiagnosisRecord, FindingRecord
from mindtune.controller.reports.fates import fate_of, request_text
from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import Column, Quoted, Section, Table, number
from mindtune.controller.reports.recorded import retold
from mindtune.controller.reports.run_records import RunRecords
from mindtune.policies.signals import SIGNAL_NAMES

__all__ = ["decisions_section", "diagnosis_section", "incidents_section", "provenance_section"]

_MOST_ROWS = 500
_LONGEST = 300
"""Characters shown of a value of a config."""
_SECRET = re.compile(
    r"(?i)passw|secret|credential|(^|_)(auth|token|pat)$|api_?key|access_?key|private_?key"
)
"""Keys of a program's config whose values a reader need not know."""
_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
"""User and password in an address."""
_SPELLED = {None: "null", True: "true", False: "false"}
"""As YAML has them."""
_NO_SIGNAL = frozenset({"step", "run", "phase"})
_SEVERITIES = ("critical", "warning", "info")


def incidents_section(run: RunRecords, words: Words) -> Section:
    """Return what the detectors found, each with what it means."""
    title = words("section.incidents")
    findings = sorted(
        run.story.findings, key=lambda entry: (_SEVERITIES.index(entry.severity), entry.step)
    )
    if not findings:
        return Section(title, text=words("incidents.none"))
    columns = [
        Column(words("column.severity")), Column(words("column.finding")),
        Column(words("column.steps"), number=True), Column(words("column.meaning")),
        Column(words("column.evidence")),
    ]  # fmt: skip
    groups: dict[tuple[str, str, str], list[FindingRecord]] = {}
    for entry in findings:
        groups.setdefault((entry.severity, entry.kind, entry.message), []).append(entry)
    rows = [
        [
            words(f"severity.{severity}"),
            words.known("finding", kind),
            _times(entries, words),
            words.known("meaning", kind),
            retold(message, words),
        ]
        for (severity, kind, message), entries in list(groups.items())[:_MOST_ROWS]
    ]
    grave = frozenset(
        index for index, (severity, _, _) in enumerate(groups) if severity == "critical"
    )
    return Section(
        title,
        text=words("incidents.text"),
        table=Table(columns, rows, strong=grave),
        note=_cut(len(groups), words, "mindtune replay --json"),
    )


def _times(entries: Sequence[FindingRecord], words: Words) -> str:
    """Return the steps of equal incidents, which several segments of a log may have."""
    text = _range(entries[0].step, entries[0].last_step)
    return text if len(entries) == 1 else words("card.times", range=text, count=len(entries))


def diagnosis_section(run: RunRecords, words: Words) -> Section | None:
    """Return the causes of what was found, with what speaks for and against each."""
    known = [entry for entry in run.story.diagnoses if entry.confidence != "unlikely"]
    if not known:
        return None
    columns = [
        Column(words("column.symptom")), Column(words("column.steps"), number=True),
        Column(words("column.confidence")), Column(words("column.cause")),
        Column(words("column.clues")), Column(words("column.next_steps")),
    ]  # fmt: skip
    rows, case = [], None
    for entry in known[:_MOST_ROWS]:
        is_new = (entry.symptom, entry.run, entry.step) != case
        case = (entry.symptom, entry.run, entry.step)
        rows.append([
            words.known("symptom", entry.symptom) if is_new else "",
            _range(entry.step, entry.last_step) if is_new else "",
            words.known("confidence", entry.confidence),
            retold(entry.statement, words),
            _clues(entry, words),
            _lines([("", entry.next_steps)], words),
        ])  # fmt: skip
    sure = frozenset(
        index for index, entry in enumerate(known[:_MOST_ROWS])
        if entry.confidence in ("nearly certain", "likely")
    )  # fmt: skip
    return Section(
        words("section.diagnosis"),
        text=words("diagnosis.text"),
        table=Table(columns, rows, strong=sure),
        note=_cut(len(known), words, "mindtune replay --json"),
    )


def _clues(entry: DiagnosisRecord, words: Words) -> str:
    told = (
        ("for", entry.evidence_for),
        ("against", entry.evidence_against),
        ("missing", entry.missing),
    )
    return _lines([
        (words(f"diagnosis.{key}"), facts) for key, facts in told if facts
    ], words)  # fmt: skip


def _lines(told: Sequence[tuple[str, Sequence[str]]], words: Words) -> str:
    """Return recorded sentences behind their heads, a line each; quoted where one of them is."""
    parts = [(head, [retold(fact, words) for fact in facts]) for head, facts in told]
    text = "\n".join(f"{head}{words('sentences').join(facts)}" for head, facts in parts)
    is_quoted = any(isinstance(fact, Quoted) for _, facts in parts for fact in facts)
    return Quoted(text) if is_quoted else text


def _range(first: int, last: int) -> str:
    return number(first) if first == last else f"{number(first)} \N{EN DASH} {number(last)}"


def _cut(count: int, words: Words, where: str) -> str:
    return "" if count <= _MOST_ROWS else words("table.cut", shown=_MOST_ROWS, count=count,
                                                where=where)  # fmt: skip


def decisions_section(run: RunRecords, words: Words) -> Section:
    """Return every decision with what became of it."""
    title = words("section.decisions")
    if not run.decisions:
        return Section(title, text=words("decisions.none"))
    columns = [
        Column(words("column.step"), number=True), Column(words("column.policy")),
        Column(words("column.request")), Column(words("column.acted"), number=True),
        Column(words("column.fate")), Column(words("column.reason")),
        Column(words("column.check")),
    ]  # fmt: skip
    rows = [_decision(record, words) for record in run.decisions[:_MOST_ROWS]]
    return Section(
        title,
        text=words("decisions.would" if run.is_log else "decisions.text"),
        table=Table(columns, rows),
        note=_cut(
            len(run.decisions),
            words,
            "mindtune replay --json" if run.is_log else DecisionRecord.FILE,
        ),
    )


def _decision(record: DecisionRecord, words: Words) -> list[str]:
    return [
        number(record.step),
        record.policy,
        request_text(record, words),
        number(record.acted) if record.action.startswith("Set") else "-",
        words(f"fate.{fate_of(record)}"),
        retold(record.reason, words),
        retold(record.outcome or "", words),
    ]


def provenance_section(run: RunRecords, words: Words) -> Section:
    """Return where the numbers come from, and what was not measured."""
    seen = set(run.story.signals)
    missing = [name for name in SIGNAL_NAMES if name not in seen | _NO_SIGNAL]
    phases = [
        f"{words.known('phase', phase)} {count:,}"
        for phase, count in sorted(run.steps.phases.items())
    ]
    rows = [
        [words("provenance.source"), run.source.name],
        [words("provenance.format"), run.story.format],
        [words("provenance.records"), number(run.story.records)],
        [words("provenance.segments"), number(len(run.story.runs))],
        [words("provenance.phases"), words("list").join(phases)],
        [words("provenance.measured"), ", ".join(run.story.signals)],
        [words("provenance.missing"), ", ".join(missing) or "-"],
    ]
    if run.samples:
        rows.append([words("provenance.samples"), number(len(run.samples))])
    if run.ending is not None:
        rows += [
            [words("provenance.effective", knob=name), _plain(value)]
            for name, value in run.ending.effective.items()
        ]
    rows += [[f"config.yaml: {name}", value] for name, value in _flat(run.config, "")]
    return Section(
        words("section.provenance"),
        text=words("provenance.text"),
        table=Table(
            [Column(words("column.fact")), Column(words("column.value"))], rows[:_MOST_ROWS]
        ),
        note=_cut(len(rows), words, "config.yaml"),
    )


def _flat(content: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        if _SECRET.search(str(key)):
            yield name, "***"  # reports are handed around
        elif isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(one, (Mapping, list)) for one in value):
            yield from _flat(dict(enumerate(value)), f"{name}.")
        else:
            yield name, _plain(value)


def _plain(value: object) -> str:
    if value is None or isinstance(value, bool):
        return _SPELLED[value]
    if isinstance(value, float):
        return number(value)
    return _LOGIN.sub("***", str(value))[:_LONGEST]
