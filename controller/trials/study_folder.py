"""A study's folder on disk: names, one process at a time, nothing half written.

identity.json, study.yaml, base_config.yaml (as the study measured it), study.db, peak.json,
summary.json, best_config.yaml and trials/NNNN/repeat_K/, where repeat_0 is the search's own
measurement. A worker has a folder of its own with nothing but its trials, by default in workers/.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.commands import names_file
from mindtune.controller.trials.folder_lock import locked

__all__ = ["WORKERS", "StudyFolder", "relocated", "relocated_command"]

WORKERS = "workers"
"""Folder of a study in which workers have theirs."""


@dataclass(frozen=True)
class StudyFolder:
    """The folder of one study."""

    root: Path

    @property
    def study_file(self) -> Path:
        """The study as it was started, its paths relative to this folder."""
        return self.root / "study.yaml"

    @property
    def identity(self) -> Path:
        """What the study's measurements depend on; every study has it."""
        return self.root / "identity.json"

    @property
    def base_config(self) -> Path:
        """The user's base config as the study measured it."""
        return self.root / "base_config.yaml"

    @property
    def peak(self) -> Path:
        """Peak that MFU is taken of, with its source."""
        return self.root / "peak.json"

    @property
    def summary(self) -> Path:
        """What is known of every trial, rewritten after each."""
        return self.root / "summary.json"

    @property
    def best_config(self) -> Path:
        """The winner's best_config.yaml."""
        return self.root / "best_config.yaml"

    def trial_dir(self, number: int, repeat: int = 0) -> Path:
        """Return the folder of one measurement of a config."""
        return self.root / "trials" / f"{number:04d}" / f"repeat_{repeat}"

    def unfinished(self, number: int, repeat: int = 0) -> list[Path]:
        """Return the folders of a measurement that were set aside."""
        folder = self.trial_dir(number, repeat)
        return sorted(folder.parent.glob(f"{folder.name}.unfinished_*"))

    def set_aside(self, number: int, repeat: int = 0) -> Path | None:
        """Move a folder that a killed search left half written out of the way.

        Returns:
            Where it is now; None if there was none.
        """
        folder = self.trial_dir(number, repeat)
        if not folder.exists():
            return None
        index = 1
        while (target := folder.with_name(f"{folder.name}.unfinished_{index}")).exists():
            index += 1
        folder.rename(target)
        return target

    def check_writable(self) -> None:
        """Create the folder and a file in it, and remove the file.

        Raises:
            ConfigError: if that is not possible.
        """
        probe = self.root / f".probe.{os.getpid()}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
            trials = self.root / "trials"
            if trials.exists() and not trials.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(trials))
        except OSError as error:
            raise ConfigError(
                f"the study folder {self.root} must be a writable folder, but: "
                f"{error.strerror}; give another one with --out."
            ) from None

    def check_free(self) -> None:
        """Refuse to begin a study where it would write over files that are none of its own.

        Raises:
            ConfigError: if there are such files, as where the study file lies in the folder.
        """
        if self.identity.exists():
            return
        own = (self.study_file, self.base_config, self.summary, self.best_config)
        found = [path.name for path in own if path.exists()]
        if found:
            raise ConfigError(
                f"the study folder {self.root} must be new, or that of a study, but it holds "
                f"{', '.join(found)} and no study, which would write over it; give another one "
                "with --out."
            )

    def topmost_missing(self) -> Path | None:
        """Return the topmost folder that has to be created; None: the folder exists."""
        if self.root.exists():
            return None
        missing = self.root
        while not missing.parent.exists():
            missing = missing.parent
        return missing

    @contextlib.contextmanager
    def undone_on_failure(self, created: Path | None) -> Iterator[None]:
        """Remove what the block has added to the folder if it fails; hold the lock meanwhile.

        Args:
            created: topmost folder that was created for this study and goes with it, unless
                somebody else uses it by now.
        """
        before: set[Path] = set() if created is not None else set(self.root.iterdir())
        try:
            yield
        except BaseException:
            for path in set(self.root.iterdir()) - before:
                if path.name != WORKERS:  # who has just joined the study is measuring there
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            if created is not None:
                for path in (self.root, *self.root.parents):
                    with contextlib.suppress(OSError):
                        path.rmdir()
                    if path == created:
                        break
            raise

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder; the lock goes with the process, however it ends.

        Raises:
            ConfigError: if another process holds it.
        """
        with locked(self.root, what="study"):
            yield


def relocated(path: str, *, old: Path, new: Path) -> str:
    """Return a path that is relative to folder `old` as one relative to folder `new`."""
    if Path(path).is_absolute():
        return path
    return os.path.relpath((old / path).resolve(), new.resolve())


def relocated_command(command: list[str], *, old: Path, new: Path) -> list[str]:
    """Return a command whose words that name files in `old` name them from `new`."""
    return [
        relocated(word, old=old, new=new) if names_file(word, old) else word for word in command
    ]
