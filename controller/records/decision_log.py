"""Writing and reading decisions.jsonl.

The log is append-only. A decision is written when it is taken, and again, under the same key, once
the value that acted or the outcome is known: the last line of a key holds. An undo is a record of
its own.
"""

from __future__ import annotations

import threading
from pathlib import Path

from mindtune.controller.contract import DecisionRecord
from mindtune.controller.records.append_file import open_append
from mindtune.controller.records.json_log import read_json_log

__all__ = ["DecisionWriter", "merge_decisions", "read_decisions"]


class DecisionWriter:
    """Appends decisions; every line reaches the file at once. Any thread may write.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file = open_append(path)

    def write(self, record: DecisionRecord) -> None:
        """Append one record."""
        line = record.to_json(indent=None) + "\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Close the file; harmless when called twice."""
        with self._lock:
            self._file.close()


def read_decisions(path: Path) -> list[DecisionRecord]:
    """Read a decision log, each decision in its last form, in the order in which they were taken.

    A cut last line (a killed writer) is passed over. A missing file is an empty log: a run that
    decides nothing may leave none.

    Raises:
        ConfigError: a whole line is no decision record.
    """
    return merge_decisions(read_json_log(path, DecisionRecord))


def merge_decisions(records: list[DecisionRecord]) -> list[DecisionRecord]:
    """Return each decision in its last form, in the order of its first."""
    merged: dict[tuple[int, str, str, str, bool], DecisionRecord] = {}
    for record in records:
        key = (
            record.step,
            record.policy,
            record.action,
            repr(record.requested),
            record.verdict == "undone",
        )
        merged[key] = record
    return list(merged.values())
