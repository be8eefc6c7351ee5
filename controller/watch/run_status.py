"""What a run is doing, from the files in its folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from mindtune.controller.contract import (
    DecisionRecord,
    KnobsFile,
    RunPlan,
    RunResult,
    TrialRecord,
    parse,
    read_document,
    read_rows,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.records import RunFolder, merge_decisions
from mindtune.controller.replay import load_engine
from mindtune.controller.trials.folder_lock import LOCK
from mindtune.controller.watch.tail import Tail
from mindtune.policies.decisions import KNOBS
from mindtune.policies.engine import EngineState
from mindtune.policies.facts import RunFacts
from mindtune.policies.findings import Finding, Severity
from mindtune.policies.incidents import merge
from mindtune.policies.signals import Observation

__all__ = ["RunState", "RunStatus", "RunWatcher", "is_held"]

RunState = Literal["waiting", "running", "silent", "hung", "gone", "ended"]
"""waiting: no step yet; silent: no sign of life for long, so killed or hanging; hung: its watchdog
says so; gone: the process that held the folder has ended without a result."""

_KEPT_STEPS = 2000
_KEPT_FINDINGS = 50
_INCIDENT_GAP = 32
"""As in the live controller: pauses up to it are one incident."""
_SILENT_S = 60.0
"""Least silence that means something: rows reach the file within a second of their step."""
_SILENT_STEPS = 20.0
"""As of the live watchdog: a step may take 20 times the usual."""
_LOCK_S = 10.0
"""Silence from which on the folder's lock is tried: never while a run starts or goes on."""
_FACTS = RunFacts(reachable=frozenset(KNOBS), can_rewind=True)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """What is known now."""

    state: RunState
    silence_s: float | None
    """Seconds since the last sign of life; None: there was none."""
    limit_s: float
    """Silence from which on something is wrong."""
    steps: Sequence[Observation]
    """The newest ones, oldest first."""
    findings: Sequence[tuple[int, Finding]]
    """Incidents in what was read, oldest first, each with its segment (column `run`)."""
    decisions: Sequence[DecisionRecord]
    outcome: str = ""
    """How it ended; empty while it goes on."""
    message: str = ""
    planned_steps: int | None = None
    """Number of the last step; None: the files do not say."""

    @property
    def step_times_s(self) -> Sequence[float]:
        """Times of those of the newest 100 steps that only trained."""
        times = (
            step.step_time_s
            for step in list(self.steps)[-100:]
            if step.phase in (None, "train") and step.step_time_s is not None
        )
        return [value for value in times if math.isfinite(value)]

    @property
    def step_time_s(self) -> float | None:
        """Median of `step_times_s`."""
        return statistics.median(self.step_times_s) if self.step_times_s else None

    @property
    def steps_left(self) -> int | None:
        """Steps until the planned ones are done; None: not known."""
        if self.planned_steps is None or not self.steps:
            return None
        return max(0, self.planned_steps - self.steps[-1].step)

    @property
    def time_left_s(self) -> float | None:
        """Seconds until then, without what is no training; None: not known."""
        if self.steps_left is None or self.step_time_s is None:
            return None
        return self.steps_left * self.step_time_s


