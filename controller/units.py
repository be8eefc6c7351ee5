"""Sizes, rates and durations with units.

Sizes are binary (`58.5GB` = 58.5 x 2^30 bytes), rates decimal (`50GB/s` = 50e9 bytes per second),
durations are `90s`, `10min` or `2h`. A number without a unit is bytes, bytes per second or
seconds.
"""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator

__all__ = ["Duration", "Rate", "Size", "format_duration", "format_size", "parse_duration",
           "parse_rate", "parse_size"]  # fmt: skip

_NUMBER = r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)"
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(_NUMBER + r"\s*([KMGT]?)(i?)B?", re.IGNORECASE)
# A small b would be bits, an eighth of it.
_RATE = re.compile(_NUMBER + r"\s*([KMGTkmgt]?)B/s")
_DURATION = re.compile(_NUMBER + r"\s*(ms|s|sec|min|m|h|d)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _plain(value: object, what: str, example: str) -> float | str:
    """Return a number as it is (checked), a text stripped."""
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(_NUMBER, text):
            return _checked(float(text), value, what, example)
        return text
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"must be {what} such as {example}, but got {value!r}")  # noqa: TRY004
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    return _checked(number, value, what, example)


def _checked(number: float, value: object, what: str, example: str) -> float:
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"must be a positive {what} such as {example}, but got {value!r}")
    return number


def _whole_bytes(number: float, value: object, what: str, example: str) -> int:
    if number < 1:
        raise ValueError(f"must be at least 1 byte, a {what} such as {example}, but got {value!r}")
    return int(number)


def parse_size(value: object) -> int:
    """Return a size in bytes.

    Raises:
        ValueError: if it is not a positive size; a rate or a duration is not a size.
    """
    what, example = "size", "58.5GB"
    plain = _plain(value, what, example)
    if isinstance(plain, float):
        return _whole_bytes(plain, value, what, example)
    match = _SIZE.fullmatch(plain)
    if match is None:
        raise ValueError(f"must be a size such as {example}, but got {value!r}")
    number = float(match[1]) * 1024.0 ** _PREFIXES[match[2].upper()]
    return _whole_bytes(_checked(number, value, what, example), value, what, example)


def parse_rate(value: object) -> float:
    """Return a bandwidth in bytes per second.

    Raises:
        ValueError: if it is not a positive rate.
    """
    what, example = "rate", "50GB/s"
    plain = _plain(value, what, example)
    if isinstance(plain, float):
        return plain
    match = _RATE.fullmatch(plain)
    if match is None:
        raise ValueError(f"must be a rate such as {example}, but got {value!r}")
    return _checked(float(match[1]) * 1000.0 ** _PREFIXES[match[2].upper()], value, what, example)


def parse_duration(value: object) -> float:
    """Return a duration in seconds.

    Raises:
        ValueError: if it is not a positive duration.
    """
    what, example = "duration", "10min"
    plain = _plain(value, what, example)
    if isinstance(plain, float):
        return plain
    match = _DURATION.fullmatch(plain)
    if match is None:
        raise ValueError(f"must be a duration such as 90s, {example} or 2h, but got {value!r}")
    return _checked(float(match[1]) * _SECONDS[match[2]], value, what, example)


def format_size(size_bytes: float) -> str:
    """Return a size for reading, such as `1.5 GB` (binary)."""
    try:
        size = float(size_bytes)
    except OverflowError:  # a whole number beyond all floats
        return str(math.inf)
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"


def format_duration(seconds: float) -> str:
    """Return a duration for reading, such as `2 min 05 s`."""
    if not math.isfinite(seconds):
        return str(seconds)
    # Bounds are those of the rounded numbers: never `1000 ms` or `60 s`.
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


Size = Annotated[int, BeforeValidator(parse_size)]
Rate = Annotated[float, BeforeValidator(parse_rate)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
