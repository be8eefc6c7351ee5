"""A file of rows: JSON lines, written one by one as they are measured.

The file is append-only, so that an experiment may be stopped at any time and goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TypeVar

from mindtune.controller.contract import Document
from mindtune.controller.errors import ConfigError
from mindtune.controller.records.append_file import open_append
from mindtune.controller.records.json_log import read_json_log

__all__ = ["append_row", "read_keyed_rows"]

_Row = TypeVar("_Row", bound=Document)
_Key = TypeVar("_Key", bound=Hashable)


def append_row(path: Path, row: Document) -> None:
    """Append one row; it is in the file when this returns.

    Raises:
        ConfigError: The file cannot be written.
    """
    with open_append(path) as file:
        file.write(row.to_json(indent=None) + "\n")


def read_keyed_rows(
    path: Path, model: type[_Row], key_of: Callable[[_Row], _Key]
) -> dict[_Key, _Row]:
    """Return the rows of a file in their order; none where there is no file.

    A cut last line, which a killed writer left, is passed over.

    Args:
        path: The file.
        model: What a row is.
        key_of: Returns what no two rows of one file share.

    Raises:
        ConfigError: A whole line is no row, or two rows have one key.
    """
    rows: dict[_Key, _Row] = {}
    for number, row in enumerate(read_json_log(path, model), start=1):
        key = key_of(row)
        if key in rows:
            raise ConfigError(
                f"{path}, row {number}: {key} must stand once, but it is there before; "
                "remove one of the two lines."
            )
        rows[key] = row
    return rows
