"""One process at a time in a folder, by a lock that goes with the process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from mindtune.controller.errors import ConfigError

__all__ = ["LOCK", "locked"]

LOCK = ".lock"
"""Name of the file that is locked; it holds the process id of who holds it."""


@contextlib.contextmanager
def locked(root: Path, *, what: str) -> Iterator[None]:
    """Hold a folder.

    Args:
        root: The folder.
        what: What it is of, `study` or `run`, for messages.

    Raises:
        ConfigError: if another process holds it, or it cannot be written.
    """
    try:
        handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"the {what} folder {root} must be a writable folder, but: {error.strerror}; give "
            "another one with --out."
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip()
            raise ConfigError(
                f"the {what} folder {root} must be used by one process at a time, but process "
                f"{holder or 'unknown'} holds it; wait for its end, or give another folder with "
                "--out."
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)
