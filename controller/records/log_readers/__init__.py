"""Readers of other programs' training logs: one file each, and one line each in `READERS`."""

from __future__ import annotations

from mindtune.controller.records.log_readers.read import READERS, LogRecords, read_log
from mindtune.controller.records.log_readers.reader import LineReader, LogFormat

__all__ = ["READERS", "LineReader", "LogFormat", "LogRecords", "read_log"]
