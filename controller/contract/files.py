"""Reading and writing documents: clear refusals, atomic writes."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mindtune.controller.contract.base import ContractModel, parse
from mindtune.controller.errors import ConfigError

__all__ = ["dump_yaml", "read_document", "read_json", "read_yaml", "refuse_pipe", "write_atomic",
           "write_json", "write_yaml"]  # fmt: skip

ModelT = TypeVar("ModelT", bound=ContractModel)


def read_document(model: type[ModelT], path: Path) -> ModelT:
    """Read a YAML or JSON file (by its ending) as `model`.

    Raises:
        ConfigError: if it is missing, unreadable or not valid.
    """
    content = read_json(path) if path.suffix == ".json" else read_yaml(path)
    return parse(model, content, source=str(path))


_MERGE = "tag:yaml.org,2002:merge"
_MOST_VALUES = 10_000_000
"""A few lines of aliases of aliases stand for more values than any machine can walk through."""


class _Loader(yaml.SafeLoader):
    """`safe_load` that refuses a node which contains itself, or far too many others."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._open_anchors: list[Any] = []
        self._num_values = 0
        self._sizes: dict[Any, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse an alias of a node that is still open; count what each alias stands for."""
        self._num_values += 1
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            if event.anchor in self._open_anchors:
                raise yaml.composer.ComposerError(
                    problem=f"*{event.anchor} stands inside itself",
                    problem_mark=event.start_mark,
                )
            self._num_values += self._sizes.get(event.anchor, 0)
            if self._num_values > _MOST_VALUES:
                raise yaml.composer.ComposerError(
                    problem=f"with *{event.anchor} it stands for more than {_MOST_VALUES} values",
                    problem_mark=event.start_mark,
                )
        return super().compose_node(parent, index)

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        """Compose a list, open meanwhile."""
        with self._opened(anchor):
            return super().compose_sequence_node(anchor)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, open meanwhile."""
        with self._opened(anchor):
            return super().compose_mapping_node(anchor)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge (`<<`) copies: who changes the mapping that took them changes no other.

        An alias stays what it is, one node at several places.
        """
        node.value = [
            (key, copy.deepcopy(value) if key.tag == _MERGE else value)
            for key, value in node.value
        ]
        super().flatten_mapping(node)

    @contextlib.contextmanager
    def _opened(self, anchor: Any) -> Iterator[None]:
        if anchor is None:
            yield
            return
        self._open_anchors.append(anchor)
        before = self._num_values
        yield
        self._sizes[anchor] = self._num_values - before
        self._open_anchors.pop()


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Return a whole number; one in hexadecimals may be too long for any message to show."""
    number: int = loader.construct_yaml_int(node)
    str(number)  # raises the `ValueError` of an endless number
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _int)


class _UniqueKeyLoader(_Loader):
    """Refuses also a key that stands twice, where YAML lets the last one win."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check the keys as they were written, before `<<` merges others into them."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    problem=f"the key {key.value!r} stands twice in one mapping",
                    problem_mark=key.start_mark,
                )
            seen.add((key.tag, key.value))
        return node


def read_yaml(path: Path, *, repeated_keys: bool = False) -> Any:
    """Return the content of a YAML file.

    Args:
        path: the file.
        repeated_keys: let the last of several equal keys win, as other programs do; otherwise
            they are refused.

    Raises:
        ConfigError: if it is missing, not text or not YAML.
    """
    loader = _Loader if repeated_keys else _UniqueKeyLoader
    try:
        return yaml.load(_text(path), Loader=loader)  # noqa: S506 - both are safe loaders
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{path}{where} must be YAML, but: {problem}.") from None
    except ValueError as error:  # a date that does not exist, an endless number
        raise ConfigError(f"{path} must be YAML, but: {error}.") from None
    except (AttributeError, LookupError, ArithmeticError):
        # What PyYAML raises for `!!bool maybe`, `!!int ""`, `!!timestamp x` and 1:1:...:1.5.
        raise ConfigError(
            f"{path} must be YAML, but: a value is none of the type that its tag names."
        ) from None
    except RecursionError:
        raise ConfigError(f"{path} must be YAML, but: it is nested too deeply.") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; bare NaN and Infinity are read as such.

    Raises:
        ConfigError: if it is missing, not text or not JSON.
    """
    try:
        return json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno} must be JSON, but: {error.msg}.") from None
    except ValueError as error:  # an endless number
        raise ConfigError(f"{path} must be JSON, but: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{path} must be JSON, but: it is nested too deeply.") from None


def refuse_pipe(path: Path) -> None:
    """Refuse a pipe with a name, which a reader would wait for without end.

    What a shell gives for `<(command)` is below /dev and has a writer.

    Raises:
        ConfigError: it is one.
    """
    try:
        is_pipe = path.is_fifo() and path.parts[:2] != ("/", "dev")
    except (OSError, ValueError):
        return
    if is_pipe:
        raise ConfigError(f"{path} must be a file, but it is a pipe; remove it.")


def _text(path: Path) -> str:
    refuse_pipe(path)
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
    except ValueError as error:  # NUL in the name
        raise ConfigError(f"{str(path)!r} must be the name of a file, but: {error}.") from None


def write_atomic(path: Path, content: str | bytes) -> None:
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
        with os.fdopen(handle, "wb") as file:
            if isinstance(content, str):
                # Half of a character, as in a damaged name, is no reason to lose a document.
                content = content.encode("utf-8", errors="backslashreplace")
            file.write(content)
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
