"""Readers of other programs' training logs: one file each, and one line each in `READERS`."""

from __future__ import annotations

from mindtune.controller.records.log_readers.detect import Detection, detect
from mindtune.controller.records.log_readers.fields import Names
from mindtune.controller.records.log_readers.formats import AUTO, READERS
from mindtune.controller.records.log_readers.mapping import read_mapping
from mindtune.controller.records.log_readers.read import (
    LogRecords,
    OpenLogs,
    open_log,
    open_several,
    read_log,
)
from mindtune.controller.records.log_readers.reader import LogFormat, LogReader, Record
from mindtune.controller.records.log_readers.stream import LogStream

__all__ = ["AUTO", "READERS", "Detection", "LogFormat", "LogReader", "LogRecords", "LogStream",
           "Names", "OpenLogs", "Record", "detect", "open_log", "open_several", "read_log",
           "read_mapping"]  # fmt: skip
