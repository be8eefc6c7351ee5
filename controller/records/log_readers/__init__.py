"""Readers of other programs' training logs: one file each, and one line each in `READERS`."""

from __future__ import annotations

from mindtune.controller.records.log_readers.read import (
    READERS,
    LogRecords,
    LogStream,
    open_log,
    read_log,
)
from mindtune.controller.records.log_readers.reader import LogFormat, LogReader, Record

__all__ = ["READERS", "LogFormat", "LogReader", "LogRecords", "LogStream", "Record", "open_log",
           "read_log"]  # fmt: skip
