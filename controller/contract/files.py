"""Reading and writing documents: clear refusals, atomic writes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mindtune.controller.contract.base import ContractModel, parse
from mindtune.controller.errors import ConfigError

__all__ = ["dump_yaml", "read_document", "read_json", "read_yaml", "write_atomic", "write_json",
           "write_yaml"]  # fmt: skip

ModelT = TypeVar("ModelT", bound=ContractModel)


def read_document(model: type[ModelT], path: Path) -> ModelT:
    """Read a YAML or JSON file (by its ending) as `model`.

    Raises:
        ConfigError: if it is missing, unreadable or not valid.
    """
    content = read_json(path) if path.suffix == ".json" else read_yaml(path)
    return parse(model, content, source=str(path))


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        ConfigError: if it is missing, not text or not YAML.
    """
    try:
        return yaml.safe_load(_text(path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{path}{where} must be YAML, but: {problem}.") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; bare NaN and Infinity are read as such.

    Raises:
        ConfigError: if it is missing, not text or not JSON.
    """
    try:
        return json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno} must be JSON, but: {error.msg}.") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} must exist, but there is no such file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} must be a file, but it is a folder.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} must be text in UTF-8, but it is not.") from None
    except OSError as error:
        raise ConfigError(f"{path} must be readable, but: {error.strerror}.") from None


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new content, never a part.

    Raises:
        ConfigError: if the folder cannot be written to; nothing is left behind.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ConfigError(
            f"the folder of {path} must be writable, but: {error.strerror}."
        ) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigError(
                f"{path} must be writable, but: {error.strerror or error}."
            ) from None
        raise


def write_json(path: Path, document: ContractModel) -> None:
    """Write a document as JSON, atomically."""
    write_atomic(path, document.to_json() + "\n")


def write_yaml(path: Path, document: ContractModel, *, header: str = "") -> None:
    """Write a document as YAML, atomically; `header` is a comment put in front."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    write_atomic(path, comment + dump_yaml(document.to_plain()))


def dump_yaml(content: Any) -> str:
    """Return plain data as YAML text, keys in their own order."""
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=99)
