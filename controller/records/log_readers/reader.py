"""What a reader of one log format is, and what readers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mindtune.policies.signals import Observation

if TYPE_CHECKING:
    from mindtune.controller.records.log_readers.fields import Names

__all__ = ["CUT", "ENDS", "INTEGER", "NUMBER", "PART", "VALUE", "LogFormat", "LogReader", "Part",
           "Record", "StepCounter", "changed", "flag", "is_whole", "number", "observed",
           "whole"]  # fmt: skip

NUMBER = (
    r"[-+]?(?:1\.#(?:QNAN|SNAN|IND|INF)\d*"
    r"|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?"
    r"|(?i:nan(?:\((?:ind|snan)\))?|inf(?:inity)?)(?!\w))"
)
"""A number as programs print it, non-finite ones included: C on Windows has `-nan(ind)` and
`1.#QNAN`."""
ENDS = r"(?=[\s,;|)\]}>]|$)"
"""What may follow a number that was printed whole. Where another writer broke in, a colour was cut
or a byte lost, something else follows, and the number is not taken."""
VALUE = NUMBER + ENDS
"""A number and what shows that it is all of it."""
CUT = "\ufffd"
"""Put behind text that ends without a line end: a number there may go on in what is missing."""
INTEGER = r"\d{1,15}"
"""A count; more digits than 15 are damage, and a float could not hold them."""
_LARGEST = 10**15


class Record(NamedTuple):
    """What a log says about one step; several records may be about the same one."""

    observation: Observation
    elapsed_s: float | None = None
    """Seconds since its process started, where the log says so: tells a restart."""


class Part(list[Record]):
    """What a part of a wrapped line gives, whose first or last part counts as the data line."""


PART = Part()
"""A part that gives nothing by itself."""


class LogReader(Protocol):
    """Reads one log, line by line; keeps what it needs between lines and nothing else."""

    def feed(self, line: str) -> Sequence[Record] | None:
        """Return what a line tells; None where it is no data line. Never raises.

        A line that was understood may give nothing yet: its record comes with a later line.
        """

    def finish(self) -> Sequence[Record]:
        """Return what was still held back when the log ended."""


@dataclass(frozen=True)
class LogFormat:
    """A format by name, with a fresh reader per log."""

    name: str
    description: str
    start: Callable[[], LogReader]
    lag: int = 1
    """Records by which a second writer of the same steps may be behind the first one."""
    by_line: bool = True
    """False: the reader takes text as it comes, lines do not matter."""
    begins_anew: bool = False
    """Whether each of several files is one by itself, such as a table with its header."""
    is_general: bool = False
    """Whether it takes what any program writes: then it is no rival of a format of one program."""
    mapped: Callable[[Names], LogReader] | None = None
    """Starts a reader that takes other names for the signals; None: its names are fixed."""
    events: Callable[[Path, Names], Iterator[tuple[Record, float]]] | None = None
    """Reads the records, with the time of each, of a file that has no lines; then `start` is not
    used."""

    def reader(self, names: Names | None) -> LogReader:
        """Return a fresh reader.

        Args:
            names: the user's own names, for a format that takes them; None: those that are known.
        """
        return self.start() if names is None or self.mapped is None else self.mapped(names)


_BLANK = vars(Observation(step=0))


def observed(**signals: Any) -> Observation:
    """Return an observation with some signals; the others were not measured.

    A frozen class sets its three dozen fields one by one, which takes as long as reading a line.
    """
    made = object.__new__(Observation)
    vars(made).update(_BLANK)
    vars(made).update(signals)
    return made


def changed(observation: Observation, changes: dict[str, Any]) -> Observation:
    """Return a copy with changes, as fast as `observed` makes one."""
    made = object.__new__(Observation)
    vars(made).update(vars(observation))
    vars(made).update(changes)
    return made


def number(text: str) -> float:
    """Return the number that `NUMBER` matched."""
    try:
        return float(text)
    except ValueError:
        infinite = math.copysign(math.inf, -1 if text.startswith("-") else 1)
        return infinite if "inf" in text.lower() else math.nan


def flag(word: str) -> float | None:
    """Return 1 or 0 for a truth value as programs print it; None for anything else."""
    return {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0}.get(word.strip().lower())


def is_whole(value: float) -> bool:
    """Tell whether a number is a count."""
    return math.isfinite(value) and value.is_integer() and 0 <= value < _LARGEST


def whole(value: float | None) -> int | None:
    """Return a positive count as an integer, None for anything else."""
    return int(value) if value is not None and value > 0 and is_whole(value) else None


class StepCounter:
    """Counts optimizer steps on over epochs in which a log counts from the start again."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._offset = 0
        self._last = 0
        self._counted = 0
        self._counts_on = False
        self._first_epoch = 1

    def count(self, epoch: int | None, step: int, steps_per_epoch: int | None = None) -> int:
        """Return the step since the start of the log's first epoch.

        Args:
            epoch: None: the log has none, and its steps count on.
            step: as printed; inside the epoch, or counted on over epochs.
            steps_per_epoch: None: taken from the last step of the epoch before. Where the step
                rises over the end of an epoch, it is the total of all epochs.
        """
        if epoch is None:
            return step
        self._first_epoch = min(self._first_epoch, epoch)
        if self._epoch is not None and epoch != self._epoch:
            self._counts_on = epoch > self._epoch and step > self._last
        if steps_per_epoch and step <= steps_per_epoch and not self._counts_on:
            self._epoch, self._last = epoch, step
            return (epoch - self._first_epoch) * steps_per_epoch + step
        if self._epoch is not None and epoch < self._epoch:
            self._offset, self._counted = 0, 0  # another run, appended
        elif self._epoch is not None and epoch > self._epoch and step <= self._last:
            # At least one step lies between two records, even if both are the first of an epoch.
            self._offset += max(self._last, self._counted + 1 - step - self._offset)
        self._epoch, self._last = epoch, step
        self._counted = self._offset + step
        return self._counted
