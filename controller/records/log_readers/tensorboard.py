"""TensorBoard's event files, read by TensorBoard's own package.

That is an optional extra (`mindtune[tensorboard]`). The scalars of one step stand one after the
other under tags; tags are understood like the names of other programs (`train/loss`, `lm loss`,
`grad-norm`, `mfu(%)`). A tag that counts samples (`lm loss vs samples`) is none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from mindtune.controller.errors import ConfigError
from mindtune.controller.records.log_readers import fields
from mindtune.controller.records.log_readers.fields import Names
from mindtune.controller.records.log_readers.reader import LogFormat, LogReader, Record

__all__ = ["TENSORBOARD", "is_event_file"]

_MARK = "tfevents"
"""Stands in the name of every event file."""


def is_event_file(path: Path) -> bool:
    """Tell an event file by its name, as TensorBoard does."""
    return _MARK in path.name


def _records(path: Path, names: Names) -> Iterator[tuple[Record, float]]:
    """Yield the scalars of an event file, those of one step together.

    Raises:
        ConfigError: if TensorBoard is not installed, or the file cannot be read.
    """
    first_s: float | None = None
    summaries = (event for event in _events(path) if event.HasField("summary"))
    for step, events in groupby(summaries, key=lambda event: int(event.step)):
        told: list[tuple[str, float | None]] = []
        for event in events:
            now_s = float(event.wall_time)
            told += [(value.tag, _scalar(value)) for value in event.summary.value]
        first_s = now_s if first_s is None else first_s
        signals = names.collect(told)
        if step >= 0 and names.tells(signals):
            signals = {"wall_time_s": now_s - first_s, **signals}
            yield Record(fields.make(step, signals)), now_s


def _scalar(value: Any) -> float | None:
    """Return a scalar of either form that TensorBoard has had; None for what is none."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor"):
        return None
    tensor = value.tensor
    if any(dimension.size != 1 for dimension in tensor.tensor_shape.dim):
        return None
    from tensorboard.util import tensor_util  # noqa: PLC0415 - an extra

    try:
        return float(tensor_util.make_ndarray(tensor).item())
    except (TypeError, ValueError):
        return None


def _events(path: Path) -> Iterator[Any]:
    try:
        from tensorboard.backend.event_processing import (  # noqa: PLC0415 - an extra
            event_file_loader,
        )
    except ImportError as error:
        raise ConfigError(
            f"{path} must be read by TensorBoard's own package, but it is not installed "
            f"({error}); pip install 'mindtune[tensorboard]'."
        ) from None
    try:
        yield from event_file_loader.LegacyEventFileLoader(str(path)).Load()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} must be a readable event file, but: {error}.") from None


class _NoReader:
    """Event files have no lines."""

    def feed(self, line: str) -> Sequence[Record] | None:  # noqa: ARG002 - of the protocol
        return None

    def finish(self) -> Sequence[Record]:
        return []


def _start(names: Names = fields.KNOWN) -> LogReader:  # noqa: ARG001 - as the others start
    return _NoReader()


TENSORBOARD = LogFormat(
    "tensorboard", "event files of TensorBoard (needs mindtune[tensorboard])", _start,
    mapped=_start, events=_records,
)  # fmt: skip
