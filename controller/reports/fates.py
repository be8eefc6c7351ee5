"""What became of a decision, in one word, and what it asked for, in a few."""

from __future__ import annotations

from mindtune.controller.contract import DecisionRecord
from mindtune.controller.contract.fault_plan import PLANTED_FAULTS
from mindtune.controller.reports.language import Words
from mindtune.controller.reports.page import number
from mindtune.policies.decisions import GUARDS

__all__ = ["acted", "fate_of", "is_action", "request_text"]

_GUARDS = frozenset(action.__name__ for action in GUARDS)


def fate_of(record: DecisionRecord) -> str:
    """Return the key of a fate: a name of `time_figures.FATES`."""
    if record.verdict != "granted":
        return record.verdict
    if record.action == "Advise":
        return "advice"
    if not record.action.startswith("Set"):
        return "done"
    outcome = record.outcome or ""
    if outcome.startswith(("undone", "ineffective")):
        return outcome.partition(":")[0]
    if not outcome:
        return "open"
    return "done" if outcome.startswith("not judged") else "kept"


def is_action(record: DecisionRecord) -> bool:
    """Tell whether it was to change the training: no advice, and no guard that only watches."""
    return record.action != "Advise" and record.action not in _GUARDS


def acted(record: DecisionRecord) -> bool:
    """Tell whether it has changed the training."""
    return is_action(record) and record.verdict == "granted"


def request_text(record: DecisionRecord, words: Words) -> str:
    """Return what was asked for, such as `learning-rate scale 1 -> 0.5`."""
    name = words.known("action", record.action)
    if record.action == "Rewind" and record.acted is not None:
        return words("decision.rewound", step=number(int(record.acted)))
    if record.requested == PLANTED_FAULTS or not record.action.startswith("Set"):
        return name
    if isinstance(record.requested, str) or record.requested is None:
        return name
    new = number(float(record.requested))
    if record.before is None:
        return f"{name} \N{RIGHTWARDS ARROW} {new}"
    return f"{name} {number(float(record.before))} \N{RIGHTWARDS ARROW} {new}"
