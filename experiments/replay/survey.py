"""Replays every known log of a folder and sets the result beside its story."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.contract import FindingRecord, ReplayOutput
from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers import open_log
from mindtune.controller.replay import load_engine, replay
from mindtune.experiments.replay.cases import CASES, Case

__all__ = ["Row", "markdown", "survey"]

_HEADER = (
    "| log | format | data lines | steps | verdict (source) | first finding | source's step | "
    "actions |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True)
class Row:
    """One log, its story and what was found."""

    name: str
    case: Case
    output: ReplayOutput

    @property
    def first(self) -> FindingRecord | None:
        """The first finding that is more than information, in the segment of the fault."""
        run = self.output.runs[0].run if self.case.fault is None else self.case.fault_run
        grave = [
            finding
            for finding in self.output.findings
            if finding.severity != "info" and (self.case.fault is None or finding.run == run)
        ]
        return min(grave, key=lambda finding: finding.step, default=None)

    @property
    def actions(self) -> int:
        """Decisions that would have changed or ended the run; advice does neither."""
        return sum(decision.action != "Advise" for decision in self.output.decisions)

    @property
    def agrees(self) -> bool:
        """Whether verdict, step and restraint are as the source has them."""
        if self.case.verdict not in ("either", self.output.verdict):
            return False
        if self.case.verdict == "healthy":
            return self.actions == 0
        return self.case.verdict == "either" or self.in_time

    @property
    def in_time(self) -> bool:
        """Whether the first finding is where the source has the fault."""
        if self.case.fault is None or self.first is None:
            return self.case.fault is None
        low, high = self.case.fault
        return low <= self.first.step <= high


def survey(folder: Path) -> Iterator[Row]:
    """Yield a row per known log that lies in a folder.

    Raises:
        ConfigError: if there is none.
    """
    paths = [folder / name for name in sorted(CASES) if (folder / name).is_file()]
    if not paths:
        raise ConfigError(
            f"{folder} must hold logs of the table in experiments/replay/cases.py, but has none "
            "of them; their sources stand there."
        )
    engine = load_engine(None)
    for path in paths:
        yield Row(path.name, CASES[path.name], replay(open_log(path), engine))


def markdown(rows: list[Row]) -> str:
    """Return the table, and what does not agree."""
    lines = [_HEADER]
    for row in rows:
        output, case = row.output, row.case
        first = "-" if row.first is None else f"{row.first.step} {row.first.kind}"
        fault = "-" if case.fault is None else "-".join(map(str, dict.fromkeys(case.fault)))
        segments = f" in {len(output.runs)} segments" if len(output.runs) > 1 else ""
        cells = [
            row.name, output.format, str(output.records), f"{output.steps}{segments}",
            f"{output.verdict} ({case.verdict})", first, fault, str(row.actions),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    known = [row for row in rows if row.case.verdict != "either"]
    agreeing = sum(row.case.verdict == row.output.verdict for row in known)
    faulty = [row for row in rows if row.case.verdict == "faulty"]
    healthy = [row for row in rows if row.case.verdict == "healthy"]
    totals = (
        f"Verdicts that agree: {agreeing} of {len(known)} (the rest can be argued either way). "
        f"Faults first seen where the source has them: {sum(row.in_time for row in faulty)} of "
        f"{len(faulty)}. Actions on {len(healthy)} healthy logs: "
        f"{sum(row.actions for row in healthy)}."
    )
    return "\n".join([*lines, "", totals])