class RunWatcher:
    """Looks at a run again and again; what was read is not read again.

    Args:
        folder: of the run; it may not exist yet.
        clock: seconds since 1970.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = RunFolder(folder)
        self._clock = clock
        self._table = Tail(self._folder.signals)
        self._log = Tail(self._folder.decisions)
        self._steps: deque[Observation] = deque(maxlen=_KEPT_STEPS)
        self._records: list[DecisionRecord] = []
        self._findings: deque[tuple[int, Finding]] = deque(maxlen=_KEPT_STEPS)
        self._engine = load_engine(None)
        self._state: EngineState = self._engine.init(_FACTS)

    def look(self) -> RunStatus:
        """Return what is known now; no state of the files is an error."""
        self._read_steps()
        self._read_decisions()
        outcome, message = self._ending()
        silence_s = self._silence_s()
        limit_s = self._limit_s()
        return RunStatus(
            state=self._judge(outcome, silence_s, limit_s),
            silence_s=silence_s,
            limit_s=limit_s,
            steps=tuple(self._steps),
            findings=self._incidents(),
            decisions=merge_decisions(self._records),
            outcome=outcome,
            message=message,
            planned_steps=self._planned(),
        )

    def _read_steps(self) -> None:
        lines = self._table.lines()
        if self._table.started_over:
            self._steps.clear()
            self._findings.clear()
            self._state = self._engine.init(_FACTS)
        for line in lines:
            try:
                rows = list(read_rows([self._table.head, line], source="signals.csv"))
            except ConfigError:  # a line of another program, or a damaged one
                continue
            for row in rows:
                result = self._engine.step(row.observation, self._state)
                self._state = result.state
                self._steps.append(row.observation)
                self._findings.extend(
                    (row.observation.run or 0, found)
                    for found in result.findings
                    if found.severity is not Severity.INFO
                )

    def _read_decisions(self) -> None:
        lines = self._log.lines()
        if self._log.started_over:
            self._records.clear()
            lines = [self._log.head, *lines]
        self._records += [record for line in lines if (record := _decision(line)) is not None]

    def _incidents(self) -> Sequence[tuple[int, Finding]]:
        """Join the findings of each segment; what a restart repeats is another incident."""
        incidents = [
            (run, incident)
            for run, group in groupby(self._findings, key=lambda entry: entry[0])
            for incident in merge((found for _, found in group), gap=_INCIDENT_GAP)
        ]
        return tuple(incidents[-_KEPT_FINDINGS:])

    def _ending(self) -> tuple[str, str]:
        """Return outcome and message, both empty while the run goes on."""
        folder = self._folder
        try:
            if (folder.path / TrialRecord.FILE).is_file():
                record = read_document(TrialRecord, folder.path / TrialRecord.FILE)
                return record.outcome, record.message
            if folder.result.is_file():
                result = read_document(RunResult, folder.result)
                return result.outcome, result.message
        except ConfigError:  # a trial's own result, before its launcher has judged it
            pass
        return "", ""

    def _silence_s(self) -> float | None:
        times = [self._table.modified_s, self._log.modified_s]
        with contextlib.suppress(OSError):  # there is none where a callback alone writes
            times.append((self._folder.path / LOCK).stat().st_mtime)
        known = [written_s for written_s in times if written_s is not None]
        return max(0.0, self._clock() - max(known)) if known else None

    def _limit_s(self) -> float:
        times = [
            step.step_time_s
            for step in list(self._steps)[-100:]
            if step.step_time_s is not None and math.isfinite(step.step_time_s)
        ]
        usual = statistics.median(times) if times else 0.0
        return max(_SILENT_S, _SILENT_STEPS * usual)

    def _judge(self, outcome: str, silence_s: float | None, limit_s: float) -> RunState:
        if outcome:
            return "ended"
        if silence_s is None:
            return "waiting"
        if silence_s > _LOCK_S and is_held(self._folder.path) is False:
            return "gone"
        if not self._steps:
            return "waiting"
        if silence_s <= limit_s:
            return "running"
        return "hung" if self._folder.stacks.exists() else "silent"

    def _planned(self) -> int | None:
        try:
            plan_file = self._folder.path / RunPlan.FILE
            if plan_file.is_file():
                return read_document(RunPlan, plan_file).steps
            knobs_file = self._folder.path / KnobsFile.FILE
            if knobs_file.is_file():
                trial = read_document(KnobsFile, knobs_file).trial
                return None if trial is None else trial.warmup_steps + trial.measure_steps
        except ConfigError:  # of another version, or taken away just now
            pass
        return None


def _decision(line: str) -> DecisionRecord | None:
    """Return a record; None for a line that is damaged, or of another version."""
    try:
        return parse(DecisionRecord, json.loads(line), source=DecisionRecord.FILE)
    except (ConfigError, ValueError, RecursionError):
        return None


def is_held(folder: Path) -> bool | None:
    """Tell whether a process holds a folder; None: nobody says.

    The lock goes with its process, however that ends. It is only tried, for a moment, and shared
    with others who try.
    """
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    else:
        return False
    finally:
        os.close(handle)
