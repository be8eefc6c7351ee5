"""Writing and reading profiles.jsonl."""

from __future__ import annotations

from pathlib import Path

from mindtune.controller.contract import ProfileRecord
from mindtune.controller.records.append_file import open_append
from mindtune.controller.records.json_log import read_json_log

__all__ = ["append_profile", "read_profiles"]


def append_profile(path: Path, record: ProfileRecord) -> None:
    """Append what a window showed; the file is made with the first.

    Raises:
        ConfigError: The file cannot be written.
    """
    with open_append(path) as file:
        file.write(record.model_dump_json() + "\n")


def read_profiles(path: Path) -> list[ProfileRecord]:
    """Read the windows of a run; none where there is no file.

    Raises:
        ConfigError: a whole line is no such record.
    """
    return read_json_log(path, ProfileRecord)
