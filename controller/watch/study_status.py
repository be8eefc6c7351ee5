"""What a study is doing, from the files in its folder."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.contract import TrialRecord
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.study_folder import StudyFolder
from mindtune.controller.trials.summary import StudySummary, read_summary
from mindtune.controller.watch.run_status import RunStatus, RunWatcher, is_held

__all__ = ["RunningTrial", "StudyStatus", "StudyWatcher", "is_study"]


@dataclass(frozen=True)
class RunningTrial:
    """A launch that has not ended."""

    number: int
    repeat: int
    status: RunStatus

    @property
    def is_alive(self) -> bool:
        """Whether it is still worth waiting for."""
        return self.status.state in ("waiting", "running")


@dataclass(frozen=True, kw_only=True)
class StudyStatus:
    """What is known now."""

    name: str
    summary: StudySummary | None
    """None: no trial has ended yet."""
    running: Sequence[RunningTrial]
    is_searched: bool | None
    """Whether a search holds the folder; None: nobody says."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.summary is not None and self.summary.complete

    @property
    def search_left_s(self) -> float | None:
        """Seconds until the planned configs are measured, by the median launch; None: unknown.

        The confirmation of the leaders comes after that.
        """
        if self.summary is None or self.summary.search_ended:
            return None
        times = [
            launch.wall_s
            for trial in self.summary.trials
            for launch in trial.measurements
            if launch.repeat == 0
        ]
        if not times:
            return None
        missing = max(0, self.summary.planned - len(self.summary.trials))
        return statistics.median(times) * missing / max(1, len(self.running))


class StudyWatcher:
    """Looks at a study again and again.

    Args:
        folder: of the study; its first trial may not have ended yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = StudyFolder(folder)
        self._watchers: dict[Path, RunWatcher] = {}
        self._summary: StudySummary | None = None

    def look(self) -> StudyStatus:
        """Return what is known now; no state of the files is an error."""
        try:
            if self._folder.summary.is_file():
                self._summary = read_summary(self._folder)
        except ConfigError:  # of another version, or taken away just now: the last one holds
            pass
        running = list(self._running())
        name = self._folder.root.resolve().name
        return StudyStatus(
            name=name if self._summary is None else self._summary.study,
            summary=self._summary,
            running=running,
            is_searched=is_held(self._folder.root) if not running else None,
        )

    def _running(self) -> Iterator[RunningTrial]:
        measured = {
            (trial.number, launch.repeat)
            for trial in (self._summary.trials if self._summary is not None else ())
            for launch in trial.measurements
        }
        for folder in sorted(self._folder.root.glob("trials/[0-9]*/repeat_*")):
            number, repeat = folder.parent.name, folder.name.removeprefix("repeat_")
            if not (number.isdigit() and repeat.isdigit()):  # set aside as unfinished
                continue
            if (int(number), int(repeat)) in measured or (folder / TrialRecord.FILE).exists():
                self._watchers.pop(folder, None)
                continue
            watcher = self._watchers.setdefault(folder, RunWatcher(folder))
            trial = RunningTrial(int(number), int(repeat), watcher.look())
            if trial.is_alive:
                yield trial


def is_study(folder: Path) -> bool:
    """Tell whether a folder is one of a study."""
    study = StudyFolder(folder)
    return study.summary.exists() or study.study_file.exists() or (folder / "trials").is_dir()
