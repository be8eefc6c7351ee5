"""Writing and reading model_signals.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

from mindtune.controller.contract import ModelSignalRecord, parse, refuse_pipe
from mindtune.controller.errors import ConfigError
from mindtune.controller.records.append_file import open_append

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
    refuse_pipe(path)
    records = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    break
                if line.strip():
                    records.append(_record(line, source=f"{path}, line {number}"))
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be a readable text file, but: {error}.") from None
    return records


def _record(line: str, *, source: str) -> ModelSignalRecord:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:  # brackets without end, an endless number
        raise ConfigError(f"{source} must be JSON, but: {error}.") from None
    return parse(ModelSignalRecord, content, source=source)
