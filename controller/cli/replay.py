"""`mindtune replay`: what is wrong with a run, from its log, and what the policies would do."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from mindtune.controller.cli.console import out, print_json

if TYPE_CHECKING:
    from mindtune.controller.contract import FindingRecord, ReplayDecision, ReplayOutput

__all__ = ["replay"]

EXIT_FAULTY = 1
_SHOWN = 20
"""Incidents and decisions shown to a person; `--json` gives all."""
_ORDER = {"critical": 0, "warning": 1, "info": 2}
_STYLES = {"critical": "bold red", "warning": "yellow", "info": ""}


def replay(
    log: Annotated[Path, typer.Argument(help="A training log, or a run's folder.", metavar="LOG")],
    *,
    format: Annotated[  # noqa: A002 - the option's name
        str, typer.Option(help="Name of a reader; auto: found by its lines.")
    ] = "auto",
    policies: Annotated[
        Path | None, typer.Option(help="YAML with settings by policy name; default: built in.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if it is faulty.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Read any training log: what went wrong where, and what the policies would have done."""
    from mindtune.controller.records.log_readers import open_log
    from mindtune.controller.replay import load_engine
    from mindtune.controller.replay import replay as replay_log

    engine = load_engine(policies)
    output = replay_log(open_log(log, format), engine)
    if json:
        print_json(output)
    else:
        _print_story(output, out())
    return EXIT_FAULTY if strict and output.verdict == "faulty" else 0


def _print_story(output: ReplayOutput, console: Console) -> None:
    segments = "" if len(output.runs) == 1 else f" in {len(output.runs)} segments"
    first, last = output.runs[0].first_step, output.runs[-1].last_step
    console.print(
        f"{output.format}: {output.records} data lines, {output.steps} steps{segments}, from step "
        f"{first} to {last}; signals: {', '.join(output.signals) or 'none'}",
        soft_wrap=True,
    )
    style = "bold red" if output.verdict == "faulty" else "bold green"
    console.print(f"verdict: {output.verdict}", style=style)
    several = len(output.runs) > 1
    if output.findings:
        console.print(_findings(output.findings, several=several))
    else:
        console.print("nothing was found")
    asked = [entry for entry in output.decisions if entry.action != "Advise"]
    if output.decisions:
        console.print(_decisions(output.decisions, several=several))
    if not asked:
        console.print("the policies would have left this run alone")
    for note in output.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _findings(findings: list[FindingRecord], *, several: bool) -> Table:
    """Return the incidents, the gravest first; information has one row per kind."""
    table = _table("found", ["steps", "kind", "severity", "what was seen"], several=several)
    groups: dict[tuple[str, str], list[FindingRecord]] = defaultdict(list)
    for finding in sorted(findings, key=lambda entry: _ORDER[entry.severity]):
        groups[finding.severity, finding.kind].append(finding)
    left = _SHOWN
    for (severity, kind), incidents in groups.items():
        shown = incidents[: 1 if severity == "info" else max(1, min(left, _SHOWN // 4))]
        left -= len(shown)
        for finding in shown:
            more = len(incidents) - len(shown) if finding is shown[-1] else 0
            text = f"{finding.message} (and {more} more)" if more else finding.message
            steps = _span(finding.step, finding.last_step)
            run = [str(finding.run)] if several else []
            table.add_row(*run, steps, kind, severity, text, style=_STYLES[severity])
    return table


def _decisions(decisions: list[ReplayDecision], *, several: bool) -> Table:
    table = _table(
        "what the policies would have done", ["step", "policy", "action", "why"], several=several
    )
    for decision in decisions[:_SHOWN]:
        value = "" if decision.value is None else f" {_value(decision.value)}"
        run = [str(decision.run)] if several else []
        table.add_row(
            *run, str(decision.step), decision.policy, f"{decision.action}{value}", decision.reason
        )
    if len(decisions) > _SHOWN:
        run = [""] if several else []
        rest = f"and {len(decisions) - _SHOWN} more; --json lists them"
        table.add_row(*run, "", "", "", rest)
    return table


def _table(title: str, columns: list[str], *, several: bool) -> Table:
    headers = ["segment", *columns] if several else columns
    return Table(*headers, title=title, title_justify="left", box=None)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
