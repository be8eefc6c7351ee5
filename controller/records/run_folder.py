"""Where the records of a run lie inside its folder."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from mindtune.controller.contract import (
    DecisionRecord,
    ModelSignalRecord,
    ProfileRecord,
    RunResult,
)
from mindtune.controller.errors import ConfigError

__all__ = ["RunFolder", "new_run_folder"]


@dataclass(frozen=True)
class RunFolder:
    """The files of one run; a trial's folder has the same layout."""

    path: Path

    @property
    def signals(self) -> Path:
        """The signal table, one line per optimizer step."""
        return self.path / "signals.csv"

    @property
    def decisions(self) -> Path:
        """The decision log, one JSON object per line."""
        return self.path / DecisionRecord.FILE

    @property
    def model_signals(self) -> Path:
        """Sampled signals from inside the model, one JSON object per line; absent if off."""
        return self.path / ModelSignalRecord.FILE

    @property
    def profiles(self) -> Path:
        """What profiler windows showed, one JSON object per line; absent where none was opened."""
        return self.path / ProfileRecord.FILE

    @property
    def profile_request(self) -> Path:
        """A file that a user puts there to have a profiler window opened."""
        return self.path / "profile.request"

    @property
    def result(self) -> Path:
        """How the run ended; absent while it goes on and after a kill."""
        return self.path / RunResult.FILE

    @property
    def state(self) -> Path:
        """Folder of the controller's states, one per checkpoint."""
        return self.path / "state"

    @property
    def stacks(self) -> Path:
        """Python stacks, written when the run hangs."""
        return self.path / "stacks.txt"

    def create(self) -> None:
        """Make the folder, and what is above it.

        Raises:
            ConfigError: it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the run's folder {self.path} must be writable, but: "
                f"{error.strerror}; choose another out_dir."
            ) from None


def new_run_folder(parent: Path, *, now: datetime | None = None) -> RunFolder:
    """Return a folder below `parent` that no run has used: named by UTC time, made at once.

    Raises:
        ConfigError: it cannot be made.
    """
    stamp = (now or datetime.now(timezone.utc)).strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        name = stamp if number == 1 else f"{stamp}-{number}"
        folder = RunFolder(parent / name)
        try:
            folder.path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise ConfigError(
                f"{parent} must be writable, but: {error.strerror}; set out_dir."
            ) from None
        return folder
