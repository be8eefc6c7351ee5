"""What a report is made of: the records of a run's folder, or a log of any program.

Its steps are read once: detectors, metrics and figures all look at them as they come.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindtune.controller.contract import (
    DecisionRecord,
    ModelSignalRecord,
    ReplayOutput,
    RunMetrics,
    RunResult,
    TrialRecord,
    parse,
    read_document,
    read_json,
    read_yaml,
)
from mindtune.controller.contract.fault_plan import PLANTED_FAULTS
from mindtune.controller.errors import ConfigError
from mindtune.controller.metrics.collect import Collector
from mindtune.controller.metrics.run_metrics import measure
from mindtune.controller.metrics.run_source import RunSource, open_source
from mindtune.controller.records import RunFolder, iterate_signals, read_decisions
from mindtune.controller.records.log_readers import LogStream
from mindtune.controller.records.log_readers.table import SIGNALS_TABLE
from mindtune.controller.records.model_signal_log import read_model_signals
from mindtune.controller.replay import LogSet, load_engine, open_logs, replay
from mindtune.controller.reports.fates import acted
from mindtune.controller.reports.run_steps import RunSteps
from mindtune.policies.diagnosis import RunContext
from mindtune.policies.findings import Finding
from mindtune.policies.signals import Observation

__all__ = ["Ending", "RunRecords", "read_run"]


@dataclass(frozen=True)
class Ending:
    """How a run or a trial ended."""

    outcome: str
    message: str
    wall_s: float
    eval_loss: float | None = None
    peak_memory_bytes: int | None = None
    effective: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """All that is known of one run."""

    name: str
    source: Path
    """The signal table or the log."""
    is_log: bool
    """A log of any program: decisions are what the policies would have asked for."""
    story: ReplayOutput
    """What the detectors find in it."""
    metrics: RunMetrics
    """Its figures in five dimensions."""
    steps: RunSteps
    """At least one."""
    decisions: Sequence[DecisionRecord]
    samples: Sequence[ModelSignalRecord] = ()
    ending: Ending | None = None
    """None: the run goes on, was killed, or is a log."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The program's own config."""
    has_hung: bool = False
    """The watchdog has written stacks."""

    @property
    def planted(self) -> str | None:
        """The sentence that says which faults were planted; None: none were."""
        return next((r.reason for r in self.decisions if r.requested == PLANTED_FAULTS), None)


class _OwnTable(LogStream):
    """A signal table of ours, read as strictly as any record."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(folder.signals, SIGNALS_TABLE)
        self._folder = folder

    def __iter__(self) -> Iterator[Observation]:
        for row in iterate_signals(self.path):
            self.records += 1
            yield row.observation
        if not self.records:
            ending = _ending(self._folder)
            how = "" if ending is None else f" It ended {ending.outcome!r}. {ending.message}"
            raise ConfigError(
                f"{self.path} must hold at least one step, but it has a header only.{how}".rstrip()
            )


class _OwnLogs(LogSet):
    """That table, with what the other records of the folder tell."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__([_OwnTable(folder)])
        self._path = folder.path

    def context(self) -> RunContext:
        """Return what the other records tell; asked for once the table was found to be sound."""
        return self._told

    @functools.cached_property
    def _told(self) -> RunContext:
        return open_logs([self._path]).context()


def read_run(path: Path) -> RunRecords:
    """Return what is known of a run, from its folder or from a log; a killed run has one too.

    Raises:
        ConfigError: there is nothing to read, or something in it cannot be read.
    """
    folder = RunFolder(path)
    if not folder.signals.exists():
        return _read_log(path)
    decisions = read_decisions(folder.decisions)
    last_action = max((record.step for record in decisions if acted(record)), default=None)
    reading = _Reading(last_action=last_action)
    story = replay(_OwnLogs(folder), load_engine(None), witness=reading)
    source = replace(open_source(path), observations=())
    return RunRecords(
        name=path.resolve().name,
        source=folder.signals,
        is_log=False,
        story=story,
        metrics=measure(source, collected=reading.collector.finish()),
        steps=reading.steps,
        decisions=decisions,
        samples=read_model_signals(folder.model_signals),
        ending=_ending(folder),
        config=_config(path / "config.yaml"),
        has_hung=folder.stacks.exists(),
    )


def _read_log(path: Path) -> RunRecords:
    reading = _Reading()
    story = replay(open_logs([path]), load_engine(None), witness=reading)
    source = RunSource(path.name, story.format, ())
    return RunRecords(
        name=path.resolve().name,
        source=path,
        is_log=True,
        story=story,
        metrics=measure(source, collected=reading.collector.finish()),
        steps=reading.steps,
        decisions=_would_be(story),
    )


class _Reading:
    """Hands each step that a replay reads to the metrics and the figures."""

    def __init__(self, *, last_action: int | None = None) -> None:
        self.collector = Collector()
        self.steps = RunSteps(last_action=last_action)

    def __call__(self, step: Observation, findings: Sequence[Finding]) -> None:
        self.collector.take(step, findings)
        self.steps.take(step)


def _would_be(story: ReplayOutput) -> list[DecisionRecord]:
    return [
        DecisionRecord(
            step=entry.step, policy=entry.policy, action=entry.action, requested=entry.value,
            verdict="observed", reason=entry.reason,
        )
        for entry in story.decisions
    ]  # fmt: skip


def _ending(folder: RunFolder) -> Ending | None:
    trial_file = folder.path / TrialRecord.FILE
    if trial_file.exists():
        trial = read_document(TrialRecord, trial_file)
        return Ending(
            trial.outcome, trial.message, trial.wall_s, peak_memory_bytes=trial.peak_memory_bytes
        )
    if not folder.result.exists():
        return None
    content = read_json(folder.result)
    if isinstance(content, dict) and not {"steps", "wall_s"} & set(content):
        # A trial that was ended before its launcher could judge it.
        return None
    run = parse(RunResult, content, source=str(folder.result))
    return Ending(
        run.outcome, run.message, run.wall_s, run.eval_loss, run.peak_memory_bytes, run.effective
    )


def _config(path: Path) -> Mapping[str, Any]:
    """Return the program's config; a file of another form is the program's own affair."""
    if not path.is_file():
        return {}
    try:
        content = read_yaml(path)
    except ConfigError:
        return {}
    return content if isinstance(content, dict) else {}
