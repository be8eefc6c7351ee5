"""Reading files of one JSON object per line, which may still be written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from mindtune.controller.contract import ContractModel, parse, refuse_pipe
from mindtune.controller.errors import ConfigError

__all__ = ["read_json_log"]

ModelT = TypeVar("ModelT", bound=ContractModel)


def read_json_log(path: Path, model: type[ModelT]) -> list[ModelT]:
    """Read every whole line; a cut last one (a killed writer) is passed over.

    A missing file is an empty one: it is made with the first line.

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
                    records.append(_record(line, model, source=f"{path}, line {number}"))
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be a readable text file, but: {error}.") from None
    return records


def _record(line: str, model: type[ModelT], *, source: str) -> ModelT:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} must be JSON, but: {error.msg}.") from None
    except (ValueError, RecursionError) as error:  # an endless number, or brackets without end
        raise ConfigError(f"{source} must be JSON, but: {error}.") from None
    return parse(model, content, source=source)
