"""The folder of a production run: whose it is, and the result of an earlier segment in it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mindtune.controller.contract import (
    ENV_MARK,
    ENV_RUN_DIR,
    RunResult,
    read_document,
    read_json,
    write_atomic,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.folder_lock import LOCK, locked
from mindtune.controller.trials.process_tree import end_processes, marked

__all__ = ["claim", "own_result"]

_LOGGER = logging.getLogger(__name__)
_STATE = ".run.json"
_UNREADABLE = "result.unreadable.json"
_LEFTOVER_GRACE_S = 2.0


@contextlib.contextmanager
def claim(out: Path, config_hash: str, mode: str, inputs: Mapping[str, str]) -> Iterator[None]:
    """Hold the folder of a run, or refuse with nothing changed.

    Args:
        out: The folder: new, empty, or of the same run, which did not finish.
        config_hash: What the run is known by.
        mode: Whether its policies act or only record.
        inputs: Name of a file -> text that the run's program finds in it.

    Raises:
        ConfigError: if something else is in it, the run has finished, another process runs in it,
            or it is not writable.
    """
    with contextlib.ExitStack() as stack:
        try:
            # Looked at before, so that no lock is left in a folder of something else.
            _check_free(out, config_hash)
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(out, what="run"))
            _check_free(out, config_hash)
            is_new = not (out / _STATE).exists()
            if not is_new:
                # Of a killed start: they may be about to end only now, and leave a result as they
                # do, which is not this segment's.
                left = f"{ENV_RUN_DIR}={out.resolve()}"
                end_processes(lambda: marked(left, named=ENV_MARK), grace_s=_LEFTOVER_GRACE_S)
                _set_result_aside(out)
            identity = {"schema": 1, "config_hash": config_hash, "mode": mode}
            with _undone_on_failure(out, [LOCK, _STATE, *inputs] if is_new else []):
                for name, text in {_STATE: json.dumps(identity) + "\n", **inputs}.items():
                    write_atomic(out / name, text)
        except OSError as error:
            raise ConfigError(
                f"the run folder {out} must be a writable folder, but: {error.strerror}; give "
                "another one with --out."
            ) from None
        yield


@contextlib.contextmanager
def _undone_on_failure(out: Path, names: Sequence[str]) -> Iterator[None]:
    """Remove files that the block has added, and the folder if they were all, if it fails."""
    try:
        yield
    except BaseException:
        for name in names:
            (out / name).unlink(missing_ok=True)
        if names:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise


def _check_free(out: Path, config_hash: str) -> None:
    """Refuse a folder that is neither new nor empty nor of the same run.

    Raises:
        ConfigError: it is of something else.
        OSError: it cannot be read.
    """
    if not out.exists() or not any(path.name != LOCK for path in out.iterdir()):
        return
    state = out / _STATE
    if not state.exists():
        raise ConfigError(
            f"the run folder {out} must be new, empty or of the same run, but it holds other "
            "files; give another one with --out."
        )
    if _known_identity(state) != config_hash:
        raise ConfigError(
            f"the run folder {out} must be new, empty or of the same run, but it is of a run with "
            "another config; give another one with --out."
        )


def _known_identity(state: Path) -> object:
    """Return the hash of the config that a run's folder was made for.

    Raises:
        ConfigError: it cannot be read.
    """
    content = read_json(state)
    if not isinstance(content, dict) or "config_hash" not in content:
        raise ConfigError(
            f"{state} must hold the config_hash of its run, but does not; give another folder "
            "with --out."
        )
    return content["config_hash"]


def _set_result_aside(out: Path) -> None:
    """Keep the result of an unfinished run under another name, or refuse a finished one."""
    result = own_result(out)
    if result is None:
        return
    if result.outcome == "ok":
        raise ConfigError(
            f"the run in {out} has finished; give another folder with --out to run it again."
        )
    index = 1
    while (target := out / f"result.segment_{index}.json").exists():
        index += 1
    (out / RunResult.FILE).rename(target)


def own_result(out: Path) -> RunResult | None:
    """Return the result that the run left; a file of the program's own is moved out of the way."""
    path = out / RunResult.FILE
    if not path.exists():
        return None
    why = f"{path} must be a file, but it is something else."
    if path.is_file():  # a pipe of that name would be waited for without end
        try:
            return read_document(RunResult, path)
        except ConfigError as error:
            why = str(error)
    kept = path.with_name(_UNREADABLE)
    path.replace(kept)
    _LOGGER.warning("%s; it is kept as %s", why, kept.name)
    return None
