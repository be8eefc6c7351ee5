"""Shows a running study: one line per event, and a bar with the time left on a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from mindtune.controller.trials.progress import (
    CalibrationStarted,
    StudyEnded,
    StudyEvent,
    StudyNote,
    StudyStarted,
    TrialEnded,
    TrialProgress,
    TrialStarted,
)
from mindtune.controller.units import format_duration, format_size
from mindtune.search.knobs import describe

__all__ = ["StudyProgress"]


class StudyProgress:
    """A listener for `run_study`; use it as a context manager.

    Lines stay and can be read in a file; the bar appears on a terminal only.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> StudyProgress:  # noqa: PYI034 - typing.Self needs Python 3.11
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, event: StudyEvent) -> None:
        """Show one event."""
        if isinstance(event, TrialProgress):
            self._advance(event)
            return
        if isinstance(event, TrialStarted):
            self._start(event)
            return
        if isinstance(event, TrialEnded) and not event.worker and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        for line in _lines(event):
            self._console.print(line, soft_wrap=True)

    def _start(self, event: TrialStarted) -> None:
        what = "measuring" if event.phase == "search" else "confirming"
        name = f"{what} trial {event.number}"
        self._task = self._bar.add_task(name, total=1, left=_left(event.time_left_s))
        if not self._console.is_terminal:
            changed = describe(event.differs) or "the base config"
            self._console.print(
                f"{name}{_repeat(event.repeat)}: {changed}{_left(event.time_left_s)}",
                soft_wrap=True,
            )

    def _advance(self, event: TrialProgress) -> None:
        if self._task is not None:
            self._bar.update(
                self._task,
                completed=event.steps,
                total=event.of_steps,
                left=_left(event.time_left_s),
            )


def _left(seconds: float | None) -> str:
    """Say how long the study still takes; an estimate that has run out says no number."""
    if seconds is None:
        return ""
    return f", about {format_duration(seconds)} left" if seconds >= 1 else ", almost done"


def _repeat(repeat: int) -> str:
    return "" if repeat == 0 else f" (repeat {repeat})"


def _lines(event: StudyEvent) -> list[str]:
    if isinstance(event, StudyStarted):
        return _started(event)
    if isinstance(event, CalibrationStarted):
        return [f"measuring this machine's peak in {event.precision} (10 to 20 s)"]
    if isinstance(event, StudyNote):
        return [event.message]
    if isinstance(event, TrialEnded):
        return [_ended(event)]
    if isinstance(event, StudyEnded):
        took = format_duration(event.wall_s)
        return [f"best: trial {event.winner} after {took}. {event.reason}"]
    return []


def _started(event: StudyStarted) -> list[str]:
    lines = [
        f"study {event.name} in {event.folder}: {event.total} configs, {event.feasible} feasible, "
        f"{event.trials} to measure"
        + (f", {event.finished} of them already measured" if event.finished else "")
    ]
    lines += [f"  {rule.count} rejected by {rule.rule}: {rule.reason}" for rule in event.rejected]
    if event.objective == "relative":
        lines.append("  the peak is unknown: values are speeds over the base config's")
    return lines


def _ended(event: TrialEnded) -> str:
    parts = [f"trial {event.number}{_repeat(event.repeat)} {event.outcome}"]
    if event.value is not None:
        parts.append(f"value {event.value:.4g}")
    if event.mfu is not None:
        parts.append(f"MFU {event.mfu:.1%}")
    if event.stability is not None:
        parts.append(f"stability {event.stability:.2f}")
    if event.step_time_s is not None:
        parts.append(f"step {format_duration(event.step_time_s)}")
    # A trial that was ended has no pool peak, only the whole process: not to be compared.
    if event.peak_memory_bytes is not None and event.outcome == "ok":
        parts.append(f"memory {format_size(event.peak_memory_bytes)}")
    parts.append(f"took {format_duration(event.wall_s)}")
    if event.worker:
        parts.append(f"measured by {event.worker}")
    line = ", ".join(parts)
    if event.message:
        # The whole of it, often with a stack, stands in trial.json and the report.
        line += f": {event.message.splitlines()[0]}"
    best = "" if event.best_number is None else f"; best so far: trial {event.best_number}"
    return line + best + (", done" if event.time_left_s == 0 else _left(event.time_left_s))
