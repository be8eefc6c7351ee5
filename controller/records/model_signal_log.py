"""Writing and reading model_signals.jsonl."""

from __future__ import annotations

from pathlib import Path

from mindtune.controller.contract import ModelSignalRecord
from mindtune.controller.records.append_file import open_append
from mindtune.controller.records.json_log import read_json_log

__all__ = ["ModelSignalWriter", "read_model_signals"]


class ModelSignalWriter:
    """Appends samples; every line reaches the file at once.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_append(path)

    def write(self, record: ModelSignalRecord) -> None:
        """Append one record; what was not sampled is left out."""
        self._file.write(record.model_dump_json(exclude_none=True) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; harmless when called twice."""
        self._file.close()


def read_model_signals(path: Path) -> list[ModelSignalRecord]:
    """Read the samples of a run; a cut last line (a killed writer) is passed over.

    A missing file is an empty one: a run samples only where it was told to.

    Raises:
        ConfigError: a whole line is no such record.
    """
    return read_json_log(path, ModelSignalRecord)
